"""Many tables and features: what they add to a step, and to the wire by table, compared with ids alone.

    python -m benchmarks.many_tables [--steps 60] [--rows 500000]

Generates a dataset of 20 tables, from `--rows` rows down to 3, and 30 features of items, users and events: 22 ids and
bags of ids, some of which share a table, 6 numbers and 2 vectors. A mixture of logits is trained on two processes with
one thread each, on the item ids alone and on all features, and once on one process without rounding on the wire. The
first table shows the seconds of a step by part, the second the bytes a step by table, the last line the largest
relative difference between the losses of two processes and of one.
"""

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import tyro
from rich.console import Console
from rich.table import Table as Shown

from benchmarks.measure import logitmix, machine
from logitmix.modules.schema import Feature, Owner, Schema, Table
from logitmix.trainer.data.columns import Column
from logitmix.trainer.data.writer import DatasetContents, write_dataset
from logitmix.trainer.run.metrics import read_rows

TABLES = 20
OWNERS: tuple[Owner, ...] = ("item", "user", "event")
USERS, ACTIONS, BATCH = 400, 30, 32
PARTS = ("data", "all_to_all", "forward", "backward", "optimizer")
RECIPE = """
[data]
path = "{data}"

[model]
dim = 64
features = {features}
encoder = {{ blocks = 2, max_length = 50 }}
similarity = {{ kind = "mol", query_components = 4, item_components = 4, gate_hidden = 64, projection_hidden = 128 }}
hindexer = {{ weight = 1.0 }}
loss = {{ negatives = 64 }}

[comm]
forward = "{wire}"
backward = "{wire}"

[train]
batch_size = {batch}
epochs = {epochs}
precision = "fp32"
device = "cpu"
log_every = 1

[evaluate]
every_epochs = 0
"""


@dataclass(frozen=True)
class Options:
    steps: int = 60
    """Steps of a run; the first 10 are warm-up."""
    rows: int = 500_000
    """Rows of the largest table, that of the items."""


def main(options: Options) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / "data", options.rows)
        ids = train(folder, "ids", [], "fp8", options.steps, processes=2)
        features = train(folder, "features", ["all"], "fp8", options.steps, processes=2)
        exact = [train(folder, f"exact-{n}", ["all"], "fp32", options.steps, processes=n) for n in (1, 2)]
    result = {
        "seconds": {run: _seconds(rows) for run, rows in (("ids", ids), ("features", features))},
        "bytes": {run: _bytes(rows) for run, rows in (("ids", ids), ("features", features))},
        "loss_difference": max(abs(a["loss"] - b["loss"]) / a["loss"] for a, b in zip(*exact, strict=True)),
    }
    setting = f"2 processes x 1 thread, {options.steps} steps, {options.rows:,} rows at most; {machine()}"
    _show(result, setting)


def schema_of(largest: int) -> Schema:
    """20 tables from `largest` rows down to 3; 30 features beside the item id."""
    rows = np.geomspace(largest, 3, TABLES).round().astype(int).tolist()
    tables = [Table("item", rows[0] + 1), *(Table(f"table{n}", count) for n, count in enumerate(rows[1:], start=1))]
    features = [Feature("item", "item", "id", "item")]
    for number in range(22):
        table, kinds = tables[1 + number % (TABLES - 1)].name, ("id", "ids")
        kind: str = "ids" if kinds[number % 3 == 2] == "ids" else "id"
        features.append(Feature(f"sparse{number}", OWNERS[number % 3], kind, table))
    features += [Feature(f"number{number}", OWNERS[number % 3], "number") for number in range(6)]
    features += [Feature(f"vector{number}", OWNERS[number], "vector", width=8) for number in range(2)]
    return Schema(tuple(features), tuple(tables))


def write(path: Path, largest: int, users: int = USERS) -> None:
    schema, random = schema_of(largest), np.random.default_rng(0)
    count = {"item": largest, "user": users, "event": users * ACTIONS}
    contents = DatasetContents(
        offsets=np.arange(users + 1) * ACTIONS,
        items=random.integers(0, largest, users * ACTIONS),
        timestamps=np.arange(users * ACTIONS),
        item_ids=pa.array(np.arange(largest)).cast(pa.string()),
        schema=schema,
        columns={f.name: _column(f, schema, count[f.owner], random) for f in schema.features if f.name != "item"},
        vocabularies={table.name: _names(table.rows) for table in schema.tables[1:]},
    )
    write_dataset(path, contents, "many-tables")


def _names(rows: int) -> pa.Array:
    return pa.concat_arrays([pa.nulls(1, pa.string()), pa.array(np.arange(1, rows)).cast(pa.string())])


def _column(feature: Feature, schema: Schema, count: int, random: np.random.Generator) -> Column:
    if feature.kind == "number":
        return Column(random.normal(size=count).astype(np.float32))
    if feature.kind == "vector":
        return Column(random.normal(size=(count, feature.width)).astype(np.float32))
    rows = schema.table(feature.table).rows
    if feature.kind == "id":
        return Column(random.integers(0, rows, count))
    offsets = np.concatenate([[0], np.cumsum(random.integers(0, 5, count))])
    return Column(random.integers(0, rows, offsets[-1]), offsets)


def train(
    folder: Path, name: str, features: list[str], wire: str, steps: int, processes: int, words: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """The rows of metrics of a run of so many steps, rounded up to whole epochs of the recipe's batches."""
    recipe = folder / f"{name}.toml"
    epochs = -(-steps // -(-USERS // BATCH))
    recipe.write_text(RECIPE.format(data=folder / "data", batch=BATCH, features=features, wire=wire, epochs=epochs))
    logitmix("train", str(recipe), "--run", str(folder / name), *words, processes=processes)
    return read_rows(folder / name, "train")


def _seconds(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Median of each part over the steps after the warm-up."""
    return {part: statistics.median(row[f"time/{part}"] for row in rows[10:]) for part in ("step", *PARTS)}


def _bytes(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Bytes a step, both directions, by table."""
    sums: dict[str, list[float]] = {}
    for key in rows[-1]:
        of = key.split("/")
        if len(of) == 4 and of[0] == "wire" and of[3] == "bytes_per_step":
            sums.setdefault(of[1], []).append(statistics.mean(row[key] for row in rows[10:]))
    return {table: sum(directions) for table, directions in sums.items()}


def _show(result: dict[str, Any], setting: str) -> None:
    console = Console(width=120, highlight=False)
    table = Shown("part of a step", "ids alone, ms", "30 features, ms", "ratio", title="Time of a training step")
    for part in ("step", *PARTS):
        ids, features = (result["seconds"][run][part] * 1000 for run in ("ids", "features"))
        table.add_row(part, f"{ids:.1f}", f"{features:.1f}", f"{features / ids:.2f}")
    console.print(table)
    wire = Shown("table", "ids alone, bytes", "30 features, bytes", title="On the wire in a step, both directions")
    for name, count in result["bytes"]["features"].items():
        ids = result["bytes"]["ids"].get(name)
        wire.add_row(name, "" if ids is None else f"{ids:,.0f}", f"{count:,.0f}")
    console.print(wire)
    console.print(f"Losses of 2 processes and of 1 differ by at most {result['loss_difference']:.1e}, relatively.")
    console.print(setting)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
