"""Columns of a source -> features: their kinds, vocabularies, indices and statistics.

A kind that neither the source nor --schema states is inferred from the values:

    integers, text                id where a value occurs at least twice on average; otherwise integers are numbers
                                  (not those with leading zeros, which are codes), and text is not used. 12.0 is an
                                  integer if all are whole: pandas writes them so where one is missing
    dates                         date, if they are of items and the times of the actions are dates, too; else not used
    true and false                id
    other numbers                 number; numbers.py tells which texts are, "$1,299.00" and "12,50" among them. If a few
                                  texts among them are none, these are missing
    text with "|"                 ids, the parts, where a part occurs at least twice on average
    lists of text or integers     ids, where an element occurs at least twice on average
    lists of other numbers        vector, where all are equally long

A column is also not used if all its values are the same, or if it has another type. Blank texts and those of MISSING
are missing values, unless --schema names others.
"""

import re
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from logitmix.common.mappings import from_mapping, nearest, plainly
from logitmix.modules.kinds.registry import KINDS, kind_named
from logitmix.modules.kinds.text import NGRAMS, TextEncoder, words_of
from logitmix.modules.schema import ITEM, ITEM_FEATURE, Feature, Owner, Schema, Table
from logitmix.trainer.data.arrow import as_numpy, is_list, is_text, is_time, lengths, lists_of, order_of_texts
from logitmix.trainer.data.columns import ITEM_COLUMNS, SEQUENCE_COLUMNS, Column, index_type, ranges
from logitmix.trainer.data.numbers import MISSING, Numbers, are_exceptions, not_one, read_numbers
from logitmix.trainer.data.times import read_dates

SEPARATOR = "|"
VALUE = "value"
"""The field of a value in the structs of columns that were joined (joined.py)."""
RESERVED = {ITEM, "title", "raw_user_id", *ITEM_COLUMNS, *SEQUENCE_COLUMNS}
"""Names that the dataset directory uses for other columns."""

_INTEGER = "^(-?[1-9][0-9]{0,17}|0)$"
_WHOLE = r"^(-?[1-9][0-9]{0,15}|0)(\.0*)?$"


@dataclass(frozen=True)
class FeatureOptions:
    """The settings of a column in --schema."""

    owner: Literal["auto", "item", "user", "event"] = "auto"
    """A column of the actions can be assigned to their items or users. An item takes the value of its first action that
    has one, a user that of the user's first action."""
    kind: str = "auto"
    table: str = ""
    """Table of an id or ids; the feature's name when left empty. Features that name the same table share it."""
    columns: dict[str, str] = field(default_factory=dict)
    """For a kind with several columns, the others: { weights = "COLUMN" }."""
    use: bool = True
    missing: tuple[str, ...] = MISSING
    """Texts that stand for no value; blank ones always do."""


@dataclass(frozen=True)
class FeaturesOptions:
    """The file that --schema names: a section [features.NAME] for each column that it describes."""

    features: dict[str, FeatureOptions] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, said in self.features.items():
            try:
                needed = () if said.kind == "auto" else kind_named(said.kind).parallel
            except ValueError as error:
                raise ValueError(f"features.{name}: its {error}") from None
            if set(said.columns) != set(needed):
                columns = ", ".join(f'{of} = "COLUMN"' for of in needed)
                todo = f"needs columns = {{ {columns} }}" if needed else "has no further columns"
                raise ValueError(f"features.{name} is of kind {said.kind}, which {todo}")


def read_schema(path: str) -> FeaturesOptions:
    """The file that --schema names; nothing without one. ValueError if it is not as above."""
    if not path:
        return FeaturesOptions()
    try:
        tree = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid TOML: {plainly(str(error))}") from None
    return from_mapping(FeaturesOptions, tree, path)


@dataclass(frozen=True)
class RawColumn:
    """One value for each row of its owner, null where it is missing: items and users by index, and actions ordered by
    user, then time."""

    name: str
    owner: Owner
    values: pa.Array
    """Or what reads them, for a column that is not to stay in memory."""
    kind: str | None = None
    """None: inferred."""
    table: str = ""
    """The feature's name when left empty."""
    infer: bool = True
    """False: without a kind it is not used."""
    missing: tuple[str, ...] = MISSING
    """Texts that stand for no value."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """As in the schema's feature."""
    statistics: tuple[float, float] | None = None
    """Mean and standard deviation of numbers; None: those of the values."""
    counts: np.ndarray | None = None
    """int64: how often each value counts; None: once."""
    source: str = ""
    """The column's name in what it is read from."""
    encoder: TextEncoder | None = None
    """Of texts; None: it is fitted to them."""

    def load(self) -> "RawColumn":
        """With the values in memory, each once with its count, if they are read."""
        if not callable(self.values):
            return self
        values, counts = self.values()
        return replace(self, values=values, counts=counts)


