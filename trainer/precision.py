"""Which precision a run trains in where train.precision is auto: BF16 on CUDA; on a CPU the faster one.

On a CPU that can be either: BF16 makes large products faster, but oneDNN compiles BF16 products anew for the shapes of
each batch, which costs a small model more than it saves. So the run's first batches are computed in both, each batch
once in each, as in training. No trace of it is left in the run: the tower is one made for the purpose, with random
rows, and all random numbers come from a generator of its own.
"""

import time
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch

from logitmix.comm.collectives import agreed, on_all_ranks, on_first_rank
from logitmix.comm.process_group import Ranks
from logitmix.modules.batch import Bags
from logitmix.modules.config import ModelConfig
from logitmix.modules.model import SampledLosses
from logitmix.modules.towers import Tower
from logitmix.trainer.config import Config
from logitmix.trainer.data.batches import TrainingBatches
from logitmix.trainer.parallelize import computes_bf16
from logitmix.trainer.run import checkpoint_paths, read_config

GAIN = 0.05
"""BF16 is taken where FP32 takes longer by more than this share: where they are about equal, FP32 is more exact."""
BATCHES, SECONDS = 10, 1.5
"""What measuring ends after, whichever comes first: batches, or seconds of the CPU."""


def choose_precision(config: Config, run: Path, batches: TrainingBatches, ranks: Ranks) -> tuple[Config, str]:
    """The configuration with fp32 or bf16 in place of auto, the same on every rank, and why ("" where nothing was to be
    chosen). A run with checkpoints keeps its precision. Measuring takes a second or two, or a batch if that is longer.

    Raises ValueError on every rank where the run's configuration cannot be read. Collective.
    """
    if config.train.precision != "auto":
        return config, ""
    if noted := on_first_rank(lambda: read_config(run).train.precision if checkpoint_paths(run) else None, ranks):
        precision, why = noted, "as the run began"
    elif ranks.device.type == "cuda":
        precision, why = "bf16", "GPUs are faster in it"
    elif agreed(not computes_bf16(ranks.device), ranks):
        precision, why = "fp32", "this CPU has no BF16 arithmetic"
    else:
        fp32, bf16 = map(mean, zip(*on_all_ranks(lambda: _seconds_a_step(config.model, batches), ranks), strict=True))
        precision = "bf16" if fp32 > bf16 * (1 + GAIN) else "fp32"
        why = f"loss and gradients take {fp32 * 1000:,.0f} ms a step in FP32, {bf16 * 1000:,.0f} ms in BF16"
    return replace(config, train=replace(config.train, precision=precision)), why


def _seconds_a_step(config: ModelConfig, batches: TrainingBatches) -> tuple[float, float]:
    """Of the CPU for this rank's loss and gradients, in FP32 and in BF16: the least over its first batches, which the
    machine's other work has disturbed least."""
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        tower = Tower(config, batches.schema)
    tower = tower.to_empty(device="cpu")
    tower.reset_parameters(generator)
    losses, parameters = SampledLosses(tower), list(tower.parameters())
    # BF16 first, so that what the very first pass takes longer does not speak for it.
    spent: dict[str, list[float]] = {"bf16": [], "fp32": []}
    start = time.thread_time()
    for step in range(BATCHES):
        batch = batches.at(step)
        rows = {}
        for name, ids in batch.ids.items():
            count = len(ids.offsets) - 1 if isinstance(ids, Bags) else len(ids)
            rows[name] = torch.randn(count, batches.schema.table(name).dim, generator=generator, requires_grad=True)
        for precision, of_batches in spent.items():
            # Of this thread alone: other processes may have the cores meanwhile.
            before = time.thread_time()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = losses(rows, batch)["loss"]
            torch.autograd.grad(loss, [*parameters, *rows.values()], allow_unused=True)
            of_batches.append(time.thread_time() - before)
        if time.thread_time() - start > SECONDS:
            break
    return min(spent["fp32"]), min(spent["bf16"])
