"""The memory that `logitmix plan` estimates for training, beside what training takes.

    python -m benchmarks.estimates

Three models train some steps in fresh processes on the CPU; the JSON has the growth of a process's memory at its peak
(resident set) beside the estimate, in MB.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from benchmarks.measure import Spent, in_turn, spent
from logitmix.comm.process_group import Ranks, process_group
from logitmix.trainer.commands.plan import plan_job
from logitmix.trainer.config import Config, load_recipe, with_settings
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.data.writer import DatasetContents, write_dataset
from logitmix.trainer.loop import parallel_model, training_batches
from logitmix.trainer.parallel.optimizer import dense_optimizer
from logitmix.trainer.parallel.plan import Devices
from logitmix.trainer.step.memory import set_up_memory
from logitmix.trainer.step.pipeline import Pipeline


class Size(NamedTuple):
    recipe: str
    items: int
    length: int
    settings: dict[str, Any]


COMMON = {"train.precision": "fp32", "train.device": "cpu", "tables.optimizer": "rowwise_adagrad"}
SIZES = {
    "MoL, 16 x 100 positions": Size("ml-1m-mol", 5_000, 100, {"train.batch_size": 16, "model.loss.negatives": 64}),
    "MoL, 64 x 150 positions": Size("ml-1m-mol", 50_000, 150, {"train.batch_size": 64, "model.loss.negatives": 16}),
    "dot, 128 x 150 positions": Size("ml-1m-dot", 500_000, 150, {"train.batch_size": 128}),
}
STEPS = 4


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        configs = {}
        for number, (name, size) in enumerate(SIZES.items()):
            data = Path(folder, str(number))
            write_data(data, size)
            settings = COMMON | {"data.path": str(data)} | size.settings
            configs[name] = with_settings(load_recipe(size.recipe), settings)
        found = in_turn({name: partial(training_memory, config) for name, config in configs.items()}, 1)
        rows = [
            {
                "model": name,
                "measured": found[name][0].peak_mb * 2**20 / 1e6,
                "estimated": plan_job(config, Devices(1, 1, "cpu")).rank_bytes / 1e6,
            }
            for name, config in configs.items()
        ]
    print(json.dumps(rows))


def write_data(out: Path, size: Size) -> None:
    """A dataset of random histories that are about so long."""
    random = np.random.default_rng(0)
    lengths = random.integers(size.length * 3 // 4, size.length * 5 // 4, STEPS * size.settings["train.batch_size"])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    actions = random.integers(0, size.items, offsets[-1])
    names = pa.array(np.arange(size.items)).cast(pa.string())
    write_dataset(out, DatasetContents(offsets, actions, np.arange(offsets[-1]), names), "made")


def training_memory(config: Config) -> Spent:
    """Of some steps of training, in a process that has trained a small model before."""
    torch.set_num_threads(1)
    set_up_memory()
    small = {"train.batch_size": 1, "model.loss.negatives": 2, "model.similarity.kind": "dot", "model.dim": 8}
    train(with_settings(config, small), 2)
    return spent(lambda: train(config, STEPS))


def train(config: Config, steps: int) -> None:
    with a_pipeline(config, steps) as pipeline:
        for _ in range(steps):
            pipeline.train_step()


@contextmanager
def a_pipeline(config: Config, steps: int) -> Iterator[Pipeline]:
    """That trains so many steps in this process."""
    with process_group(config.train.device, 120) as ranks, pipeline_of(config, ranks, steps) as pipeline:
        yield pipeline


@contextmanager
def pipeline_of(config: Config, ranks: Ranks, steps: int) -> Iterator[Pipeline]:
    """Makes a pipeline that trains the configured model on these ranks for so many steps. Collective."""
    dataset = load_dataset(config.data.path)
    model = parallel_model(config, dataset.schema, ranks)
    batches = training_batches(config, dataset, ranks)
    with Pipeline(model, dense_optimizer(model.tower, config.dense), batches, steps) as pipeline:
        yield pipeline


if __name__ == "__main__":
    main()