@dataclass(frozen=True)
class Features:
    schema: Schema
    columns: dict[str, Column]
    """Of all features but the item id."""
    vocabularies: dict[str, pa.Array]
    """Of all tables but the items', null in row 0."""
    unused: dict[str, str]
    """Why a column is not used whose kind is neither stated nor clear from its values."""
    notes: list[str]
    """How values were read, where a user may want it otherwise."""
    projections: dict[str, np.ndarray]
    """Of features of texts that are encoded by n-grams: modules/kinds/text.py."""


def make_features(
    columns: Sequence[RawColumn],
    item_ids: pa.StringArray,
    unit: str = "",
    embed_with: str = NGRAMS,
) -> Features:
    """Encodes columns as features, one after the other. `unit` is that of the actions' times; "" if they are no dates.
    `embed_with` names the encoder of texts.

    Raises ValueError where values do not fit the kind that was stated.
    """
    marked: dict[str, dict[str, int]] = {}
    unused: dict[str, str] = {}
    notes: list[str] = []
    features, made, projections = [ITEM_FEATURE], dict[str, Column](), dict[str, np.ndarray]()
    coded: dict[str, Codes] = {}
    sharing: dict[str, list[tuple[pa.StringArray, np.ndarray]]] = {}
    for column in columns:
        column = column.load()
        marked[column.name] = _marked(column)
        column = replace(column, values=filled(column.values, column.missing))
        of_times = unit if column.owner == "item" else ""
        if column.infer and not column.kind:
            column = replace(column, kind=infer_kind(column.values, column.counts, of_times))
            if column.kind == "id" and pa.types.is_dictionary(column.values.type):
                notes += [
                    f"{column.name}: {why}; so these are ids, no numbers" for why in not_one(_used(column.values))
                ]
        if not column.kind:
            unused[column.name] = _why_unused(column)
            continue
        notes += _of_numbers(column)
        form, encoder = kind_named(column.kind), column.encoder
        if form.of_texts and not encoder:
            texts = _texts_of(column).to_pylist()
            if not any(words_of(text) if embed_with == NGRAMS else text for text in texts):
                raise ValueError(f"feature {column.name} has no text of letters or digits; kind text needs some")
            encoder = TextEncoder.fit(embed_with, texts)
        found = getattr(_Source(replace(column, encoder=encoder)), form.reads)()
        if isinstance(found, Codes):
            table = column.table or column.name
            features.append(Feature(column.name, column.owner, column.kind, table, columns=dict(column.columns)))
            sharing.setdefault(table, []).append((found.texts, found.occurrences(column.counts)))
            coded[column.name] = found
        else:
            numbers: np.ndarray = found
            if form.dated and not of_times:
                why = f"is of {column.owner}s" if unit else "has dates, but the times of the actions are none"
                raise ValueError(f"feature {column.name} {why}; kind {column.kind} is the age of items at a request")
            stated = column.statistics or (None if form.missing is None else (form.missing, 1.0))
            mean, deviation = stated or _statistics(numbers, column.counts)
            width = 1 if numbers.ndim == 1 else numbers.shape[1]
            said = (column.name, column.owner, column.kind, column.table, width, mean, deviation)
            of_texts = (encoder.name, encoder.version) if encoder else ("", "")
            if encoder and encoder.projection is not None:
                projections[column.name] = encoder.projection
            features.append(Feature(*said, {}, unit if form.dated else "", *of_texts))
            numbers[np.isnan(numbers)] = mean
            made[column.name] = Column(numbers)
    values = {ITEM: item_ids} | {table: _vocabulary(codes) for table, codes in sharing.items() if table != ITEM}
    tables = {name: Table(name, 1 + len(known)) for name, known in values.items()}
    for feature in features:
        if feature.name in coded:
            made[feature.name] = _look_up(coded.pop(feature.name), values[feature.table], tables[feature.table])
    vocabularies = {
        name: pa.concat_arrays([pa.nulls(1, pa.string()), known]) for name, known in values.items() if name != ITEM
    }
    notes = [*_of_markers(marked), *notes]
    return Features(Schema(tuple(features), tuple(tables.values())), made, vocabularies, unused, notes, projections)


def _marked(column: RawColumn) -> dict[str, int]:
    """How many rows have each of the texts that stand for no value."""
    values = _encoded(column.values)
    if not pa.types.is_dictionary(values.type):
        return {}
    markers = pc.and_(_are_missing(values.dictionary, column.missing), pc.not_equal(values.dictionary, ""))
    if not pc.any(markers).as_py():
        return {}
    counts = _occurrences(values.indices.fill_null(-1).to_numpy(), column.counts, len(values.dictionary))
    found = {values.dictionary[row].as_py().strip(): int(counts[row]) for row in np.flatnonzero(as_numpy(markers))}
    return {text: count for text, count in found.items() if text and count}


