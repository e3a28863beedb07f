"""Recommendations for all users of a dataset, or for all items: a file with the answer of an export to each.

A block of users after the other is answered and written to a part, whose name has a digest of all that it depends on;
the parts become the file at the end. So a job that is killed goes on with the blocks that are missing, and the ranks of
a job divide the blocks.

Axes: B users of a batch, T actions, X items of the dataset, k items for each user.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from logitmix.comm.collectives import on_all_ranks, on_first_rank
from logitmix.comm.process_group import Ranks
from logitmix.common.checked import json_digest
from logitmix.common.files import only_writer, writing_whole
from logitmix.common.messages import say
from logitmix.modules.features import NO_TIME
from logitmix.modules.schema import Owner
from logitmix.modules.values import Values
from logitmix.serving.encoding import Histories
from logitmix.serving.expression import Allowed, Filters
from logitmix.serving.request import UNKNOWN, Options
from logitmix.serving.retriever import Retriever
from logitmix.serving.texts import ABSENT
from logitmix.trainer.data.columns import Column, ranges
from logitmix.trainer.data.dataset import Dataset, load_dataset
from logitmix.trainer.data.lookups import columns_of, values_of
from logitmix.trainer.export.catalog import as_arrow, read_ids
from logitmix.trainer.export.columns import AsNeeded, read_items
from logitmix.trainer.progress import counting
from logitmix.trainer.step.memory import set_up_memory

BLOCK = 2**10
"""Users of a part."""
BATCH, CANDIDATES = 2**9, 2**25
"""Users encoded and ranked at once, and how many items stage 1 keeps of all of them, at most."""
LEAST = 500
"""Items that stage 1 keeps at least, unless told otherwise."""
SUFFIXES = (".parquet", ".csv")
_SCHEMA = pa.schema([("of", pa.int64()), ("rank", pa.int32()), ("item", pa.int64()), ("score", pa.float32())])

Ints = NDArray[np.int64]
Read = tuple[Ints, Histories, list[list[int]]]
"""Some users or items, their histories, and the items that each may not find."""


@dataclass(frozen=True)
class Asked:
    """For whom items are wanted, and where these go."""

    out: Path
    data: str = ""
    """Dataset directory with the histories."""
    options: Options = Options(100)  # noqa: RUF009 (frozen)
    users: str = ""
    """File with the raw id of a user in each line; all users without it."""
    similar_items: bool = False
    """For each item after it alone, instead of for users."""
    items: str = ""
    """Table of the items that may be recommended; all without it."""
    where: str = ""
    """A condition on its columns; without it, on the export's filterable columns (serving/expression.py)."""
    limit: dict[str, int] = field(default_factory=dict)
    """Most items of a value of a filterable column for each user."""
    want: str = ""
    """Which kind of action is to come, for a model that knows it; any without it."""

    def __post_init__(self) -> None:
        if self.out.suffix not in SUFFIXES or self.out.is_dir() or ":" in self.out.parts[0]:
            raise ValueError(
                f"--out is {self.out}; it must be a local file whose name ends with {' or '.join(SUFFIXES)}"
            )
        if self.users and self.similar_items:
            raise ValueError("--users has no place beside --similar-items, which asks for all items; leave it out")

    @property
    def parts(self) -> Path:
        """Where the parts are while the file is not complete."""
        return self.out.with_name(f"{self.out.name}.parts")


