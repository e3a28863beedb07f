"""What the tests of readers share."""

import io
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import Progress

from logitmix.modules.schema import Feature, Owner
from logitmix.trainer.data.columns import Column
from logitmix.trainer.data.dataset import Dataset, load_dataset
from logitmix.trainer.data.description import read_description
from logitmix.trainer.data.engine import Duck
from logitmix.trainer.data.times import Clock
from logitmix.trainer.prepare.config import PrepareOptions
from logitmix.trainer.prepare.files import InputFile
from logitmix.trainer.prepare.joined import NOTHING_JOINED
from logitmix.trainer.prepare.lists import Lists
from logitmix.trainer.prepare.prepare import prepare
from logitmix.trainer.prepare.rejects import Rejects
from logitmix.trainer.prepare.sources.table import TIMES, ColumnNames, read_actions
from logitmix.trainer.prepare.summary import summarize
from logitmix.trainer.prepare.tables import Job
from logitmix.trainer.prepare.text import CSV, Layout

PROGRESS = Progress(disable=True)
NAMES = ColumnNames()


def listed(rejects: Rejects) -> list[list[str]]:
    """File, line, reason and text of every reject."""
    rejects.close()
    header, *lines = rejects.path.read_text(encoding="utf-8").split("\n")[:-1]
    assert header == "file\tline\treason\ttext"
    return [line.split("\t") for line in lines]


def prepared(source: Path | InputFile, name: str = "table", **options: Any) -> tuple[Dataset, str]:
    """The dataset `out` beside a source, for which users need one action, and what prepare says."""
    path, said = source if isinstance(source, Path) else source.path, io.StringIO()
    given: dict[str, Any] = {"out": path.parent / "out", "min_user_actions": 1, "overwrite": True} | options
    given = {key: str(of) if isinstance(of, Path) else of for key, of in given.items()}
    prepare(PrepareOptions(name, str(path), **given), Console(file=said, width=500))
    return load_dataset(given["out"]), said.getvalue()


def actions_of(
    files: InputFile | list[InputFile],
    rejects: Rejects,
    names: ColumnNames = NAMES,
    layout: Layout = CSV,
    time_format: str = "",
    list_separator: str = "",
    more: Sequence[str] = (),
) -> list[Any]:
    """User, item, time and `more` columns of the actions of a table's parts, in the order of the files."""
    with closing(Duck()) as duck:
        job = Job(PrepareOptions("table", "-"), duck, rejects, PROGRESS)
        lists, parts = Lists(names.item, list_separator, rejects), files if isinstance(files, list) else [files]
        raws = read_actions(parts, names, job, layout, lists, NOTHING_JOINED)
        job.settle(job.gather(raws, Clock(time_format) if names.timestamp else None, TIMES), names.timestamp)
        columns = ", ".join(["r.user", "r.item", job.actions.time, *(job.actions.columns[name] for name in more)])
        found = duck.table(f"select {columns} from rows as r order by file, line, place")
        return list(zip(*(column.to_pylist() for column in found.columns), strict=True))


def file_of(tmp_path: Path, content: bytes, name: str = "in.txt") -> InputFile:
    (tmp_path / name).write_bytes(content)
    return InputFile(tmp_path / name)


def parquet_of(tmp_path: Path, columns: Mapping[str, Any], name: str = "in.parquet") -> InputFile:
    pq.write_table(pa.table(columns), tmp_path / name)
    return InputFile(tmp_path / name)


def decoded(dataset: Dataset, owner: Owner) -> dict[str, list[Any]]:
    """The features of an owner by name: sparse ones as text, "" for what is unknown."""
    features = dataset.features_of(owner).items()
    return {name: _decoded(dataset, dataset_feature(dataset, name), column) for name, column in features}


def dataset_feature(dataset: Dataset, name: str) -> Feature:
    return next(feature for feature in dataset.schema.features if feature.name == name)


def _decoded(dataset: Dataset, feature: Feature, column: Column) -> list[Any]:
    if not feature.sparse:
        return column.values.tolist()
    vocabulary = dataset.vocabulary(feature.table)
    values = [vocabulary[row] for row in column.values]
    if column.offsets is None:
        return values
    return [values[start:stop] for start, stop in pairwise(column.offsets)]


def summary(dataset: Dataset) -> str:
    return summarize(read_description(dataset.path), dataset.path)


def titles(dataset: Dataset) -> list[str | None] | None:
    column = dataset.title_column()
    return None if column is None else column.to_pylist()