def _of_markers(marked: Mapping[str, Mapping[str, int]]) -> list[str]:
    columns = [
        f"{' and '.join(f'{count:,} {text}' for text, count in found.items())} of {name}"
        for name, found in marked.items()
        if found
    ]
    said = "; ".join(columns)
    return [f"taken as missing: {said} (--schema FILE can state other texts: missing = [])"] if columns else []


def _of_numbers(column: RawColumn) -> list[str]:
    """What was read of a column of numbers or dates, if it is one, in a way that a user may want otherwise."""
    form = kind_named(column.kind or "")
    if form.dated:
        days, wrong = _read_dates(column)
        there = np.floor(days[np.isfinite(days)]).astype("M8[D]")
        span = f"dates from {there.min()} to {there.max()}" if len(there) else "no dates"
        seen = f"with --model.features {column.name}, a model sees their age"
        note = f"{column.name}: {span} of {len(there):,} items; {seen}"
        return [note, *_of_wrong(column, wrong, "date")]
    if form.sparse or form.of_texts:
        return []
    values = column.values
    if form.wide and pa.types.is_dictionary(values.type):
        values = pc.split_pattern(values.dictionary, SEPARATOR).take(values.indices)
    if is_list(values.type):
        # Of each number in the vectors.
        column = replace(column, values=filled(values.flatten()), counts=None)
    if not pa.types.is_dictionary(column.values.type):
        return _of_wrong(column, _not_finite(column.values), "finite number") if _is_scalar(column.values.type) else []
    texts = _used(column.values)
    numbers = read_numbers(texts)
    notes = [f"{column.name}: {numbers.note}"] if numbers.note else []
    none = pc.and_not(pa.array(np.isnan(_floats(numbers.values))), pc.is_in(texts, value_set=numbers.wrong))
    return [
        *notes,
        *_of_wrong(column, numbers.wrong, "number"),
        *_of_wrong(column, texts.filter(none), "finite number"),
    ]


def _not_finite(values: pa.Array) -> pa.Array:
    """Returns the different values that are infinite as float32."""
    return values.filter(pa.array(np.isnan(_floats(values)) & as_numpy(values.is_valid()))).unique()


def _of_wrong(column: RawColumn, wrong: pa.Array, what: str) -> list[str]:
    """A line if some texts of a column are no numbers or dates."""
    if not len(wrong):
        return []
    rows = int(_weighted(as_numpy(pc.is_in(_decoded(column.values), value_set=wrong)), column.counts))
    are = f"value is no {what} and counts" if rows == 1 else f"values are no {what}s and count"
    return [f"{column.name}: {rows:,} {are} as missing, such as {wrong[0].as_py()!r:.40}"]


def as_in_requests(feature: Feature, values: pa.Array, encoder: TextEncoder | None = None) -> list[Any]:
    """A column of new items, read as `make_features` reads that of a dataset, as the values that a FeatureReader takes:
    texts, None for a missing one; lists of texts, and of pairs with what is parallel to them; numbers and lists of
    numbers, the feature's mean for missing ones. `encoder`: that of a feature of texts.

    Raises ValueError where values do not fit the feature's kind.
    """
    # A text of an id that is in no vocabulary is as unknown as a missing one.
    missing = () if feature.sparse and not feature.form.bag else MISSING
    column = RawColumn(
        feature.name,
        feature.owner,
        filled(values, missing),
        feature.kind,
        feature.table,
        columns=feature.columns,
        encoder=encoder,
    )
    if column.values.null_count == len(column.values):
        return [None] * len(column.values)
    found = getattr(_Source(column, exceptions=False), feature.form.reads)()
    if not isinstance(found, Codes):
        numbers: np.ndarray = found
        if numbers[0].size != feature.width:
            raise ValueError(f"feature {feature.name} has lists of {numbers[0].size} numbers, not {feature.width}")
        numbers[np.isnan(numbers)] = feature.mean
        return numbers.tolist()
    # Code -1, a missing value, takes the last place.
    texts = np.array([*found.texts.to_pylist(), None], object)[found.codes].tolist()
    if found.offsets is None:
        return texts
    if found.parallel:
        texts = list(zip(texts, *(numbers.tolist() for numbers in found.parallel.values()), strict=True))
    return [texts[first:last] for first, last in pairwise(found.offsets.tolist())]


def name_features(columns: Sequence[RawColumn], known: Sequence[Feature] = ()) -> list[RawColumn]:
    """The columns under valid feature names: letters, digits and underscores; and OWNER_NAME if two owners have a
    column of that name, or if the dataset's own columns use the name. The features of a dataset that are `known` keep
    their names. ValueError if two columns of one owner get the same name."""
    owners: dict[str, set[Owner]] = {}
    owner_of = {feature.name: feature.owner for feature in known}
    for column in columns:
        owners.setdefault(valid_name(column.name), set()).add(column.owner)
    named: dict[str, RawColumn] = {}
    for column in columns:
        plain = valid_name(column.name)
        name, clashes = f"{column.owner}_{plain}", len(owners[plain]) > 1 or plain in RESERVED
        if owner_of.get(plain) == column.owner or not (clashes or name in owner_of):
            name = plain
        if name in named:
            raise ValueError(
                f"columns {named[name].name!r} and {column.name!r} of {column.owner}s would both be feature {name}"
                "; rename one"
            )
        named[name] = column
    return [replace(column, name=name) for name, column in named.items()]


