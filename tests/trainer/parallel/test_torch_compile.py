"""train.compile: the same training, up to rounding."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_data import a_pipeline, small_config, write_dataset
from torch import Tensor

from logitmix.trainer.config import Config
from logitmix.trainer.parallel import compiled

STEPS = 4
SETTINGS: dict[str, dict[str, Any]] = {
    "sasrec": {"model.encoder.dropout": 0.2},
    **{
        kind: {"model.encoder.kind": kind, "model.similarity.kind": "dot", "model.hindexer.weight": 0.0}
        for kind in ("ligr", "hstu", "fuxi")
    },
}


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Inductor compiles for minutes; the others run the same graphs as they are, one of them with their derivatives."""
    for owner, names in compiled._LEFT_ALONE.items():
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(compiled, "BACKEND", request.param)
    torch._dynamo.reset()
    # What is compiled holds for batches of all sizes.
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield


def losses_of(config: Config) -> list[Tensor]:
    with a_pipeline(config, STEPS) as pipeline:
        return [pipeline.train_step()["loss"].detach() for _ in range(STEPS)]


@pytest.mark.parametrize(
    ("backend", "name", "precision"),
    [
        ("eager", "sasrec", "bf16"),
        *(
            pytest.param("aot_eager", *case, marks=pytest.mark.slow)
            for case in (("sasrec", "bf16"), ("ligr", "fp32"), ("hstu", "fp32"), ("fuxi", "fp32"))
        ),
        pytest.param("inductor", "sasrec", "bf16", marks=pytest.mark.slow),
        pytest.param("inductor", "hstu", "fp32", marks=pytest.mark.slow),
    ],
    indirect=["backend"],
)
@pytest.mark.usefixtures("backend")
def test_equals_eager_up_to_rounding(name: str, precision: str, tmp_path: Path) -> None:
    settings = SETTINGS[name] | {"train.precision": precision, "train.epochs": 4}
    data = write_dataset(tmp_path / "data")
    eager, of_compiled = (
        losses_of(small_config(data, settings | {"train.compile": compile})) for compile in (False, True)
    )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    tolerance = {"fp32": 1e-5, "bf16": 2e-2}[precision]
    for ours, theirs in zip(of_compiled, eager, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=0)


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise compiled.InvalidCxxCompiler

    monkeypatch.setattr(compiled, "get_cpp_compiler", none)
    with pytest.raises(ValueError, match=r"^train\.compile needs a C\+\+ compiler such as g\+\+; install it, or set"):
        compiled.compile_towers(None, torch.device("cpu"))  # type: ignore[arg-type]
