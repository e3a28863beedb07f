"""Recommendations for all users of a dataset, or for all items: a file with the answer of an export to each.

A block of users after the other is answered and written to a part; the parts become the file at the end. So a job that
is killed goes on with the blocks that are missing, and the ranks of a job divide the blocks.

Axes: B users of a batch, T actions, X items of the dataset, k items for each user.
"""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
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
from logitmix.common.files import only_writer, write_whole, writing_whole
from logitmix.common.messages import say
from logitmix.common.storage import fetch
from logitmix.launch.processes import launched
from logitmix.modules.features import NO_TIME
from logitmix.modules.schema import Owner
from logitmix.modules.values import Values
from logitmix.serving.columns import ACTIONS
from logitmix.serving.directory.format import MANIFEST
from logitmix.serving.encoding import Histories
from logitmix.serving.expression import Allowed, Filters
from logitmix.serving.request import UNKNOWN, Options
from logitmix.serving.retriever import Retriever
from logitmix.serving.texts import ABSENT
from logitmix.trainer.data.columns import Column, ranges
from logitmix.trainer.data.dataset import Dataset, load_dataset
from logitmix.trainer.data.lookups import columns_of, values_of
from logitmix.trainer.export.catalog import as_arrow, read_ids
from logitmix.trainer.export.columns import AsNeeded, actions_of_items, dataset_columns, new_items, read_items
from logitmix.trainer.progress import counting
from logitmix.trainer.run.folder import read_config
from logitmix.trainer.step.memory import set_up_memory

BLOCK = 2**10
"""Users of a part."""
BATCH, CANDIDATES = 2**9, 2**25
"""Users encoded and ranked at once, and how many items stage 1 keeps of all of them, at most."""
LEAST = 500
"""Items that stage 1 keeps at least, unless told otherwise."""
SUFFIXES = (".parquet", ".csv")
_JOB, _PART = "job.json", "{:07}.arrow"
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
    """A condition on its columns; without it, on the export's filterable columns, and if there are none, on the
    dataset's features of items (serving/expression.py)."""
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


def served(place: str, asked: Asked) -> tuple[Path, Asked]:
    """The serving directory at a place, or one that is made of the run there, in the folder of the parts; and what is
    asked, with the dataset of the run if it names none. ValueError if something else is in that folder, and without a
    dataset."""
    found = fetch(place)
    if (found / "config.toml").is_file():
        if launched():
            raise ValueError(f"{place} is a run; for several hosts, give an export: logitmix export {place} --out DIR")
        # Imported only when used: it loads slowly.
        from logitmix.trainer.export.export import export

        data = read_config(found).data.path
        asked = replace(asked, data=asked.data or data)
        # Where there are filterable columns, a condition is on these.
        others = dataset_columns(load_dataset(data)) if asked.limit and asked.where else ()
        filterable = list(dict.fromkeys([*asked.limit, *others])) or None
        with only_writer(asked.out), _resumable(_folder(asked)) as parts:
            export(found, found := parts / "export", overwrite=True, filterable=filterable)
    elif not (found / MANIFEST).is_file():
        raise ValueError(f"no run or export at {place}; give one that `logitmix train` or `logitmix export` made")
    elif not (asked.data or asked.similar_items):
        raise ValueError(f"give the dataset with the users' histories: --data.path DIR (beside the export {place})")
    return found, asked