def valid_name(column: str) -> str:
    """A column's name with nothing but letters, digits and underscores, the first of them no digit."""
    name = re.sub(r"\W+", "_", column).strip("_")
    return name if name.isidentifier() else f"_{name}"


def find_features(columns: Sequence[str], features: Collection[str]) -> dict[str, str]:
    """For each column of new items, the name that `name_features` gave it in the dataset, or its own where there is no
    such feature. ValueError if two columns have the same feature."""
    found: dict[str, str] = {}
    for column in columns:
        plain = valid_name(column)
        name = next((name for name in (column, plain, f"item_{plain}") if name in features), column)
        if name in found:
            raise ValueError(f"columns {found[name]!r} and {column!r} would both be feature {name}; leave one out")
        found[name] = column
    return {column: name for name, column in found.items()}


def embedded(
    options: FeaturesOptions, columns: Sequence[RawColumn], names: Collection[str], title: str
) -> FeaturesOptions:
    """The options with kind text for the columns that --embed names. ValueError for one that is not there, or that is
    described otherwise. `title` is that of titles, which is among them where it is embedded; "" without one."""
    features = dict(options.features)
    for name in names:
        found = next((of.name for of in columns if name in (of.source, of.name)), None)
        if found is None:
            there = [*filter(None, dict.fromkeys([title, *(of.source for of in columns)]))]
            raise ValueError(f"--embed: no column {name!r:.80}{nearest(name, there)}; there are: {', '.join(there)}")
        said = features.get(found, FeatureOptions())
        if said.kind not in ("auto", "text") or not said.use:
            raise ValueError(f"--embed names {name}, and --schema uses it otherwise; leave it out of one of them")
        features[found] = replace(said, kind="text")
    return replace(options, features=features)


def apply_options(
    columns: Sequence[RawColumn],
    options: FeaturesOptions,
    source: str,
    of_owner: Callable[[RawColumn, Owner], pa.Array],
    unit: str = "",
) -> list[RawColumn]:
    """The columns as the file `source` describes them, without those that it does not use. `of_owner` turns a column of
    the actions into one of their items or users. `unit` as of `make_features`.

    ValueError if it names an unknown column or an impossible owner, or if a kind is neither stated nor can be inferred.
    """
    names = [column.name for column in columns]
    for name in options.features:
        if name not in names:
            raise ValueError(f"{source}: no column {name}{nearest(name, names)}; there are: {', '.join(names)}")
    changed = []
    for column in columns:
        said = options.features.get(column.name, FeatureOptions())
        if not said.use:
            continue
        if said.owner != "auto" and said.owner != column.owner:
            if column.owner != "event":
                raise ValueError(
                    f"{source}: features.{column.name} is a column of {column.owner}s; leave its owner out"
                )
            column = replace(column, owner=said.owner, values=of_owner(column, said.owner), counts=None)
        kind = column.kind if said.kind == "auto" else said.kind
        of_times = unit if column.owner == "item" else ""
        if column.name in options.features and not (kind or _inferred(column.load(), said.missing, of_times)):
            raise ValueError(
                f"{source}: the kind of features.{column.name} cannot be told from its values; "
                f"set its kind to {', '.join(list(KINDS)[:-1])} or {list(KINDS)[-1]}, or use = false"
            )
        infer = column.infer or column.name in options.features
        changed.append(
            replace(column, kind=kind, table=said.table, missing=said.missing, infer=infer, columns=said.columns)
        )
    return changed


def _inferred(column: RawColumn, missing: tuple[str, ...], unit: str) -> str | None:
    return infer_kind(filled(column.values, missing), column.counts, unit)


def as_in_schema(
    columns: Sequence[RawColumn],
    schema: Schema,
    encoders: Mapping[str, TextEncoder],
    of_owner: Callable[[RawColumn, Owner], pa.Array],
) -> tuple[list[RawColumn], list[str]]:
    """Those of the columns that are features of a schema, as it has them, and notes on others. `encoders` of its
    features of texts, by name; `of_owner` as of `apply_options`."""
    known = {feature.name: feature for feature in schema.features}
    found, others, names = [], [of.name for of in columns if of.name not in known], {of.name for of in columns}
    missing = [name for name in known if name != ITEM and name not in names]
    for column in columns:
        if feature := known.get(column.name):
            own = feature.owner == column.owner
            found.append(
                replace(
                    column,
                    owner=feature.owner,
                    values=column.values if own else of_owner(column, feature.owner),
                    kind=feature.kind,
                    table=feature.table,
                    columns=feature.columns,
                    statistics=(feature.mean, feature.deviation),
                    encoder=encoders.get(feature.name),
                )
            )
    notes = [f"not used, as the dataset has no such features: {', '.join(others)}"] if others else []
    if missing:
        notes.append(f"missing values, as there are no such columns: {', '.join(missing)}")
    return found, notes


