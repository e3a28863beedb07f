"""Time of each part of a recipe's training step: `python -m benchmarks.train_step --recipe NAME`.

The training step itself, in BF16 and one process, with the graph cut after each part, so that each part's backward
runs separately. The fused loss computes its gradients in forward; its backward only scales them.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from benchmarks.measure import machine
from logitmix.comm.process_group import process_group
from logitmix.modules.batch import Batch
from logitmix.modules.towers import Tower
from logitmix.trainer.commands.sizing import load_sized
from logitmix.trainer.config import Config, with_settings
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.loop import parallel_model, training_batches
from logitmix.trainer.parallel import flat
from logitmix.trainer.parallel.optimizer import dense_optimizer
from logitmix.trainer.step.pipeline import Pipeline

WARM_UP = 2
DIRECTIONS = ("forward", "backward")


def main(recipe: str, data: str, steps: int) -> None:
    config = config_of(recipe, data)
    torch.set_num_threads(config.train.threads)
    logging.disable(logging.WARNING)
    result = measure(config, steps)
    setting = f"{recipe}, {config.train.precision}, {steps} steps, {config.train.threads} thread; {machine()}"
    _show(result, setting)


def config_of(recipe: str, data: str) -> Config:
    settings = {"train.precision": "bf16"} | ({"data.path": data} if data else {})
    return with_settings(load_sized(recipe, data)[0], settings)


def measure(config: Config, steps: int) -> dict[str, Any]:
    """CPU seconds per step of each part and direction, and the sizes of the batches."""
    dataset = load_dataset(config.data.path)
    parts, counts = Parts(), Counter[str]()
    with process_group("cpu", config.comm.timeout_seconds) as ranks:
        model = parallel_model(config, dataset.schema, ranks)
        optimizer = dense_optimizer(model.tower, config.dense)
        batches = training_batches(config, dataset, ranks)
        made = [batches.at(step) for step in range(WARM_UP + steps)]
        with (
            parts.cutting(model.tower),
            patch.object(optimizer, "step", parts.timed("dense optimizer", "backward", optimizer.step)),
            Pipeline(model, optimizer, SimpleNamespace(at=made.__getitem__), len(made)) as pipeline,
        ):
            for _ in range(WARM_UP):
                _step(pipeline, parts)
            parts.seconds.clear()
            for _ in range(steps):
                _step(pipeline, parts)
                counts.update(_named(pipeline.batch))
    with parts.time("data", "forward"):
        for step in range(WARM_UP, len(made)):
            batches.at(step)
    seconds: dict[str, dict[str, float]] = {}
    for (part, direction), spent in parts.seconds.items():
        seconds.setdefault(part, dict.fromkeys(DIRECTIONS, 0.0))[direction] = spent / steps
    return {"seconds": seconds, "a_step": {name: count / steps for name, count in counts.items()}}


@dataclass
class Parts:
    """CPU seconds by part and direction."""

    seconds: Counter[tuple[str, str]] = field(default_factory=Counter)
    cuts: list[tuple[str, list[Tensor], list[Tensor]]] = field(default_factory=list)
    within: float = 0.0
    """Seconds taken by parts within the one that is timed."""

    @contextmanager
    def time(self, part: str, direction: str) -> Iterator[None]:
        """Times a part, without the parts that are timed within it."""
        start, before, self.within = time.process_time(), self.within, 0.0
        yield
        spent = time.process_time() - start
        self.seconds[part, direction] += spent - self.within
        self.within = before + spent

    def timed(self, part: str, direction: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            with self.time(part, direction):
                return function(*arguments)

        return call

    @contextmanager
    def cutting(self, tower: Tower) -> Iterator[None]:
        """Every part of the tower has a separate graph until `backward`."""
        similarity, hindexer, queries = tower.similarity, tower.hindexer, tower.query_tower
        # What both sides, both stages or the encoder and these begin from.
        embedded = [(of, "forward") for of in (tower.item_tower, queries.users, queries.events)]
        parts: dict[str, list[tuple[Any, str]]] = {
            "weights": [(flat._Divided, "apply")],
            "features": [*embedded, (tower, "at_positions")],
            "encoder": [(queries.encoder, "forward")],
            "similarity: query tower": [(similarity, "query")],
            "similarity: item tower": [(similarity, "item")],
            "similarity: loss": [(similarity, "sampled_softmax"), (similarity, "sampled_loss")],
        }
        if hindexer is not None:
            parts["h-indexer"] = [(hindexer, name) for name in ("query", "item", "sampled_softmax", "sampled_loss")]
        with ExitStack() as patches:
            for part, functions in parts.items():
                for module, name in functions:
                    patches.enter_context(patch.object(module, name, self.cut(part, getattr(module, name))))
            yield

    def cut(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            with self.time(part, "forward"):
                result = function(*arguments)
            outputs, tree = tree_flatten(result)
            leaves = [output.detach().requires_grad_() for output in outputs]
            self.cuts.append((part, outputs, leaves))
            return tree_unflatten(leaves, tree)

        return timed

    def backward(self) -> None:
        """Backward from each cut's gradient through the part before it, last part first."""
        for part, outputs, leaves in reversed(self.cuts):
            with self.time(part, "backward"):
                # A dot product uses no features separately.
                used = [(of, leaf.grad) for of, leaf in zip(outputs, leaves, strict=True) if leaf.grad is not None]
                if used:
                    torch.autograd.backward(*zip(*used, strict=True))
        self.cuts.clear()


def _step(pipeline: Pipeline, parts: Parts) -> None:
    with parts.time("rows of the table", "forward"):
        pipeline.receive_rows()
    pipeline.loss()
    pipeline.backward()
    parts.backward()
    with parts.time("check of the gradients", "backward"):
        pipeline.check_gradients()
    with parts.time("rows of the table", "backward"):
        pipeline.apply_gradients(prefetch=False)


def _named(batch: Batch) -> dict[str, int]:
    positions, (groups, negatives) = len(batch.target_T), batch.negatives_GN.shape
    return {
        "positions": positions,
        "pairs": positions * (negatives + 1),
        "lookups": 2 * positions + groups * negatives,
        "unique": len(batch.id_V),
    }


def _show(result: dict[str, Any], setting: str) -> None:
    seconds, a_step = result["seconds"], result["a_step"]
    total = sum(sum(spent.values()) for spent in seconds.values())
    table = Table("part", "forward ms", "backward ms", "share", title="CPU time of a training step")
    for part, spent in sorted(seconds.items(), key=lambda item: -sum(item[1].values())):
        cells = [f"{spent[direction] * 1000:.1f}" if spent[direction] else "" for direction in DIRECTIONS]
        table.add_row(part, *cells, f"{sum(spent.values()) / total:.1%}")
    table.add_row("together", "", f"{total * 1000:.0f}", "")
    console = Console(width=120, highlight=False)
    console.print(table)
    console.print(
        f"{a_step['positions']:.0f} positions a step, {a_step['positions'] / total:.0f} of them a CPU second; a batch "
        f"names {a_step['unique']:.0f} unique items for {a_step['lookups']:.0f} lookups "
        f"({1 - a_step['unique'] / a_step['lookups']:.1%} of rows saved on the wire and in the item tower)."
    )
    console.print(setting)