def recommend(place: Path, asked: Asked, ranks: Ranks, threads: int = 1) -> dict[str, int]:
    """Writes the k best items for each user of the dataset after all their actions, or for each item after it alone, by
    the export at a place; returns counts. Collective. ValueError for a file of users that cannot be read or names none
    of the dataset's."""
    set_up_memory()
    torch.set_num_threads(threads)
    tell = say if ranks.rank == 0 else lambda line: None
    retriever = Retriever.load(place)
    dataset = None if asked.similar_items else load_dataset(asked.data)
    histories = _OfUsers(retriever, dataset, tell) if dataset else _OfItems(retriever)
    chosen = _chosen(asked.users, dataset, tell) if dataset else np.arange(retriever.num_items)
    with _resumable(asked.parts) if ranks.rank == 0 else nullcontext():
        retriever.filters.require_limit(asked.limit)
        if asked.options.boost_new and not histories.new:
            raise ValueError("--boost-new needs users whose dataset states the unit of its times; leave it out")
        new = Allowed.of(histories.new[0]) if asked.options.boost_new and histories.new else None
        wanted = retriever.wanted_row(asked.want) if asked.want else None
        only = _only(asked, retriever, dataset, tell) if asked.items or asked.where else None
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
    blocks = [chosen[start : start + BLOCK] for start in range(0, len(chosen), BLOCK)]
    with ExitStack() as held:

        def begin() -> list[int]:
            held.enter_context(only_writer(asked.out))
            return _missing(held.enter_context(_resumable(_folder(asked))), json.dumps(job), len(blocks))

        missing = on_first_rank(begin, ranks)

        def work() -> None:
            with counting(histories.of, sum(len(blocks[number]) for number in missing), ranks.rank == 0) as advance:
                for number in missing[ranks.rank :: ranks.world_size]:
                    found = _answers(retriever, histories, blocks[number], asked, only, new, wanted)
                    part = asked.parts / _PART.format(number)
                    with writing_whole(part) as file, pa.ipc.new_file(file.buffer, _SCHEMA) as writer:
                        writer.write_table(found)
                    advance(len(blocks[number]) * ranks.world_size)

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


def _folder(asked: Asked) -> Path:
    """That of the parts, made if need be. ValueError if something else is there."""
    parts = asked.parts
    if parts.exists() and (not parts.is_dir() or (any(parts.iterdir()) and not (parts / _JOB).is_file())):
        raise ValueError(f"{parts} is not what recommend leaves; remove it, or give another --out")
    parts.mkdir(parents=True, exist_ok=True)
    if not (parts / _JOB).exists():
        write_whole(parts / _JOB, "")
    return parts


@contextmanager
def _resumable(parts: Path) -> Iterator[Path]:
    """Yields the folder of the parts, and removes it if an error ends the job before there is a part from which it
    could go on. For a process that holds the right to write the file."""
    try:
        yield parts
    except BaseException:
        if not any(parts.glob("*.arrow")):
            shutil.rmtree(parts, ignore_errors=True)
        raise


def _missing(parts: Path, job: str, count: int) -> list[int]:
    """The numbers of the parts that are not there. Those of another job are removed, and a line says so."""
    found = sorted(parts.glob("*.arrow"))
    if (parts / _JOB).read_text(encoding="utf-8") != job:
        for file in found:
            file.unlink()
        if found:
            say(f"{parts} is of another export, dataset or option: begun anew (parts: {len(found):,})")
        write_whole(parts / _JOB, job)
        found = []
    elif found:
        say(f"parts there already: {len(found):,} of {count:,}")
    return [number for number in range(count) if parts / _PART.format(number) not in found]


def _chosen(file: str, dataset: Dataset, tell: Callable[[str], None]) -> Ints:
    """The indices of the users that a file names; all without one."""
    if not file:
        return np.arange(dataset.num_users)
    given = read_ids(file, "--users", "a user")
    ids = list(dict.fromkeys(given))
    place_of = {raw_id: place for place, raw_id in enumerate(dataset.raw_user_id_column().to_pylist())}
    found = [place_of[raw_id] for raw_id in ids if raw_id in place_of]
    unknown = [raw_id for raw_id in ids if raw_id not in place_of]
    if not ids:
        raise ValueError(f"{file} names no user; --users needs the id of one in each line")
    if not found:
        raise ValueError(f"none of the {len(ids):,} users in {file} is in {dataset.path}, such as {ids[0]!r}")
    if unknown:
        tell(f"{len(unknown):,} of {len(ids):,} users in {file} are not in {dataset.path}, such as {unknown[0]!r}")
    if len(ids) < len(given):
        ((twice, _),) = Counter(given).most_common(1)
        tell(f"{len(given) - len(ids):,} lines of {file} name a user again, such as {twice!r}: answered once")
    return np.array(found, np.int64)