def values_of_items(
    values: pa.Array, items: np.ndarray, timestamps: np.ndarray, count: int, which: Literal["first", "last"]
) -> pa.Array:
    """The value of each item's first or last action in time that has a value; null for items without one. Actions at
    one time are in the order given."""
    there = np.flatnonzero(as_numpy(filled(values).is_valid()))
    there = there[np.argsort(timestamps[there], kind="stable")]
    # Of several assignments to one place, the last one counts.
    there = there if which == "last" else there[::-1]
    rows = np.full(count, -1)
    rows[items[there]] = there
    return values.take(pa.array(rows, mask=rows < 0))


def infer_kind(values: pa.Array, counts: np.ndarray | None = None, unit: str = "") -> str | None:
    """The kind by the rules above; None if the column is not used. `counts` as of a RawColumn, but not of lists;
    `unit`: that of the times with which dates can be compared."""
    kind = values.type
    if values.null_count == len(values):
        return None
    if is_list(kind):
        if _is_integer_or_text(kind.value_type):
            parts = filled(values.flatten())
            return "ids" if parts.null_count < len(parts) and _comes_again(parts) else None
        widths = np.unique(lengths(values)[as_numpy(values.is_valid())])
        return "vector" if _is_fraction(kind.value_type) and len(widths) == 1 and widths[0] else None
    if not (_is_scalar(kind) or is_time(kind)) or (not values.null_count and _is_constant(values)):
        return None
    if is_time(kind) or _are_dates(values):
        return "date" if unit else None
    if pa.types.is_boolean(kind):
        return "id"
    if pa.types.is_dictionary(kind):
        return _infer_text(values, counts)
    return "id" if pa.types.is_integer(kind) and _comes_again(values, counts) else "number"


def _infer_text(values: pa.DictionaryArray, counts: np.ndarray | None) -> str | None:
    texts = _used(values)
    again = _comes_again(values, counts)
    numbers = read_numbers(texts)
    if numbers.wrong_are_exceptions:
        of_numbers = texts.filter(numbers.values.is_valid())
        if len(of_numbers) and _all_match(of_numbers, _INTEGER):
            return "id" if again else "number"
        if len(of_numbers) and not _all_match(of_numbers, "^[0-9]+$"):
            return "number"
    if pc.any(pc.match_substring(texts, SEPARATOR)).as_py():
        parts = _code_text_lists(values)
        return "ids" if 2 * len(np.unique(parts.codes)) <= parts.occurrences(counts).sum() else None
    return "id" if again else None


def _used(values: pa.DictionaryArray) -> pa.StringArray:
    """The different texts of a column."""
    return values.dictionary.take(pc.unique(values.indices).drop_null())


def _why_unused(column: RawColumn) -> str:
    """Of a column without a kind."""
    values = column.values
    if values.null_count == len(values):
        return "no values"
    if _is_scalar(values.type) and _is_constant(values):
        return "all values are the same"
    if not column.infer:
        return "nearly each row has its own value"
    if is_time(values.type) or _are_dates(values):
        return "dates, but not of items, or the times of the actions are none"
    if not is_list(values.type):
        texts = "most texts occur once; --embed takes them"
        return texts if _is_scalar(values.type) else f"of type {str(values.type).partition('<')[0]}"
    return "most values occur once" if _is_integer_or_text(values.type.value_type) else "lists of different lengths"


