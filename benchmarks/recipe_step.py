"""Where the time of a recipe's training step goes: `python -m benchmarks.train_step --recipe NAME`.

The loop's own step, in one process, with the graph cut behind each part, so that each part's backward runs by itself.
The fused loss makes its gradients in forward; only their scaling is left to its backward.
"""

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.measure import machine
from logitmix.comm.process_group import process_group
from logitmix.modules.batch import Batch
from logitmix.modules.towers import Tower
from logitmix.trainer import loop
from logitmix.trainer.config import Config, DataConfig, load_recipe
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.optimizer import dense_optimizer
from logitmix.trainer.parallelize import ParallelModel, parallelize

WARM_UP = 2
DIRECTIONS = ("forward", "backward")


def main(recipe: str, data: str, steps: int, plot: str, as_json: bool) -> None:
    config = load_recipe(recipe)
    if data:
        config = replace(config, data=DataConfig(path=data))
    torch.set_num_threads(config.train.threads)
    logging.disable(logging.WARNING)
    result = measure(config, steps)
    setting = f"{recipe}, {config.train.precision}, {steps} steps, {config.train.threads} thread; {machine()}"
    if plot:
        _draw(result, f"A training step of {recipe}: share of its CPU time", setting, plot)
    if as_json:
        print(json.dumps({"setting": setting, **result}))
    else:
        _show(result, setting)


def measure(config: Config, steps: int) -> dict[str, Any]:
    """CPU seconds of each part and direction a step, and what the batches name."""
    dataset = load_dataset(config.data.path)
    parts, counts = Parts(), Counter[str]()
    with process_group("cpu", config.comm.timeout_seconds) as ranks:
        model = parallelize(dataset.num_items, config, ranks)
        optimizer = dense_optimizer(model.tower, config.dense)
        batches, finite = loop.training_batches(config, dataset, ranks), loop._Finite(model)
        with parts.cutting(model.tower):
            for step in range(WARM_UP + steps):
                if step == WARM_UP:
                    parts.seconds.clear()
                with parts.time("data", "forward"):
                    batch = batches.at(step)
                _step(config, step + 1, model, optimizer, finite, batch, parts)
                if step >= WARM_UP:
                    counts.update(_named(batch))
    seconds: dict[str, dict[str, float]] = {}
    for (part, direction), spent in parts.seconds.items():
        seconds.setdefault(part, dict.fromkeys(DIRECTIONS, 0.0))[direction] = spent / steps
    return {"seconds": seconds, "a_step": {name: count / steps for name, count in counts.items()}}


@dataclass
class Parts:
    """CPU seconds by part and direction."""

    seconds: Counter[tuple[str, str]] = field(default_factory=Counter)
    cuts: list[tuple[str, tuple[Tensor, ...], tuple[Tensor, ...]]] = field(default_factory=list)

    @contextmanager
    def time(self, part: str, direction: str) -> Iterator[None]:
        start = time.process_time()
        yield
        self.seconds[part, direction] += time.process_time() - start

    @contextmanager
    def cutting(self, tower: Tower) -> Iterator[None]:
        """Every part of the tower ends its own graph until `backward`."""
        similarity, hindexer = tower.similarity, tower.hindexer
        parts = {
            "encoder": [(tower.query_tower, "forward")],
            "similarity: query tower": [(similarity, "query")],
            "similarity: item tower": [(similarity, "item")],
            "similarity: loss": [(similarity, "sampled_softmax"), (similarity, "sampled_bce")],
        }
        if hindexer is not None:
            parts["h-indexer"] = [(hindexer, name) for name in ("query", "item", "sampled_softmax", "sampled_bce")]
        with ExitStack() as patches:
            for part, functions in parts.items():
                for module, name in functions:
                    patches.enter_context(patch.object(module, name, self.cut(part, getattr(module, name))))
            yield

    def cut(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            with self.time(part, "forward"):
                result = function(*arguments)
            outputs = result if isinstance(result, tuple) else (result,)
            leaves = tuple(output.detach().requires_grad_() for output in outputs)
            self.cuts.append((part, outputs, leaves))
            return leaves if isinstance(result, tuple) else leaves[0]

        return timed

    def backward(self) -> None:
        """From the cuts' gradients to what lies before them, last part first."""
        for part, outputs, leaves in reversed(self.cuts):
            with self.time(part, "backward"):
                torch.autograd.backward(outputs, [leaf.grad for leaf in leaves])
        self.cuts.clear()


def _step(
    config: Config,
    step: int,
    model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    finite: loop._Finite,
    batch: Batch,
    parts: Parts,
) -> None:
    """As in trainer/loop.py."""
    with parts.time("rows of the table", "forward"):
        rows = model.row_exchange(batch.id_V)
        rows.send_rows()
        row_VD = rows.wait()
    loss = model.loss(row_VD, batch)["loss"]
    model.backward(loss)
    parts.backward()
    with parts.time("check of the gradients", "backward"):
        finite.norm(loss, row_VD, step)
        finite.check()
    loop._set_rates(config, step, model, optimizer)
    with parts.time("rows of the table", "backward"):
        rows.send_gradients()
        rows.apply_gradients()
    with parts.time("dense optimizer", "backward"):
        optimizer.step()
        optimizer.zero_grad()


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
    total = _total(seconds)
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


def _total(seconds: dict[str, dict[str, float]]) -> float:
    return sum(sum(spent.values()) for spent in seconds.values())


def _draw(result: dict[str, Any], title: str, setting: str, file: str) -> None:
    """One bar a part, forward and backward end to end."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = title
    from matplotlib import pyplot

    seconds = result["seconds"]
    total = _total(seconds)
    parts = sorted(seconds, key=lambda part: sum(seconds[part].values()))
    figure, axes = pyplot.subplots(figsize=(9, 0.42 * len(parts) + 1.3), layout="constrained")
    ends = [0.0] * len(parts)
    labels = ("forward, and the gradients made in it", "backward")
    for direction, label, colour in zip(DIRECTIONS, labels, ("#4c78a8", "#a8c4e0"), strict=True):
        widths = [100 * seconds[part][direction] / total for part in parts]
        axes.barh(parts, widths, left=ends, color=colour, label=label, height=0.7)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for place, end in enumerate(ends):
        axes.text(end + 0.5, place, f"{end:.1f} %", va="center")
    axes.set(title=title, xlim=(0, max(ends) * 1.12))
    axes.xaxis.set_visible(False)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    milliseconds, positions = total * 1000, result["a_step"]["positions"]
    figure.supxlabel(f"{milliseconds:.0f} ms for {positions:.0f} positions. {setting}", fontsize="small")
    figure.savefig(file, dpi=150, metadata={"Date": None} if file.endswith(".svg") else None)
    pyplot.close(figure)
