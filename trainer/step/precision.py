"""The precision of a run with train.precision auto: BF16 on CUDA; on a CPU the faster one.

On a CPU either can be faster: BF16 speeds up large products, but conversions, and products that oneDNN compiles again
for the shapes of a batch, cost a small model more than it saves. So the run's first batches are computed in both
precisions, each batch once in each, as in training. This does not affect the run: it uses a separate tower, random
rows, and a separate generator of random numbers.
"""

import time
from pathlib import Path
from statistics import mean
from typing import Literal

import torch

from logitmix.comm.collectives import agreed, on_all_ranks, on_first_rank
from logitmix.comm.process_group import Ranks
from logitmix.modules.batch import Bags
from logitmix.modules.config import ModelConfig
from logitmix.modules.initialize import initialized
from logitmix.modules.model import SampledLosses
from logitmix.modules.towers import Tower
from logitmix.trainer.data.batches import TrainingBatches
from logitmix.trainer.parallel.parallelize import computes_bf16
from logitmix.trainer.run.folder import checkpoint_paths, read_config

GAIN = 0.05
"""BF16 is chosen if FP32 takes longer by more than this share: at about equal speed, FP32 is better because more
exact."""
BATCHES, SECONDS = 10, 1.5
"""Measuring ends after this many batches or seconds of CPU time, whichever comes first."""


Precision = Literal["auto", "bf16", "fp32"]


def choose_precision(
    wanted: Precision, config: ModelConfig, run: Path, batches: TrainingBatches, ranks: Ranks
) -> tuple[Precision, str]:
    """Returns the precision `wanted` (train.precision), with fp32 or bf16 instead of auto, the same on every rank, and
    the reason ("" if nothing was to be chosen). A run with checkpoints keeps its precision. Measuring takes a second or
    two, or a batch if that is longer.

    Raises ValueError on every rank if the run's configuration cannot be read. Collective.
    """
    if wanted != "auto":
        return wanted, ""
    if noted := on_first_rank(lambda: read_config(run).train.precision if checkpoint_paths(run) else None, ranks):
        return noted, "as the run began"
    if ranks.device.type == "cuda":
        return "bf16", "GPUs are faster in it"
    if agreed(not computes_bf16(ranks.device), ranks):
        return "fp32", "this CPU has no BF16 arithmetic"
    fp32, bf16 = map(mean, zip(*on_all_ranks(lambda: _seconds_a_step(config, batches), ranks), strict=True))
    why = f"loss and gradients take {fp32 * 1000:,.0f} ms a step in FP32, {bf16 * 1000:,.0f} ms in BF16"
    return "bf16" if fp32 > bf16 * (1 + GAIN) else "fp32", why


def _seconds_a_step(config: ModelConfig, batches: TrainingBatches) -> tuple[float, float]:
    """CPU seconds for this rank's loss and gradients, in FP32 and in BF16: the minimum over its first batches, which
    the machine's other work disturbs least."""
    generator = torch.Generator().manual_seed(0)
    tower = initialized(lambda: Tower(config, batches.schema), generator)
    losses, parameters = SampledLosses(tower), list(tower.parameters())
    # BF16 first, so that the slow first pass does not count in its favor.
    spent: dict[str, list[float]] = {"bf16": [], "fp32": []}
    start = time.thread_time()
    for step in range(BATCHES):
        batch = batches.at(step)
        rows = {}
        for name, ids in batch.ids.items():
            count = len(ids.offsets) - 1 if isinstance(ids, Bags) else len(ids)
            rows[name] = torch.randn(count, batches.schema.table(name).dim, generator=generator, requires_grad=True)
        for precision, of_batches in spent.items():
            # CPU time of this thread, because other processes may use the cores.
            before = time.thread_time()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = losses(rows, batch)["loss"]
            torch.autograd.grad(loss, [*parameters, *rows.values()], allow_unused=True)
            of_batches.append(time.thread_time() - before)
        if time.thread_time() - start > SECONDS:
            break
    return min(spent["fp32"]), min(spent["bf16"])