def _are_dates(values: pa.Array) -> bool:
    """Whether values, which are not all missing, are written as dates."""
    if not (pa.types.is_dictionary(values.type) or pa.types.is_integer(values.type)):
        return False
    distinct = _distinct(values)
    # Long texts, such as descriptions, need not all be looked at.
    for some in (distinct[:: 1 + len(distinct) // 1000], distinct):
        try:
            found = read_dates(some)
        except ValueError:
            return False
        there = int(np.isfinite(found.days).sum())
        if not found.written or not there or not are_exceptions(len(some) - there, there):
            return False
    return True


def _distinct(values: pa.Array) -> pa.Array:
    return _used(values) if pa.types.is_dictionary(values.type) else values.drop_null().unique()


def _all_match(texts: pa.StringArray, pattern: str) -> bool:
    return pc.all(pc.match_substring_regex(texts, pattern)).as_py()


def _comes_again(values: pa.Array, counts: np.ndarray | None = None) -> bool:
    """Whether a value occurs at least twice on average."""
    # Arrow's unique takes several times the memory of numpy's if all values are distinct.
    distinct = np.unique(as_numpy(_plain(values).drop_null()))
    return 2 * len(distinct) <= _weighted(as_numpy(values.is_valid()), counts)


def _weighted(which: np.ndarray, counts: np.ndarray | None) -> float:
    """How many there are of some rows."""
    return int(np.count_nonzero(which)) if counts is None else counts[which].sum()


def _occurrences(codes: np.ndarray, counts: np.ndarray | None, size: int) -> np.ndarray:
    """How often each code from 0 on occurs."""
    weights = None if counts is None else counts[codes >= 0]
    return np.bincount(codes[codes >= 0], weights, size).astype(np.int64)


def _is_constant(values: pa.Array) -> bool:
    bounds = pc.min_max(_plain(values))
    return bounds["min"] == bounds["max"]


def _texts_of(column: RawColumn) -> pa.StringArray:
    """The different texts of a column, in order. ValueError if it has other values."""
    if not pa.types.is_dictionary(column.values.type):
        raise ValueError(f"feature {column.name} has values of type {column.values.type}; {column.kind} needs text")
    used = _used(column.values)
    return used.take(pa.array(order_of_texts(used)))


def _decoded(values: pa.Array) -> pa.Array:
    return values.cast(values.type.value_type) if pa.types.is_dictionary(values.type) else values


def _plain(values: pa.Array) -> pa.Array:
    return values.indices if pa.types.is_dictionary(values.type) else values


def filled(values: pa.Array, missing: tuple[str, ...] = MISSING) -> pa.Array:
    """Text as a dictionary; null for what stands for no value; whole floats as integers."""
    values = _encoded(values)
    if pa.types.is_floating(values.type):
        values = pc.if_else(pc.is_nan(values), None, values)
        return values.cast(pa.int64()) if _are_whole(values) else values
    if not pa.types.is_dictionary(values.type):
        return values
    absent = _are_missing(values.dictionary, missing)
    if pc.any(absent).as_py():
        indices = pc.if_else(absent.take(values.indices), None, values.indices)
        values = pa.DictionaryArray.from_arrays(indices, values.dictionary)
    texts = _used(values)
    if len(texts) and _all_match(texts, _WHOLE) and not _all_match(texts, _INTEGER):
        plain = pc.replace_substring_regex(values.dictionary, r"\.0*$", "").dictionary_encode()
        values = pa.DictionaryArray.from_arrays(plain.indices.take(values.indices), plain.dictionary)
    return values


def _encoded(values: pa.Array) -> pa.Array:
    """Text as a dictionary; bytes count as text if they are UTF-8."""
    if _is_binary(values.type):
        try:
            values = values.cast(pa.binary()).cast(pa.string())
        except pa.ArrowInvalid:
            return values
    return values.cast(pa.string()).dictionary_encode() if is_text(values.type) else values


def as_lists(values: pa.Array) -> pa.Array:
    """One list a row: the parts of a text between separators, and a single value as a list of one."""
    values = filled(values)
    if is_list(values.type):
        return values
    if pa.types.is_dictionary(values.type):
        return _between_separators(values.dictionary).take(values.indices)
    return lists_of(as_numpy(values.is_valid()), values.drop_null())


def as_floats(values: pa.Array) -> np.ndarray:
    """float32, NaN for what is no number, is infinite or missing."""
    values = filled(values)
    if pa.types.is_dictionary(values.type):
        values, _ = _parsed(values)
    return _floats(values) if _is_scalar(values.type) else np.full(len(values), np.nan, np.float32)


def _parsed(values: pa.DictionaryArray) -> tuple[pa.Array, Numbers]:
    """A column of texts as numbers, null where they are none; and what was found of its different texts."""
    used = _used(values)
    numbers = read_numbers(used)
    return numbers.values.take(pc.index_in(values.dictionary, value_set=used).take(values.indices)), numbers


def ids_as_texts(values: pa.Array) -> pa.StringArray:
    """Ids as they are in vocabularies, null where missing."""
    coded = _code_values(filled(values))
    return coded.texts.take(pa.array(coded.codes, mask=coded.codes < 0))


def _are_missing(texts: pa.StringArray, missing: tuple[str, ...]) -> pa.BooleanArray:
    pattern = "|".join(re.escape(text) for text in ("", *missing))
    return pc.fill_null(pc.match_substring_regex(texts, rf"^\s*(?:{pattern})\s*$"), True)


def _is_scalar(kind: pa.DataType) -> bool:
    return pa.types.is_boolean(kind) or pa.types.is_dictionary(kind) or pa.types.is_integer(kind) or _is_fraction(kind)


def _is_fraction(kind: pa.DataType) -> bool:
    return pa.types.is_floating(kind) or pa.types.is_decimal(kind)


def _is_integer_or_text(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or is_text(kind)


def _is_binary(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)


@dataclass(frozen=True)
class Codes:
    """The values of a sparse feature, as places in a list of distinct texts."""

    codes: np.ndarray
    """Integer: [R], -1 where missing; or of all rows' lists, one after the other."""
    texts: pa.StringArray
    offsets: np.ndarray | None = None
    """Of lists: int64 [R + 1]."""
    parallel: Mapping[str, np.ndarray] = field(default_factory=dict)
    """What each value of a list has beside it, float32, by the kind's names."""

    def occurrences(self, counts: np.ndarray | None) -> np.ndarray:
        """How often each text occurs; `counts` as of a RawColumn."""
        if counts is not None and self.offsets is not None:
            counts = np.repeat(counts, np.diff(self.offsets))
        return _occurrences(self.codes, counts, len(self.texts))


@dataclass(frozen=True)
class _Source:
    """A column in the forms in which kinds read it."""

    column: RawColumn
    exceptions: bool = True
    """Whether a few texts among numbers may be none."""

    def one_id(self) -> Codes:
        values = self.column.values
        self._require_ids(values.type.value_type if is_list(values.type) else values.type)
        if is_list(values.type):
            raise ValueError(
                f"feature {self.column.name} has lists of values: its kind can be ids or vector, not {self.column.kind}"
            )
        return _code_values(values)

    def ids(self) -> Codes:
        values = self.column.values
        if self.column.columns:
            return self._with_parallel()
        if is_list(values.type):
            self._require_ids(values.type.value_type)
            return _code_lists(values)
        self._require_ids(values.type)
        if pa.types.is_dictionary(values.type):
            return _code_text_lists(values)
        single = _code_values(values)
        there = single.codes >= 0
        return Codes(single.codes[there], single.texts, np.concatenate([[0], np.cumsum(there)]))

    def text_vectors(self) -> np.ndarray:
        encoder, distinct = self.column.encoder, _texts_of(self.column)
        assert encoder is not None
        values = self.column.values
        places = pc.index_in(values.dictionary, value_set=distinct).take(values.indices).fill_null(-1).to_numpy()
        vectors = encoder(distinct.to_pylist())
        # A missing text takes the last place.
        return np.concatenate([vectors, np.full((1, vectors.shape[1]), np.nan, np.float32)])[places]

    def _with_parallel(self) -> Codes:
        """Of lists of structs, as joined.py makes them."""
        values, names = self.column.values, list(self.column.columns)
        if not (is_list(values.type) and pa.types.is_struct(values.type.value_type)):
            raise ValueError(f"feature {self.column.name} is not read with {' and '.join(names)} from this source")
        flat, ends = values.flatten(), np.cumsum(lengths(values))
        coded = _code_values(flat.field(VALUE).dictionary_encode())
        parallel = {name: flat.field(name).to_numpy(zero_copy_only=False) for name in names}
        return Codes(coded.codes, coded.texts, np.concatenate([[0], ends]), parallel)

    def numbers(self) -> np.ndarray:
        """Infinite ones are missing, too. ValueError for texts that are no numbers, unless they may be exceptions."""
        name, values, kind = self.column.name, self.column.values, self.column.values.type
        if pa.types.is_dictionary(kind):
            values, found = _parsed(values)
            if len(found.wrong) and not (self.exceptions and found.wrong_are_exceptions):
                note = f" ({found.note})" if found.note else ""
                raise ValueError(f"feature {name} has the value {found.wrong[0].as_py()!r}, which is no number{note}")
        elif pa.types.is_temporal(kind):
            values = values.cast(pa.int32() if kind.bit_width == 32 else pa.int64())
        elif not (_is_scalar(kind) or pa.types.is_null(kind)):
            raise ValueError(f"feature {name} has values of type {kind}, which are no numbers")
        return _floats(values)

    def vectors(self) -> np.ndarray:
        """Infinite numbers are missing, too."""
        name, values = self.column.name, self.column.values
        if pa.types.is_dictionary(values.type):
            values = pc.split_pattern(values.dictionary, SEPARATOR).take(values.indices)
        if not is_list(values.type):
            raise ValueError(f"feature {name} has values of type {values.type}; a vector needs lists of numbers")
        there = as_numpy(values.is_valid())
        widths = np.unique(lengths(values)[there])
        if len(widths) != 1 or not widths[0]:
            found = ", ".join(map(str, widths[:5])) or "no"
            raise ValueError(f"feature {name} has lists of {found} numbers; a vector needs one width above 0")
        flat = _Source(replace(self.column, values=filled(values.flatten())), exceptions=False)
        made = np.full((len(values), int(widths[0])), np.nan, np.float32)
        made[there] = flat.numbers().reshape(-1, int(widths[0]))
        return made

    def days(self) -> np.ndarray:
        """ValueError for values that are no dates, unless they may be exceptions."""
        days, wrong = _read_dates(self.column)
        if len(wrong) and not (self.exceptions and are_exceptions(len(wrong), int(np.isfinite(days).sum()))):
            raise ValueError(f"feature {self.column.name} has the value {wrong[0].as_py()!r:.40}, which is no date")
        return days.astype(np.float32)

    def _require_ids(self, kind: pa.DataType) -> None:
        if not (_is_scalar(kind) or is_text(kind)):
            raise ValueError(f"feature {self.column.name} has values of type {kind}, which are no ids")


def _read_dates(column: RawColumn) -> tuple[np.ndarray, pa.Array]:
    """A column as days since 1970, FP64 [R], NaN where there are none; and its different values that are no dates.
    ValueError if it cannot be read as dates."""
    values, kind = column.values, column.values.type
    if not (_is_scalar(kind) or is_time(kind)):
        raise ValueError(f"feature {column.name} has values of type {kind}, which are no dates")
    distinct = _distinct(values)
    try:
        days = read_dates(distinct).days
    except ValueError as error:
        problem = str(error).partition(";")[0]
        raise ValueError(f"feature {column.name} cannot be dates: {problem}; write them as 2024-01-31") from None
    places = pc.index_in(_decoded(values), value_set=distinct).fill_null(-1).to_numpy()
    return np.append(days, np.nan)[places], distinct.filter(pa.array(np.isnan(days)))


def _code_values(values: pa.Array) -> Codes:
    if pa.types.is_floating(values.type) and _are_whole(values):
        # pandas makes floats of integers where one is missing, and Arrow writes large ones with an exponent.
        values = values.cast(pa.int64())
    encoded = values if pa.types.is_dictionary(values.type) else values.dictionary_encode()
    return Codes(encoded.indices.fill_null(-1).to_numpy(), encoded.dictionary.cast(pa.string()))


def _are_whole(numbers: pa.Array) -> bool:
    whole = pc.and_(pc.equal(numbers, pc.floor(numbers)), pc.less(pc.abs(numbers), 2.0**53))
    return pc.all(whole, min_count=0).as_py()


def _code_lists(lists: pa.Array) -> Codes:
    """Missing elements are left out."""
    flat = _code_values(filled(lists.flatten()))
    there = flat.codes >= 0
    rows = np.repeat(np.arange(len(lists)), lengths(lists))
    counts = np.bincount(rows[there], minlength=len(lists))
    return Codes(flat.codes[there], flat.texts, np.concatenate([[0], np.cumsum(counts)]))


def _between_separators(texts: pa.StringArray) -> pa.ListArray:
    split = pc.split_pattern(texts, SEPARATOR)
    return pa.ListArray.from_arrays(split.offsets, pc.utf8_trim_whitespace(split.values))


def _code_text_lists(values: pa.DictionaryArray) -> Codes:
    """The parts of each text, between separators."""
    distinct = _code_lists(_between_separators(values.dictionary))
    assert distinct.offsets is not None
    texts = values.indices.fill_null(-1).to_numpy()
    counts = np.where(texts < 0, 0, np.diff(distinct.offsets, append=0)[texts])
    places = ranges(distinct.offsets[texts], counts)
    return Codes(distinct.codes[places], distinct.texts, np.concatenate([[0], np.cumsum(counts)]))


def _vocabulary(features: Sequence[tuple[pa.StringArray, np.ndarray]]) -> pa.StringArray:
    """The values that occur in some feature of a table, in order; given texts and counts."""
    there = pa.concat_arrays([texts.filter(pa.array(counts > 0)) for texts, counts in features]).unique()
    return there.take(pa.array(order_of_texts(there)))


def _look_up(coded: Codes, vocabulary: pa.StringArray, table: Table) -> Column:
    """Rows of the table: they follow the unknown one, except for items."""
    first = 0 if table.name == ITEM else 1
    rows = pc.index_in(coded.texts, value_set=vocabulary).cast(pa.int64())
    rows_of_codes = pc.fill_null(pc.add(rows, first), table.unknown).to_numpy()
    # Code -1, a missing value, takes the last place.
    rows_of_codes = np.append(rows_of_codes, table.unknown).astype(index_type(table.rows))
    return Column(rows_of_codes[coded.codes], coded.offsets, coded.parallel)


def _floats(values: pa.Array) -> np.ndarray:
    with np.errstate(over="ignore"):
        # Not safe: integers beyond 2^53 lose digits that float32 does not have either.
        numbers = values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False).astype(np.float32)
    numbers[np.isinf(numbers)] = np.nan
    return numbers


def _statistics(numbers: np.ndarray, counts: np.ndarray | None) -> tuple[float, float]:
    """Mean and standard deviation of the values present; 0 and 1 if these are undefined."""
    there = numbers[np.isfinite(numbers)]
    if not len(there):
        return 0.0, 1.0
    if counts is not None:
        weights = np.broadcast_to(counts.reshape(-1, *[1] * (numbers.ndim - 1)), numbers.shape)[np.isfinite(numbers)]
        exact = there.astype(np.float64)
        mean = float(np.average(exact, weights=weights))
        return mean, float(np.sqrt(np.average((exact - mean) ** 2, weights=weights))) or 1.0
    return float(there.mean(dtype=np.float64)), float(there.std(dtype=np.float64)) or 1.0
