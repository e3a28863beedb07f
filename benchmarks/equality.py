"""Many tables and features: checks what must be equal, at full size.

    python -m benchmarks.equality [--rows 500000] [--steps 40] [--users 50] [--json]

On the dataset of benchmarks.many_tables, 20 tables and 30 features:

- gradients of two processes and of one, in FP32 without rounding on the wire. Both train one step of SGD from the same
  weights, with a learning rate so large that rounding the weights does not hide the gradients: a gradient is the change
  of the weights over the rate. The figure is the norm of the difference over the norm of the gradient, for the table or
  dense parameter in which it is largest. The batch has the usual 32 sequences;
- a run on two processes that stops halfway and resumes, and one that does not stop: losses, gradient norms, and all
  weights in the last checkpoint, with the FP8 wire;
- the run's export and the trained model: the 100 best of all items for `--users` requests of raw ids and raw features.
"""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table as Shown
from torch import Tensor

from benchmarks.many_tables import BATCH, train, write
from benchmarks.measure import logitmix, machine
from logitmix.comm.process_group import process_group
from logitmix.modules.schema import Feature
from logitmix.serving.request import Request
from logitmix.serving.retriever import Retriever
from logitmix.trainer.data.batches import RankingUsers, ranking_users
from logitmix.trainer.data.columns import Column
from logitmix.trainer.data.dataset import Dataset, load_dataset
from logitmix.trainer.data.lookups import columns_of
from logitmix.trainer.evaluation.embed import Embedder
from logitmix.trainer.run.checkpoint import SavedModel, load_saved

RATE = 1e4
K = 100
CHUNK = 50_000
"""Items scored at once by the trained model."""


@dataclass(frozen=True)
class Options:
    rows: int = 500_000
    """Rows of the largest table, that of the items."""
    steps: int = 40
    """Steps of the run that stops halfway, rounded up to whole epochs."""
    users: int = 50
    """Requests to the export."""
    json: bool = False
    """Print JSON."""


def main(options: Options) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / "data", options.rows)
        write(folder / "step", options.rows, BATCH)
        result = gradients(folder) | resumption(folder, options.steps) | serving(folder, options.users)
    setting = f"{options.rows:,} rows at most, {options.steps} steps, {options.users} requests; {machine()}"
    if options.json:
        print(json.dumps({"setting": setting, **result}))
        return
    table = Shown("what", "difference", title="20 tables, 30 features: what must be equal")
    for what, difference in result.items():
        table.add_row(what, f"{difference:.1e}")
    console = Console(width=120, highlight=False)
    console.print(table)
    console.print(setting)


def gradients(folder: Path) -> dict[str, float]:
    """The largest relative differences between two processes and one."""

    def step(name: str, rate: float, processes: int) -> SavedModel:
        words = ["--data.path", str(folder / "step")]
        for part in ("tables", "dense"):
            words += [f"--{part}.optimizer", "sgd", f"--{part}.lr", str(rate)]
        train(folder, name, ["all"], "fp32", 1, processes, words)
        return load_saved(folder / name, "last")

    # A rate too small to change anything gives the initial weights.
    before, one, two = step("before", 1e-30, 1), step("one", RATE, 1), step("two", RATE, 2)
    tables = [
        _relative(*(_table(model, table.name) - _table(before, table.name) for model in (one, two)))
        for table in before.tower.schema.tables
    ]
    weights = [dict(model.tower.named_parameters()) for model in (before, one, two)]
    dense = [_relative(weights[1][name] - of, weights[2][name] - of) for name, of in weights[0].items()]
    return {"table gradients of 2 processes and 1": max(tables), "dense gradients of 2 processes and 1": max(dense)}


def _table(model: SavedModel, name: str) -> Tensor:
    return model.read_rows(name, 0, model.tower.schema.table(name).rows)


def _relative(expected: Tensor, found: Tensor) -> float:
    expected, found = expected.detach().double(), found.detach().double()
    # Some layers start with a gradient of zero.
    return float((found - expected).norm() / expected.norm()) if found.any() else float(expected.norm())