def recommend(place: str, asked: Asked, ranks: Ranks, threads: int = 1) -> dict[str, int]:
    """Writes the k best items for each user of the dataset after all their actions, or for each item after it alone, by
    the export at a place; returns counts. Collective. ValueError for a file of users that cannot be read or names none
    of the dataset's."""
    set_up_memory()
    torch.set_num_threads(threads)
    tell = say if ranks.rank == 0 else lambda line: None
    if not (asked.data or asked.similar_items):
        raise ValueError("give the dataset with the users' histories: --data.path DIR")
    retriever = Retriever.load(place)
    dataset = None if asked.similar_items else load_dataset(asked.data)
    histories = _OfUsers(retriever, dataset, tell) if dataset else _OfItems(retriever)
    chosen = _chosen(asked.users, dataset, tell) if dataset else np.arange(retriever.num_items)
    retriever.filters.require_limit(asked.limit)
    new = retriever.new_items() if asked.options.boost_new else None
    wanted = retriever.wanted_row(asked.want) if asked.want else None
    only = _only(asked, retriever, tell) if asked.items or asked.where else None
    asked = _with_stage_1(asked, retriever, only, tell)
    job = {
        "export": retriever.digest,
        "dataset": json_digest(dataset.identity()) if dataset else "",
        "of": hashlib.sha256(chosen.tobytes()).hexdigest(),
        "only": "" if only is None else hashlib.sha256(only.bits.tobytes()).hexdigest(),
        "options": asdict(asked.options),
        "limit": asked.limit,
        "want": asked.want,
    }
    blocks = {
        asked.parts / f"{json_digest(job)[:16]}-{start // BLOCK:07}.arrow": chosen[start : start + BLOCK]
        for start in range(0, len(chosen), BLOCK)
    }
    with ExitStack() as held:

        def begin() -> list[Path]:
            held.enter_context(only_writer(asked.out))
            asked.parts.mkdir(exist_ok=True)
            held.callback(_remove_if_empty, asked.parts)
            missing = [part for part in blocks if not part.exists()]
            if len(missing) < len(blocks):
                say(f"parts there already: {len(blocks) - len(missing):,} of {len(blocks):,}")
            return missing

        missing = on_first_rank(begin, ranks)

        def work() -> None:
            with counting(histories.of, sum(len(blocks[part]) for part in missing), ranks.rank == 0) as advance:
                for part in missing[ranks.rank :: ranks.world_size]:
                    found = _answers(retriever, histories, blocks[part], asked, only, new, wanted)
                    with writing_whole(part) as file, pa.ipc.new_file(file.buffer, _SCHEMA) as writer:
                        writer.write_table(found)
                    advance(len(blocks[part]) * ranks.world_size)

        on_all_ranks(work, ranks)
        return on_first_rank(lambda: _finish(asked, histories, retriever, blocks), ranks)


