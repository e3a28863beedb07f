import time
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_data import small_config, write_dataset

from logitmix.comm.process_group import process_group
from logitmix.modules.model import SampledLosses
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.loop import train, training_batches
from logitmix.trainer.run.folder import read_config
from logitmix.trainer.run.metrics import read_rows
from logitmix.trainer.step import precision

SETTINGS = {
    "model.features": ["all"],
    "model.item_id_dropout": 0.2,
    "model.encoder.dropout": 0.3,
    "tables.tags.pooled": True,
    "evaluate.every_epochs": 0,
}
"""Of all kinds of tables and random numbers."""


@pytest.fixture(autouse=True)
def has_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})


@pytest.mark.parametrize(
    ("chosen", "gain", "other"), [pytest.param("fp32", inf, -1.0, marks=pytest.mark.slow), ("bf16", -1.0, inf)]
)
def test_choosing_leaves_no_trace_and_is_done_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    chosen: str,
    gain: float,
    other: float,
) -> None:
    """The losses of a run with auto are, to the last bit, those of one that names the precision; continued it keeps it,
    though the other were faster by now."""
    data = write_dataset(tmp_path / "data", features=True)
    named, auto = ({**SETTINGS, "train.precision": each} for each in (chosen, "auto"))
    train(small_config(data, named), tmp_path / "named")
    monkeypatch.setattr(precision, "GAIN", gain)
    capsys.readouterr()
    train(small_config(data, auto | {"train.epochs": 1}), tmp_path / "auto")
    said = {"fp32": "FP32", "bf16": "BF16 autocast"}[chosen]
    assert f"precision   {said} (loss and gradients take" in capsys.readouterr().err

    monkeypatch.setattr(precision, "GAIN", other)
    train(small_config(data, auto), tmp_path / "auto")
    assert f"precision   {said} (as the run began)\n" in capsys.readouterr().err
    assert read_config(tmp_path / "auto") == read_config(tmp_path / "named")
    losses = [[(row["loss"], row["gradient_norm"]) for row in read_rows(tmp_path / run)] for run in ("auto", "named")]
    assert losses[0] == losses[1] and len(losses[0]) == 8


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ([(0.0104, 0.01)], "fp32"),
        ([(0.0106, 0.01)], "bf16"),
        ([(0.01, 0.02)], "fp32"),
        ([(0.01, 0.011), (0.01, 0.007)], "bf16"),
        ([(0.01, 0.011), (0.02, 0.011)], "bf16"),
    ],
)
def test_bf16_is_taken_where_all_ranks_together_are_clearly_faster_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: list[tuple[float, float]], chosen: str
) -> None:
    monkeypatch.setattr(precision, "on_all_ranks", lambda action, ranks: seconds)
    assert choose(tmp_path)[0] == chosen


def choose(run: Path, device: str = "cpu", **settings: Any) -> tuple[str, str]:
    ranks: Any = SimpleNamespace(rank=0, world_size=1, device=torch.device(device))
    config = small_config(run, {"train.precision": "auto"} | settings)
    return precision.choose_precision(config.train.precision, config.model, run, None, ranks)  # type: ignore[arg-type]


def test_where_there_is_nothing_to_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_seconds_a_step", lambda *_: pytest.fail("measured"))
    assert choose(tmp_path, "cuda") == ("bf16", "GPUs are faster in it")
    assert choose(tmp_path, **{"train.precision": "bf16"}) == ("bf16", "")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": False})
    assert choose(tmp_path) == ("fp32", "this CPU has no BF16 arithmetic")


@pytest.mark.long
@pytest.mark.parametrize("slow", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_the_slower_precision_takes_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str) -> None:
    """One of them has at least 60 ms of work in each batch, and 600 ms in the first, which warms up: that does not
    count, unless it is the only one."""
    batches_seen, losses = [], SampledLosses.forward

    def forward(self: SampledLosses, rows: Any, batch: Any) -> dict[str, torch.Tensor]:
        batches_seen.append(batch.target_T.tolist())
        until = time.thread_time() + (0.6 if len(batches_seen) < 3 else 0.06)
        while torch.is_autocast_enabled("cpu") == (slow == "bf16") and time.thread_time() < until:
            pass
        return losses(self, rows, batch)

    monkeypatch.setattr(SampledLosses, "forward", forward)
    monkeypatch.setattr(precision, "SECONDS", 60)
    monkeypatch.setattr(precision, "BATCHES", 2)
    config = small_config(write_dataset(tmp_path / "data"))
    with process_group("cpu", 60) as ranks:
        batches = training_batches(config, load_dataset(tmp_path / "data"), ranks)
        state = torch.get_rng_state()
        fp32, bf16 = precision._seconds_a_step(config.model, batches)
        assert torch.get_rng_state().equal(state)
        longer, shorter = (fp32, bf16) if slow == "fp32" else (bf16, fp32)
        assert shorter < longer and 0.06 < longer < 0.6
        assert len(batches_seen) == 4 and len(set(map(tuple, batches_seen))) == 2

        batches_seen.clear()
        monkeypatch.setattr(precision, "SECONDS", 0.1)
        assert max(precision._seconds_a_step(config.model, batches)) > 0.6
        assert len(batches_seen) == 2