def resumption(folder: Path, steps: int) -> dict[str, float]:
    """The largest differences between a run that stopped halfway and one that did not."""
    train(folder, "half", ["all"], "fp8", steps // 2, 2)
    resumed = train(folder, "half", ["all"], "fp8", steps, 2)
    whole = train(folder, "whole", ["all"], "fp8", steps, 2)
    assert len(whole) == len(resumed) >= steps
    rows = [abs(a[name] - b[name]) for a, b in zip(whole, resumed, strict=True) for name in ("loss", "gradient_norm")]
    models = [load_saved(folder / name, "last") for name in ("whole", "half")]
    tables = [table.name for table in models[0].tower.schema.tables]
    weights = [[*model.tower.state_dict().values(), *(_table(model, name) for name in tables)] for model in models]
    moved = [float((a - b).abs().max()) for a, b in zip(*weights, strict=True)]
    return {"losses and gradient norms of a resumed run": max(rows), "weights of a resumed run": max(moved)}


@torch.no_grad()
def serving(folder: Path, count: int) -> dict[str, float]:
    """The largest difference between the K best scores of the last run's export and of its trained model, and the share
    of the K best items that differ."""
    logitmix("export", str(folder / "whole"), "--out", str(folder / "served"), "--checkpoint", "last")
    dataset, model = load_dataset(folder / "data"), load_saved(folder / "whole", "last")
    users = ranking_users(dataset, "test", model.config.model.encoder.max_length).sample(count, seed=0)
    with process_group("cpu", 60) as ranks:
        expected = _best(
            Embedder(model.tower.eval(), model.sharded_rows(ranks), columns_of(dataset, model.tower.schema)), users
        )
    requests = [_request(dataset, users, place) for place in range(len(users))]
    found = Retriever.load(folder / "served").recommend(requests, K, exclude_history=False, stage1=model.num_items)
    scores, items = (torch.tensor([[of(row) for row in ranking] for ranking in found]) for of in (_score, _item))
    common = [len(set(a) & set(b)) for a, b in zip(items.tolist(), expected.indices.tolist(), strict=True)]
    return {
        "scores of the export": float((scores - expected.values).abs().max()),
        "share of other items among its 100 best": 1 - sum(common) / items.numel(),
    }


def _score(row: Any) -> float:
    return float(row["score"])


def _item(row: Any) -> int:
    # The raw ids of the generated dataset are the items' indices.
    return int(row["id"])


def _best(embedder: Embedder, users: RankingUsers) -> torch.return_types.topk:
    tower = embedder.tower
    query, parts = tower.query_sides(embedder.queries(users)).similarity, []
    for first in range(0, tower.schema.num_items, CHUNK):
        items = embedder.items(np.arange(first, min(first + CHUNK, tower.schema.num_items)))
        parts.append(tower.similarity.all_pairs(query, tower.item_sides(items).similarity))
    return torch.cat(parts, 1).topk(K)


def _request(dataset: Dataset, users: RankingUsers, place: int) -> Request:
    actions = range(users.first[place], users.place[place])
    user, schema = int(users.user[place]), dataset.schema
    return {
        "history": [str(dataset.items_flat[action]) for action in actions],
        "user": {f.name: _raw(f, dataset.user_features[f.name], user) for f in schema.of("user")},
        "events": [
            {f.name: _raw(f, dataset.event_features[f.name], action) for f in schema.of("event")} for action in actions
        ],
    }


def _raw(feature: Feature, column: Column, row: int) -> Any:
    """The value as in a source: the generated values are the rows of their tables, and 0 is unknown."""
    match feature.kind:
        case "id":
            return str(column.values[row])
        case "ids":
            assert column.offsets is not None
            return [str(of) for of in column.values[column.offsets[row] : column.offsets[row + 1]]]
        case "number":
            return float(column.values[row])
        case _:
            return column.values[row].tolist()


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
