"""`logitmix prepare`: raw files -> dataset directory.

One pass over the source codes users and items as integers; then the item filter, the user filter (each once: this is no
iterated core), a stable sort by user and time, and the writing. Nothing is cut off here: a trainer takes the last
actions it wants. Memory peaks at about 40 bytes an action, beside every distinct raw id (about 150 bytes each) and one
block of the file; there is no Python object per action.

The dataset appears at once and complete: it is written to a hidden directory beside the output, which is then renamed.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from logitmix.common.files import whole_directory
from logitmix.trainer.data import demo, formats
from logitmix.trainer.data.config import DEMOS, MOVIELENS, PrepareOptions
from logitmix.trainer.data.dataset import FORMAT_VERSION, Contents, is_dataset, write_contents, write_description
from logitmix.trainer.data.download import PINNED, Source, download, source_for
from logitmix.trainer.data.files import InputFile, digests, find_files, magic
from logitmix.trainer.data.rejects import Rejects, TooManyRejects

GENRES_100K = (
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama", "Fantasy",
    "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
)  # fmt: skip
"""The 0/1 fields at the end of a line of u.item, in order."""

ITEM_FEATURES = pa.schema({"title": pa.string(), "genres": pa.list_(pa.string())})
USER_FEATURES = pa.schema(dict.fromkeys(("gender", "age", "occupation", "zip"), pa.string()))


@dataclass
class Features:
    schema: pa.Schema = field(default_factory=lambda: pa.schema({}))
    rows: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """By raw id, in the order of the schema."""

    def columns(self, ids: pa.StringArray) -> dict[str, pa.Array]:
        """One column per feature, null for ids that have none."""
        empty = (None,) * len(self.schema)
        rows = [self.rows.get(raw, empty) for raw in ids.to_pylist()] if len(self.schema) else []
        return {entry.name: pa.array([row[at] for row in rows], entry.type) for at, entry in enumerate(self.schema)}


@dataclass
class Raw:
    """A source as read. The action arrays are in file order; ids are by code."""

    users: np.ndarray
    """int32 codes."""
    items: np.ndarray
    """int32 codes."""
    timestamps: np.ndarray
    """int64."""
    user_ids: pa.StringArray
    item_ids: pa.StringArray
    user_features: Features = field(default_factory=Features)
    item_features: Features = field(default_factory=Features)
    origin: dict[str, Any] = field(default_factory=dict)
    """The source and generator entries of dataset.json."""


class IdCodes:
    """Numbers raw ids in the order of their first appearance."""

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}

    def encode(self, ids: pa.StringArray) -> np.ndarray:
        encoded = ids.dictionary_encode()
        codes = self._codes
        table = [codes.setdefault(raw, len(codes)) for raw in encoded.dictionary.to_pylist()]
        return np.array(table, np.int32)[encoded.indices.to_numpy()]

    def ids(self) -> pa.StringArray:
        return pa.array(self._codes, pa.string())


def prepare(
    options: PrepareOptions, console: Console | None = None, pinned: dict[str, Source] | None = None
) -> dict[str, Any]:
    """Writes the dataset at `options.directory` and returns the content of its dataset.json.

    Progress and malformed lines go to `console` (standard error). `pinned` are the sources that may be downloaded.
    Raises ValueError with one line for whatever is wrong with the options or the source; then nothing is left behind
    but, where malformed lines stopped the job, their list at `<out>.rejects.tsv`.
    """
    console = console or Console(stderr=True)
    out = options.directory
    _check_out(out, options.overwrite)
    if options.source and not Path(options.source).exists():
        raise ValueError(f"no file or folder at {options.source}; give the downloaded file with --source")
    with (
        whole_directory(out) as staging,
        closing(Rejects(staging / "rejects.tsv", options.max_rejects, console)) as rejects,
    ):
        try:
            with _progress(console) as progress:
                raw = _read(options, rejects, progress, PINNED if pinned is None else pinned)
                return _write(staging, options, raw, rejects)
        except TooManyRejects as error:
            rejects.close()
            kept = out.with_name(out.name + ".rejects.tsv")
            rejects.path.replace(kept)
            raise ValueError(f"{error}; they are listed in {kept}") from None


def _progress(console: Console) -> Progress:
    # A log file would get one line for every bar.
    return Progress(
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(),
        console=console, disable=not console.is_terminal,
    )  # fmt: skip


def _check_out(out: Path, overwrite: bool) -> None:
    if out.is_symlink():
        raise ValueError(f"{out} is a symbolic link; write to where it leads, or choose another --out")
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.is_dir() and is_dataset(out):
        if not overwrite:
            raise ValueError(
                f"there is a dataset at {out} already; replace it with --overwrite, or choose another --out"
            )
    elif out.exists():
        raise ValueError(f"{out} is there and holds more than a dataset, or none; choose another --out")


def _read(options: PrepareOptions, rejects: Rejects, progress: Progress, pinned: dict[str, Source]) -> Raw:
    if options.name in DEMOS:
        return _generate(options)
    if options.source:
        source = Path(options.source)
    else:
        pin = source_for(options.name, pinned)
        source = options.directory.parent / pin.url.rsplit("/", 1)[-1]
        download(pin, source, progress)
    raw = _read_source(options, source, rejects, progress)
    if not rejects.lines:
        raise ValueError(f"{source}: holds no actions; is it the right file?")
    rejects.finish()
    return raw


def _generate(options: PrepareOptions) -> Raw:
    if options.name == "demo":
        parameters: demo.SizeParameters = demo.DemoParameters()
        made = demo.generate(demo.DemoParameters(), options.seed)
    else:
        parameters = demo.LowRankParameters()
        made = demo.generate_low_rank(demo.LowRankParameters(), options.seed)
    titles = Features(
        pa.schema({"title": pa.string()}),
        {raw: (title,) for raw, title in zip(made.item_ids, made.titles, strict=True)},
    )
    generator = {"name": options.name, "parameters": {"seed": options.seed, **dataclasses.asdict(parameters)}}
    return Raw(
        made.users, made.items, made.timestamps, pa.array(made.user_ids), pa.array(made.item_ids),
        item_features=titles, origin={"source": None, "generator": generator},
    )  # fmt: skip


def _read_source(options: PrepareOptions, source: Path, rejects: Rejects, progress: Progress) -> Raw:
    user_features, item_features = Features(), Features()
    if options.name in MOVIELENS:
        files = _movielens_files(options.name, source)
        layout = {"ml-100k": formats.U_DATA, "ml-1m": formats.RATINGS_DAT}.get(options.name, formats.RATINGS_CSV)
        chunks = formats.read_delimited(files[0], layout, rejects, progress)
        for file in files[1:]:
            target = user_features if file.label in ("users.dat", "u.user") else item_features
            _read_features(file, target, rejects, progress)
    elif options.name == "sequences":
        files = [_single_file(source)]
        chunks = formats.read_delimited(files[0], formats.SEQUENCES, rejects, progress)
    elif options.name == "table":
        files = _table_files(source)
        columns = formats.Columns(options.user_column, options.item_column, options.timestamp_column)
        chunks = formats.read_table(files, columns, rejects, progress)
    else:
        files = [_single_file(source)]
        chunks = formats.read_amazon(files[0], rejects, progress)
    raw = _gather(chunks)
    raw.user_features, raw.item_features = user_features, item_features
    raw.origin = {"source": {"name": source.name, "sha256": digests(source, files)}, "generator": None}
    return raw


def _gather(chunks: Iterator[formats.Chunk]) -> Raw:
    user_codes, item_codes = IdCodes(), IdCodes()
    parts: tuple[list[np.ndarray], ...] = ([], [], [])
    for chunk in chunks:
        for part, values in zip(
            parts, (user_codes.encode(chunk.users), item_codes.encode(chunk.items), chunk.timestamps), strict=True
        ):
            part.append(values)
    users, items, timestamps = (_join(part, kind) for part, kind in zip(parts, ("i4", "i4", "i8"), strict=True))
    return Raw(users, items, timestamps, user_codes.ids(), item_codes.ids())


def _join(parts: list[np.ndarray], kind: str) -> np.ndarray:
    joined = np.concatenate([np.empty(0, kind), *parts], dtype=kind)
    # The pieces would otherwise live on beside the whole until the last column is joined.
    parts.clear()
    return joined


def _movielens_files(name: str, source: Path) -> list[InputFile]:
    """The ratings, and the side files that are there."""
    ratings, *others = {
        "ml-100k": ("u.data", "u.item", "u.user"),
        "ml-1m": ("ratings.dat", "movies.dat", "users.dat"),
    }.get(name, ("ratings.csv", "movies.csv"))
    if source.is_file() and magic(source)[:2] != b"PK":
        return [InputFile(source)]
    found = find_files(source, (ratings, *others))
    if ratings not in found:
        raise ValueError(
            f"{source}: there is no {ratings} in it; {name} needs the original zip, its folder or that file"
        )
    return [found[ratings], *(found[other] for other in others if other in found)]


def _single_file(source: Path) -> InputFile:
    if source.is_dir() or magic(source)[:2] == b"PK":
        raise ValueError(f"{source}: this format is one text file, plain or .gz; give that file with --source")
    return InputFile(source)


def _table_files(source: Path) -> list[InputFile]:
    if not source.is_dir():
        return [InputFile(source)]
    names = sorted(path for path in source.iterdir() if path.name.endswith((".parquet", ".csv", ".csv.gz")))
    parts = [InputFile(path) for path in names if not path.name.startswith((".", "_"))]
    if not parts:
        raise ValueError(f"{source}: no .parquet, .csv or .csv.gz file in this folder; give a table with --source")
    return parts


def _read_features(file: InputFile, features: Features, rejects: Rejects, progress: Progress) -> None:
    delimiter, width, encoding, header = {
        "u.item": ("|", 24, "latin-1", False),
        "u.user": ("|", 5, "latin-1", False),
        "movies.dat": ("::", 3, "latin-1", False),
        "users.dat": ("::", 5, "latin-1", False),
        "movies.csv": (",", 3, "utf-8-sig", True),
    }[file.label]
    features.schema = USER_FEATURES if file.label in ("users.dat", "u.user") else ITEM_FEATURES
    for raw_id, *row in formats.read_rows(file, delimiter, width, encoding, rejects, progress, header):
        if file.label == "u.item":
            flags = zip(row[-len(GENRES_100K) :], GENRES_100K, strict=True)
            features.rows[raw_id] = (row[0], [genre for flag, genre in flags if flag == "1"])
        elif file.label == "u.user":
            features.rows[raw_id] = (row[1], row[0], *row[2:])
        elif file.label == "users.dat":
            features.rows[raw_id] = tuple(row)
        else:
            features.rows[raw_id] = (row[0], [] if row[1] == "(no genres listed)" else row[1].split("|"))


def _write(directory: Path, options: PrepareOptions, raw: Raw, rejects: Rejects) -> dict[str, Any]:
    read = {"users": len(raw.user_ids), "items": len(raw.item_ids), "actions": len(raw.users)}
    contents = _arrange(raw, options.min_user_actions, options.min_item_actions)
    write_contents(directory, contents)
    description = {
        "format_version": FORMAT_VERSION,
        "name": options.name,
        "users": len(contents.offsets) - 1,
        "items": len(contents.item_columns["raw_id"]),
        "actions": len(contents.items),
        "filters": {"min_user_actions": options.min_user_actions, "min_item_actions": options.min_item_actions},
        "read": read,
        "rejected_lines": rejects.count,
        **raw.origin,
    }
    write_description(directory, description)
    return description


def _arrange(raw: Raw, min_user_actions: int, min_item_actions: int) -> Contents:
    """Filters, numbers and sorts. Takes the action arrays out of `raw`, to free each as soon as it is done with."""
    kept = np.bincount(raw.items, minlength=len(raw.item_ids))[raw.items] >= min_item_actions
    user_counts = np.bincount(raw.users[kept], minlength=len(raw.user_ids))
    user_kept = user_counts >= max(min_user_actions, 1)
    if not user_kept.any():
        raise ValueError(
            f"no user has {max(min_user_actions, 1)} or more actions (there were {len(raw.user_ids):,} users with "
            f"{len(raw.users):,} actions); lower --min-user-actions or --min-item-actions"
        )
    kept &= user_kept[raw.users]
    user_order = _order_of_ids(raw.user_ids, user_kept)
    item_order = _order_of_ids(raw.item_ids, np.bincount(raw.items[kept], minlength=len(raw.item_ids)) > 0)
    users = _ranks(user_order, len(raw.user_ids))[raw.users[kept]]
    items = _ranks(item_order, len(raw.item_ids))[raw.items[kept]]
    timestamps = raw.timestamps[kept]
    raw.users = raw.items = raw.timestamps = kept = np.empty(0)
    # lexsort is stable: actions of one user at one time stay in file order.
    order = np.lexsort((timestamps, users))
    user_ids, item_ids = raw.user_ids.take(pa.array(user_order)), raw.item_ids.take(pa.array(item_order))
    return Contents(
        offsets=np.concatenate(([0], np.cumsum(np.bincount(users)))),
        items=items[order],
        timestamps=timestamps[order],
        user_columns={"raw_user_id": user_ids, **raw.user_features.columns(user_ids)},
        item_columns={"raw_id": item_ids, **raw.item_features.columns(item_ids)},
    )


def _order_of_ids(ids: pa.StringArray, kept: np.ndarray) -> np.ndarray:
    """Codes of the kept ids: by number where all are digits (up to 18), else by their UTF-8 bytes."""
    codes = np.flatnonzero(kept)
    texts = ids.take(pa.array(codes))
    keys = {"text": texts}
    if pc.all(pc.match_substring_regex(texts, "^[0-9]{1,18}$")).as_py():
        keys = {"number": texts.cast(pa.int64()), "text": texts}
    order = pc.sort_indices(pa.table(keys), sort_keys=[(key, "ascending") for key in keys])
    return codes[order.to_numpy()]


def _ranks(order: np.ndarray, size: int) -> np.ndarray:
    ranks = np.empty(size, np.int32)
    ranks[order] = np.arange(len(order), dtype=np.int32)
    return ranks
