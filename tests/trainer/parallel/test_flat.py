"""The tower's weights as one parameter: the same losses and gradients as with DDP, on any number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
import two_ranks
from small_data import a_pipeline, small_config, write_dataset
from torch import Tensor

from logitmix.trainer.config import Config
from logitmix.trainer.parallel import parallelize
from logitmix.trainer.parallel.flat import FlatLosses

STEPS = 3


def trained(config: Config, flat: bool) -> dict[str, Tensor]:
    """Losses, gradients and weights of some steps, on all ranks."""
    found: dict[str, Tensor] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallelize, "FLAT_ON", ("cpu",) if flat else ())
        # On any processor, as slow as it may be.
        patch.setattr(parallelize, "computes_bf16", lambda device: True)
        with a_pipeline(config, STEPS) as pipeline:
            assert isinstance(pipeline.model.replicated, FlatLosses) == flat
            for step in range(STEPS):
                pipeline.receive_rows()
                pipeline.loss()
                pipeline.backward()
                pipeline.check_gradients()
                found |= {f"{step} loss {name}": loss.detach() for name, loss in pipeline.losses.items()}
                named = pipeline.model.tower.named_parameters()
                # Apart from the memory that the next step writes.
                found |= {f"{step} d {name}": weight.grad.clone() for name, weight in named}
                found[f"{step} d rows"] = pipeline.rows["item"].grad.clone()
                pipeline.apply_gradients()
                named = pipeline.model.tower.named_parameters()
                found |= {f"{step} {name}": weight.detach().clone() for name, weight in named}
    return found


SETTINGS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp32": {"train.precision": "fp32"},
    "hstu": {"model.encoder.kind": "hstu", "model.similarity.kind": "dot"},
    "pairs in torch": {"model.similarity.kind": "neumf", "model.features": ["all"]},
    "clipped": {"train.clip": 0.1, "dense.optimizer": "sgd"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_equals_separate_parameters(name: str, tmp_path: Path) -> None:
    config = small_config(write_dataset(tmp_path / "data", features=True), SETTINGS[name])
    flat, apart = trained(config, True), trained(config, False)
    assert flat.keys() == apart.keys()
    # The norm of one tensor and of many is rounded differently.
    for key, of in apart.items():
        if name == "clipped":
            torch.testing.assert_close(flat[key], of, rtol=1e-5, atol=1e-7)
        else:
            assert torch.equal(flat[key], of), key


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_equals_separate_parameters_on_two_ranks(wire: str, tmp_path: Path) -> None:
    config = small_config(write_dataset(tmp_path / "data"), {"comm.dense": wire})
    for flat, apart in zip(two_ranks.run(trained, config, True), two_ranks.run(trained, config, False), strict=True):
        assert flat.keys() == apart.keys()
        differ = [key for key, of in apart.items() if not torch.equal(flat[key], of)]
        assert not differ


def test_a_weight_is_a_part_of_the_one_parameter(tmp_path: Path) -> None:
    """So that a checkpoint is read into it, and the optimizer moves it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallelize, "FLAT_ON", ("cpu",))
        with a_pipeline(small_config(write_dataset(tmp_path / "data")), 2) as pipeline:
            flat = pipeline.model.replicated
            assert isinstance(flat, FlatLosses) and [name for name, _ in flat.named_parameters()] == ["flat_P"]
            for weight in pipeline.model.tower.parameters():
                assert weight.untyped_storage().data_ptr() == flat.flat_P.untyped_storage().data_ptr()
                assert weight.storage_offset() % 64 == 0
            pipeline.train_step()
            before = pipeline.model.loss(pipeline.rows, pipeline.batch)["loss"].item()
            with torch.no_grad():
                next(pipeline.model.tower.parameters()).add_(0.5)
            assert pipeline.model.loss(pipeline.rows, pipeline.batch)["loss"].item() != before