def _only(asked: Asked, retriever: Retriever, dataset: Dataset | None, tell: Callable[[str], None]) -> Allowed:
    """The items of the export that are in the table, if there is one, and fulfill the condition; `dataset` if it is
    loaded. ValueError if there are none."""
    place, columns = asked.items or asked.data, {}
    if not asked.items and (retriever.filters.columns.keys() - {ACTIONS} or not (dataset or asked.data)):
        return _some(retriever.filters.allowed(asked.where), f"fulfills {asked.where}", tell)
    if asked.items:
        table = read_items(asked.items, "item", {})
        ids, columns = table.ids.to_pylist(), table.columns
        for line in table.remarks(Path(asked.items).name):
            tell(line)
    else:
        dataset = dataset or load_dataset(asked.data)
        ids = dataset.raw_id_column().to_pylist()
        columns = {ACTIONS: actions_of_items(dataset), **dataset_columns(dataset)}
    if not ids:
        raise ValueError(f"{place} has no items, so none may be recommended")
    place_N = np.array(retriever.raw_ids.places(ids), np.int64)
    place_N[place_N >= retriever.num_items] = ABSENT
    if len(absent := (place_N == ABSENT).nonzero()[0]):
        of = f"{len(absent):,} of {len(ids):,} items in {place} are not in the export"
        tell(f"{of}, such as {ids[int(absent[0])]!r}")
    held_N = np.ones(len(ids), bool)
    if asked.where:
        held_N = Filters(AsNeeded(columns), len(ids)).allowed(asked.where).mask
    only = np.zeros(retriever.num_items, bool)
    only[place_N[held_N & (place_N != ABSENT)]] = True
    return _some(Allowed.of(only), f"is in {place}" + (f" and fulfills {asked.where}" if asked.where else ""), tell)


def _some(allowed: Allowed, which: str, tell: Callable[[str], None]) -> Allowed:
    """ValueError if there are none."""
    if not allowed.count:
        raise ValueError(f"no item of the export {which}")
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
    asked: Asked, histories: "_OfUsers | _OfItems", retriever: Retriever, blocks: Sequence[Ints]
) -> dict[str, int]:
    """Parts -> file."""
    names, items, k = histories.names(), as_arrow(retriever.raw_ids), asked.options.k
    text = pa.string() if asked.out.suffix == ".csv" else pa.dictionary(pa.int32(), pa.string())
    schema = pa.schema([(histories.column, text), _SCHEMA.field("rank"), ("item", text), _SCHEMA.field("score")])
    rows, short, none, example = 0, 0, 0, ""
    count_X = np.zeros(retriever.num_items, np.int64)
    with writing_whole(asked.out) as file:
        sink = file.buffer
        # Parquet takes over the dictionaries, which it would otherwise make of the texts; they are read as texts.
        parquet = partial(
            pq.ParquetWriter, store_schema=False, use_dictionary=schema.names[:3], write_statistics=schema.names[:1]
        )
        with (pa.csv.CSVWriter if asked.out.suffix == ".csv" else parquet)(sink, schema) as writer:
            for number, block in enumerate(blocks):
                part = pa.ipc.open_file(asked.parts / _PART.format(number)).read_all()
                columns = [_named(part["of"], names), part["rank"], _named(part["item"], items), part["score"]]
                writer.write_table(pa.table(columns, schema.names).cast(schema))
                count_X += np.bincount(part["item"].to_numpy(), minlength=len(count_X))
                full = part["of"].filter(pc.equal(part["rank"], k)).to_numpy()
                lacking = np.setdiff1d(block, full)
                if len(lacking):
                    example = example or names[int(lacking[0])].as_py()
                    none += len(np.setdiff1d(lacking, part["of"].to_numpy()))
                rows, short = rows + len(part), short + len(lacking)
    if short:
        nothing = f"{none:,} of them none, " if none else ""
        say(f"{short:,} {histories.of} get fewer than {k:,} items, {nothing}such as {example!r}")
    is_new, of_actions = histories.new or (np.zeros(0, bool), 0.0)
    if is_new.any() and count_X.any():
        say(
            f"{count_X[is_new].sum() / count_X.sum():.1%} of what is recommended are items of the last week "
            f"({int(is_new.sum()):,}), which have {of_actions:.1%} of that week's actions"
        )
    shutil.rmtree(asked.parts)
    return {histories.of: sum(map(len, blocks)), "rows": rows}


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

    @cached_property
    def new(self) -> tuple[NDArray[np.bool_], float] | None:
        """`new_items`, for the items of the export; those that the dataset lacks are new."""
        if not (found := new_items(self._dataset)):
            return None
        num_items = self._retriever.num_items
        is_new, there = np.ones(num_items, bool), (self._item_X >= 0) & (self._item_X < num_items)
        is_new[self._item_X[there]] = found[0][there]
        return is_new, found[1]

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

    new = None

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
