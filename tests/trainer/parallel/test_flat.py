"""The tower's weights as one parameter: the losses and gradients of the tower itself, on any number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import two_ranks
from small_data import a_pipeline, small_config, write_dataset
from torch import Tensor

from logitmix.modules.model import SampledLosses
from logitmix.trainer.config import Config
from logitmix.trainer.parallel import parallelize
from logitmix.trainer.parallel.parallelize import autocast
from logitmix.trainer.step.pipeline import Pipeline

STEPS = 3


def plainly(pipeline: Pipeline) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The losses of the received rows, and the gradients of weights, a mean over the ranks, and of these rows."""
    model, ranks = pipeline.model, pipeline.model.ranks
    rows = {name: row_VD.detach().clone().requires_grad_() for name, row_VD in pipeline.rows.items()}
    with autocast(model.train.precision, ranks.device):
        losses = SampledLosses(model.tower)(rows, pipeline.batch)
    wanted = [*model.tower.parameters(), *rows.values()]
    scale = torch.tensor(float(ranks.world_size))
    gradients = [*torch.autograd.grad(losses["loss"], wanted, scale, allow_unused=True, materialize_grads=True)]
    for place in range(len(wanted) - len(rows)) if ranks.world_size > 1 else ():
        sent = (gradients[place] / ranks.world_size).to(model.replicated.wire)
        dist.all_reduce(sent, group=ranks.group)
        gradients[place] = sent.float()
    return losses, gradients


def different(config: Config) -> list[str]:
    """Of some steps on all ranks, the losses and gradients that are not those of the tower itself."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        # On any processor, as slow as it may be.
        patch.setattr(parallelize, "computes_bf16", lambda device: True)
        with a_pipeline(config, STEPS) as pipeline:
            for step in range(STEPS):
                pipeline.receive_rows()
                losses, gradients = plainly(pipeline)
                pipeline.loss()
                found += [f"{step} {name}" for name, of in losses.items() if not torch.equal(pipeline.losses[name], of)]
                pipeline.backward()
                pipeline.check_gradients()
                got = [*pipeline.model.tower.parameters(), *pipeline.rows.values()]
                for place, (weight, gradient) in enumerate(zip(got, gradients, strict=True)):
                    if weight.grad is None or not torch.equal(weight.grad, gradient):
                        found.append(f"{step} {place}")
                pipeline.apply_gradients()
    return found


SETTINGS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp32": {"train.precision": "fp32"},
    "hstu": {"model.encoder.kind": "hstu", "model.similarity.kind": "dot"},
    "pairs in torch": {"model.similarity.kind": "neumf", "model.features": ["all"]},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_equals_separate_parameters(name: str, tmp_path: Path) -> None:
    assert not different(small_config(write_dataset(tmp_path / "data", features=True), SETTINGS[name]))


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_equals_separate_parameters_on_two_ranks(wire: str, tmp_path: Path) -> None:
    config = small_config(write_dataset(tmp_path / "data"), {"comm.dense": wire})
    assert two_ranks.run(different, config) == [[], []]