def _with_stage_1(asked: Asked, retriever: Retriever, only: Allowed | None, tell: Callable[[str], None]) -> Asked:
    """What is asked, with how many items stage 1 keeps. By default they are fewer than those of a request, as all users
    are answered; limits may take any number of items, so not with them."""
    options, X = asked.options, retriever.num_items
    if options.stage1 is not None or asked.limit or retriever.tower.hindexer is None:
        return asked
    kept = min(options.kept(X), max(LEAST, 5 * options.k, X // 10))
    if kept < (X if only is None else only.count):
        tell(f"the h-indexer keeps {kept:,} of {X:,} items for each answer; --stage1 {X} ranks all by the similarity")
    return replace(asked, options=replace(options, stage1=kept))


def _chosen(file: str, dataset: Dataset, tell: Callable[[str], None]) -> Ints:
    """The indices of the users that a file names, each once; all without one."""
    if not file:
        return np.arange(dataset.num_users)
    ids = list(dict.fromkeys(read_ids(file, "--users", "a user")))
    place_of = {raw_id: place for place, raw_id in enumerate(dataset.raw_user_id_column().to_pylist())}
    found = [place_of[raw_id] for raw_id in ids if raw_id in place_of]
    if len(found) < len(ids):
        unknown = next(raw_id for raw_id in ids if raw_id not in place_of)
        tell(
            f"{len(ids) - len(found):,} of {len(ids):,} users in {file} are not in {dataset.path}, such as {unknown!r}"
        )
    if not found:
        raise ValueError(f"{file} names no user of {dataset.path}; --users needs the id of one in each line")
    return np.array(found, np.int64)


def _only(asked: Asked, retriever: Retriever, tell: Callable[[str], None]) -> Allowed:
    """The export's items that are in the table, if there is one, and fulfill the condition. ValueError if there are
    none."""
    allowed = retriever.filters.allowed(asked.where) if asked.where and not asked.items else None
    if allowed is None:
        table = read_items(asked.items, "item", {})
        ids = table.ids.to_pylist()
        for line in table.remarks(Path(asked.items).name):
            tell(line)
        place_N = np.array(retriever.raw_ids.places(ids), np.int64)
        place_N[place_N >= retriever.num_items] = ABSENT
        if len(absent := (place_N == ABSENT).nonzero()[0]):
            example = ids[int(absent[0])]
            tell(f"{len(absent):,} of {len(ids):,} items in {asked.items} are not in the export, such as {example!r}")
        held_N = place_N != ABSENT
        if asked.where:
            held_N &= Filters(AsNeeded(table.columns), len(ids)).allowed(asked.where).mask
        only = np.zeros(retriever.num_items, bool)
        only[place_N[held_N]] = True
        allowed = Allowed.of(only)
    if not allowed.count:
        raise ValueError("no item of the export may be recommended by --items and --where")
    tell(f"{allowed.count:,} of {allowed.num_items:,} items may be recommended")
    return allowed


def _answers(
    retriever: Retriever,
    histories: "_OfUsers | _OfItems",
    block: Ints,
    asked: Asked,
    only: Allowed | None,
    new: Allowed | None,
    wanted: tuple[str, int] | None,
) -> pa.Table:
    """The best items of some users, one row for each. `wanted`: Retriever.wanted_row."""
    options = asked.options
    exclude = retriever.exclude_history if options.exclude_history is None else options.exclude_history
    item_BK = np.full((len(block), min(options.k, retriever.num_items)), UNKNOWN)
    score_BK = np.empty(item_BK.shape, np.float32)
    order_B, by_length_B = block.argsort(), block[histories.lengths(block).argsort(kind="stable")]
    size = BATCH
    if retriever.tower.hindexer is not None:
        size = max(1, min(BATCH, CANDIDATES // min(options.kept(retriever.num_items), retriever.num_items)))
    for start in range(0, len(block), size):
        for some, read, excluded in histories.read(by_length_B[start : start + size], exclude):
            at = order_B[np.searchsorted(block, some, sorter=order_B)]
            if wanted:
                last_B = read.length_B.cumsum(0) - 1
                name, row = wanted
                # Requests without a history have no action to say it of.
                read.values[name].values[last_B[read.item_T[last_B] != UNKNOWN]] = row
            found = retriever.best(read, excluded, options, only, asked.limit, new)
            item_BK[at], score_BK[at] = found.items.numpy(), found.scores.numpy()
    row_N, rank_N = (item_BK != UNKNOWN).nonzero()
    columns = block[row_N], rank_N + 1, item_BK[row_N, rank_N], score_BK[row_N, rank_N]
    return pa.table([pa.array(of, field.type) for of, field in zip(columns, _SCHEMA, strict=True)], _SCHEMA)


def _finish(
    asked: Asked, histories: "_OfUsers | _OfItems", retriever: Retriever, blocks: Mapping[Path, Ints]
) -> dict[str, int]:
    """Writes the parts into the file, and removes them."""
    names, items, k = histories.names(), as_arrow(retriever.raw_ids), asked.options.k
    text = pa.string() if asked.out.suffix == ".csv" else pa.dictionary(pa.int32(), pa.string())
    schema = pa.schema([(histories.column, text), _SCHEMA.field("rank"), ("item", text), _SCHEMA.field("score")])
    count, rows, full = sum(map(len, blocks.values())), 0, 0
    # Parquet takes over the dictionaries, which it would otherwise make of the texts; they are read as texts.
    parquet = partial(
        pq.ParquetWriter, store_schema=False, use_dictionary=schema.names[:3], write_statistics=schema.names[:1]
    )
    with (
        writing_whole(asked.out) as file,
        (pa.csv.CSVWriter if asked.out.suffix == ".csv" else parquet)(file.buffer, schema) as writer,
    ):
        for path in blocks:
            part = pa.ipc.open_file(path).read_all()
            columns = [_named(part["of"], names), part["rank"], _named(part["item"], items), part["score"]]
            writer.write_table(pa.table(columns, schema.names).cast(schema))
            rows, full = rows + len(part), full + pc.sum(pc.equal(part["rank"], k)).as_py()
    if full < count:
        say(f"{count - full:,} {histories.of} get fewer than {k:,} items")
    for path in asked.parts.iterdir():
        if re.fullmatch(r"\.?[0-9a-f]{16}-[0-9]{7}\.arrow.*", path.name):
            path.unlink()
    return {histories.of: count, "rows": rows}


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _named(places: pa.ChunkedArray, names: pa.Array | pa.ChunkedArray) -> pa.DictionaryArray:
    encoded = places.combine_chunks().dictionary_encode()
    return pa.DictionaryArray.from_arrays(encoded.indices, pc.take(names, encoded.dictionary).cast(pa.string()))


class _OfUsers:
    """The histories of a dataset, as requests to an export would state them. Items, and the values of features, are
    matched by their ids."""

    of, column = "users", "user"

    def __init__(self, retriever: Retriever, dataset: Dataset, tell: Callable[[str], object]) -> None:
        self._retriever, self._dataset, self._schema = retriever, dataset, retriever.tower.schema
        self._item_X = np.array(retriever.raw_ids.places(dataset.raw_ids()), np.int64)
        if len(absent := (self._item_X == ABSENT).nonzero()[0]):
            example = dataset.raw_id_column()[int(absent[0])].as_py()
            of = f"of {dataset.num_items:,} items of {dataset.path} are not in the export, such as {example!r}"
            if len(absent) == dataset.num_items:
                raise ValueError(f"all {of}; give the dataset that the model was trained on, or a later one")
            tell(f"{len(absent):,} {of}: left out of histories")
        there, kinds = columns_of(dataset, self._schema), {of.name: of for of in dataset.schema.features}
        self._columns: dict[str, tuple[Column, Ints | None]] = {}
        for feature in (*self._schema.of("user"), *self._schema.of("event")):
            own = kinds.get(feature.name, feature)
            if feature.name not in there[feature.owner]:
                tell(f"{dataset.path} has no {feature.owner} feature {feature.name}: to the model it is unknown")
            elif (own.kind, own.width) != (feature.kind, feature.width):
                raise ValueError(
                    f"{feature.name} of {dataset.path} is of kind {own.kind}, to the model of kind {feature.kind}"
                )
            else:
                rows = None
                if feature.sparse:
                    values = dataset.vocabulary_column(own.table).fill_null("").to_pylist()
                    rows = np.array(retriever.features.rows(feature.table, values), np.int64)
                self._columns[feature.name] = there[feature.owner][feature.name], rows

    def names(self) -> pa.ChunkedArray:
        return self._dataset.raw_user_id_column()

    def lengths(self, user_B: Ints) -> Ints:
        return self._dataset.offsets[user_B + 1] - self._dataset.offsets[user_B]

    def read(self, user_B: Ints, exclude: bool) -> Iterator[Read]:
        dataset, L = self._dataset, self._retriever.config.encoder.max_length
        first_B, last_B = dataset.offsets[user_B], dataset.offsets[user_B + 1]
        at_T, row_T = ranges(first_B, last_B - first_B), np.repeat(np.arange(len(user_B)), last_B - first_B)
        item_T = self._item_X[dataset.items_flat[at_T]]
        at_T, row_T, item_T = (of[item_T != ABSENT] for of in (at_T, row_T, item_T))
        count_B = np.bincount(row_T, minlength=len(user_B))
        end_B = count_B.cumsum()
        items = item_T.tolist() if exclude else []
        excluded = [items[end - count : end] for end, count in zip(end_B.tolist(), count_B.tolist(), strict=True)]
        length_B = np.minimum(count_B, L)
        place_T = ranges(end_B - length_B, length_B)
        with_history, without = (length_B > 0).nonzero()[0], (length_B == 0).nonzero()[0]
        if len(with_history):
            time_T = dataset.timestamps_flat[at_T[place_T]].astype(np.int64)
            asked_T = np.append(time_T[1:], 0)
            asked_T[length_B[with_history].cumsum() - 1] = dataset.timestamps_flat[last_B[with_history] - 1]
            read = Histories(
                torch.from_numpy(length_B[with_history]),
                torch.from_numpy(item_T[place_T]),
                self._values("user", user_B[with_history]) | self._values("event", at_T[place_T]),
                (torch.from_numpy(time_T), torch.from_numpy(asked_T)),
            )
            yield user_B[with_history], read, [excluded[row] for row in with_history]
        # They are answered from their features.
        if len(without) and self._schema.of("user"):
            values = self._values("user", user_B[without])
            yield user_B[without], _of_one(self._retriever, [UNKNOWN] * len(without), values), [[] for _ in without]

    def _values(self, owner: Owner, row_R: Ints) -> dict[str, Values]:
        found = _unknown(self._retriever, owner, len(row_R))
        for feature in self._schema.of(owner):
            if feature.name in self._columns:
                column, rows = self._columns[feature.name]
                taken = column.take(row_R)
                found[feature.name] = values_of(taken, taken.values if rows is None else rows[taken.values])
        return found


class _OfItems:
    """Each item as a history of its own, in which it is not found."""

    of, column = "items", "similar_to"

    def __init__(self, retriever: Retriever) -> None:
        self._retriever = retriever

    def names(self) -> pa.Array:
        return as_arrow(self._retriever.raw_ids)

    def lengths(self, item_B: Ints) -> Ints:
        return np.ones(len(item_B), np.int64)

    def read(self, item_B: Ints, exclude: bool) -> Iterator[Read]:
        items = item_B.tolist()
        user = _unknown(self._retriever, "user", len(items))
        yield item_B, _of_one(self._retriever, items, user), [[of] for of in items]


def _of_one(retriever: Retriever, items: list[int], user: Mapping[str, Values]) -> Histories:
    """Histories of one item each, of which no more is known."""
    count = len(items)
    time_B = torch.full((count,), NO_TIME)
    values = {**user, **_unknown(retriever, "event", count)}
    return Histories(torch.ones(count, dtype=torch.int64), torch.tensor(items), values, (time_B, time_B))


def _unknown(retriever: Retriever, owner: Owner, count: int) -> dict[str, Values]:
    zero_R = torch.zeros(count, dtype=torch.int64)
    return {name: of.take(zero_R) for name, of in retriever.features.read(owner, [{}], [""]).items()}
