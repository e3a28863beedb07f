"""A training step of MoL: the fused loss compared with other forms; and the speed of a recipe's steps.

    python -m benchmarks.train_step
    python -m benchmarks.train_step --recipe ml-1m-mol --data DATASET

The first compares time and memory, on one thread, of sampled softmax and all gradients from query and item embeddings:
both towers, 8x8 components of 32, gates of hidden width 128, dropout as in the recipes. Negatives are shared by a
sequence of 200 positions, or by the batch; the batch runs at once, or in 16 parts. A CPU without BF16
arithmetic is measured in FP32 alone. CPU seconds and peak memory are those of fresh processes, run in turn.
"""

import time
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import tyro
from torch import Tensor

from benchmarks.estimates import a_pipeline
from benchmarks.measure import Spent, in_turn, machine, median, print_table, spent, spread
from logitmix.modules.config import MoLConfig
from logitmix.modules.losses.blockwise import Examples, blockwise_loss, softmax
from logitmix.modules.noise import Noise
from logitmix.modules.similarity.mol import MoL
from logitmix.trainer.commands.sizing import load_sized
from logitmix.trainer.config import with_settings
from logitmix.trainer.parallel.parallelize import computes_bf16
from logitmix.trainer.quiet import quietly
from logitmix.trainer.step.memory import set_up_memory

DIM, ITEMS, LENGTH = 64, 3706, 200
"""Width, items of a batch (all of MovieLens-1M), positions of a sequence."""

Share = Literal["sequence", "batch"]
Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class Options:
    positions: int = 25600
    negatives: int = 128
    repetitions: int = 3
    recipe: str = ""
    """Instead, measure training steps of this recipe, in one process and one thread."""
    data: str = ""
    """The recipe's prepared dataset."""
    steps: int = 5
    """Training steps of the recipe, after two to warm up."""


def main(options: Options) -> None:
    if options.recipe:
        print(throughput(options))
        return
    tasks = {name: partial(step, *form, options) for name, form in FORMS.items() if form[2] == "fp32" or BF16}
    found = in_turn(tasks, options.repetitions)
    base, rows = median(next(iter(found.values()))), []
    for name, runs in found.items():
        middle = median(runs)
        ratios = f"{middle.cpu_s / base.cpu_s:.3f}", f"{middle.peak_mb / base.peak_mb:.3f}"
        rows.append((name, spread([r.cpu_s for r in runs], 2), spread([r.peak_mb for r in runs], 0), *ratios))
    title = f"Towers and loss, forward and backward: {options.positions} positions x {options.negatives} negatives"
    print_table(("", "CPU s", "peak MB", "time / the first", "memory / the first"), rows, title)
    print(f"Median of {options.repetitions} (range), 1 thread; {machine()}.")


def throughput(options: Options) -> str:
    """Trains a recipe for some steps; says how many positions it trains in a CPU second, batches included."""
    torch.set_num_threads(1)
    config = with_settings(load_sized(options.recipe, options.data)[0], {"data.path": options.data})
    config = with_settings(config, {"train.precision": "bf16" if BF16 else "fp32"})
    with quietly(), a_pipeline(config, 2 + options.steps) as pipeline:
        pipeline.train_step()
        pipeline.train_step()
        began, positions = time.process_time(), 0
        for _ in range(options.steps):
            pipeline.train_step()
            positions += len(pipeline.batch.target_T)
        spent_s = time.process_time() - began
    return (
        f"{options.recipe}, {config.train.precision}: {positions / spent_s:,.0f} positions a CPU second, "
        f"{spent_s / options.steps * 1e3:,.0f} ms of CPU a step; {options.steps} steps, 1 thread; {machine()}"
    )


BF16 = computes_bf16(torch.device("cpu"))
PARTS = 16
"""Parts of a batch, each with its own backward: the memory is that of one part."""
FORMS: dict[str, tuple[bool, Share, Precision, int]] = {
    "blocks in plain torch, by sequence, fp32": (False, "sequence", "fp32", 1),
    "fused, by sequence, fp32": (True, "sequence", "fp32", 1),
    "fused, by batch, fp32": (True, "batch", "fp32", 1),
    "fused, by sequence, bf16": (True, "sequence", "bf16", 1),
    "fused, by batch, bf16": (True, "batch", "bf16", 1),
    "fused, by sequence, 16 parts, fp32": (True, "sequence", "fp32", PARTS),
    "fused, by sequence, 16 parts, bf16": (True, "sequence", "bf16", PARTS),
    "fused, by batch, 16 parts, bf16": (True, "batch", "bf16", PARTS),
}
"""Fused or not; what shares its negatives; precision; parts of the batch, each with its own backward."""


def step(fused: bool, share: Share, precision: Precision, parts: int, options: Options) -> Spent:
    """Loss and gradients from query and item embeddings, towers included."""
    set_up_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mol, noise = MoL(DIM, MoLConfig()), Noise(1)
    item_XD = torch.randn(ITEMS, DIM)
    gradient_XD = torch.zeros_like(item_XD)
    query_TD = torch.randn(options.positions, DIM)
    batches = [_batch(rows, options.negatives, share) for rows in torch.arange(options.positions).chunk(parts)]

    def work(batches: list[tuple[Tensor, Examples]]) -> None:
        for id_V, examples in batches:
            leaf_TD = query_TD[examples.row_T].requires_grad_()
            leaf_VD = item_XD[id_V].requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                query, item = mol.query(leaf_TD, examples.row_T, noise), mol.item(leaf_VD, id_V, noise)
                if fused:
                    loss = mol.sampled_softmax(query, item, examples, noise)
                else:
                    loss = blockwise_loss(softmax, mol, query, item, examples, noise, mol.config.gate_dropout)
            # Freed before the next part, as in a training loop.
            del query, item
            loss.backward()
            gradient_XD.index_add_(0, id_V, leaf_VD.grad)

    work([_batch(torch.arange(LENGTH), options.negatives, "sequence")])
    return spent(partial(work, batches))


def _batch(row_T: Tensor, negatives: int, share: Share) -> tuple[Tensor, Examples]:
    """The unique items that positions and their negatives name, and both as indices into them."""
    bounds = [*range(0, len(row_T), LENGTH), len(row_T)] if share == "sequence" else [0, len(row_T)]
    named = torch.randint(ITEMS, (len(row_T) + (len(bounds) - 1) * negatives,))
    id_V, index = named.unique(return_inverse=True)
    return id_V, Examples(row_T, index[: len(row_T)], bounds, index[len(row_T) :].view(-1, negatives))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
