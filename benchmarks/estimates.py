"""What `logitmix plan` estimates: the time of a step on GPUs, and the memory of training, beside what it takes here.

    python -m benchmarks.estimates [--gpu h100] [--json]
    python -m benchmarks.estimates --memory

The first prints a step of ml-1m-mol, of ml-1m-dot and of an industrial model, with 20 tables, on 1, 8 and 64 GPUs; each
GPU has 128, 128 and 512 sequences. With --memory, three models train some steps in fresh processes on the CPU; the
table has the growth of a process's memory at its peak (resident set) beside the estimate.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import torch
import tyro

from benchmarks.measure import Spent, in_turn, machine, print_table, spent
from logitmix.comm.process_group import process_group
from logitmix.trainer.commands.plan import USAGE, Arguments, JobPlan, plan_job
from logitmix.trainer.commands.recipe import of_recipe
from logitmix.trainer.commands.step_time import StepTime
from logitmix.trainer.config import Config, load_recipe, with_settings
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.data.writer import DatasetContents, write_dataset
from logitmix.trainer.loop import parallel_model, training_batches
from logitmix.trainer.parallel.optimizer import dense_optimizer
from logitmix.trainer.parallel.plan import Devices
from logitmix.trainer.step.memory import set_up_memory
from logitmix.trainer.step.pipeline import Pipeline


@dataclass(frozen=True)
class Options:
    gpu: Literal["a100", "h100", "h200", "b200"] = "h100"
    memory: bool = False
    """Measure memory on the CPU instead."""
    json: bool = False
    """Print JSON."""


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


LONG = "--history 165 --items 3706"
MODELS = {
    "ml-1m-mol": ("ml-1m-mol", 128, LONG),
    "ml-1m-dot": ("ml-1m-dot", 128, LONG),
    "industrial": (
        "ml-1m-mol",
        512,
        "--history 200 --items 1e7 --model.loss.negatives 1024 --rows "
        + " ".join(f"feature{number}=1e6" for number in range(1, 20)),
    ),
}
"""Recipe, sequences of a GPU, and words of `logitmix plan`."""


def main(options: Options) -> None:
    rows = memory_rows() if options.memory else step_rows(options.gpu)
    if options.json:
        print(json.dumps(rows))
        return
    title = f"MB, {machine()}" if options.memory else f"ms on {options.gpu.upper()}"
    cells = ([f"{of:,.1f}" if isinstance(of, float) else of for of in row.values()] for row in rows)
    print_table(rows[0], cells, title, 160)


def step_rows(gpu: str) -> list[dict[str, Any]]:
    """A row for each model and number of GPUs, in milliseconds."""
    rows = []
    for name, (recipe, sequences, words) in MODELS.items():
        for count in (1, 8, 64):
            line = f"{recipe} --world-size {count} --gpu {gpu} --train.batch-size {sequences * count} {words}"
            plan, of = planned(line)
            rows.append(
                {
                    "model": name,
                    "GPUs": count,
                    "step": of.total * 1e3,
                    "floor": of.floor * 1e3,
                    "kernels": of.kernels,
                    "of it": ", ".join(f"{part} {of.parts[part] * 1e3:.1f}" for part in of.longest()),
                    "GiB a GPU": plan.rank_bytes / 2**30,
                }
            )
    return rows


def planned(line: str) -> tuple[JobPlan, StepTime]:
    """Of the words of `logitmix plan` for GPUs."""
    arguments, config, _ = of_recipe(Arguments, "plan", line.split(), USAGE)
    plan = plan_job(config, arguments.devices(), arguments.imagined(), arguments.gpu)
    assert plan.step_time is not None
    return plan, plan.step_time


def memory_rows(sizes: dict[str, Size] = SIZES) -> list[dict[str, Any]]:
    """Measured and estimated MB of each size."""
    with tempfile.TemporaryDirectory() as folder:
        configs = {}
        for number, (name, size) in enumerate(sizes.items()):
            data = Path(folder, str(number))
            write_data(data, size)
            configs[name] = config_of(size, data)
        found = in_turn({name: partial(training_memory, config) for name, config in configs.items()}, 1)
        return [
            {
                "model": name,
                "measured": found[name][0].peak_mb * 2**20 / 1e6,
                "estimated": estimate(config).rank_bytes / 1e6,
            }
            for name, config in configs.items()
        ]


def config_of(size: Size, data: Path) -> Config:
    return with_settings(load_recipe(size.recipe), COMMON | {"data.path": str(data)} | size.settings)


def estimate(config: Config) -> JobPlan:
    return plan_job(config, Devices(1, 1, "cpu"))


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
    with process_group(config.train.device, 120) as ranks:
        dataset = load_dataset(config.data.path)
        model = parallel_model(config, dataset.schema, ranks)
        batches = training_batches(config, dataset, ranks)
        with Pipeline(model, dense_optimizer(model.tower, config.dense), batches, steps) as pipeline:
            yield pipeline


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
