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
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
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
from logitmix.trainer.data.columns import ITEM_COLUMNS, SEQUENCE_COLUMNS, Column, index_type
from logitmix.trainer.data.numbers import MISSING, are_exceptions, read_numbers
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
    """Or what reads them and how often each counts, for a column that is not to stay in memory."""
    kind: str | None = "auto"
    """"auto": inferred; None: it is not used."""
    table: str = ""
    """The feature's name when left empty."""
    missing: tuple[str, ...] = MISSING
    """Texts that stand for no value."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """As in the schema's feature."""
    source: str = ""
    """The column's name in what it is read from."""
    encoder: TextEncoder | None = None
    """Of texts; None: it is fitted to them."""

    def distinct(self) -> "Distinct":
        """Returns the different values, read if they are not in memory."""
        values, counts = self.values() if callable(self.values) else (self.values, None)
        return distinct(values, counts, self.missing)


@dataclass(frozen=True)
class Known:
    """The features of a dataset, to which actions are appended."""

    schema: Schema
    encoders: Mapping[str, TextEncoder]
    """Of features of texts, by name."""

    def options(self) -> FeaturesOptions:
        """Returns what makes the same features of other columns."""
        features = (of for of in self.schema.features if of.name != ITEM)
        said = {of.name: FeatureOptions(of.owner, of.kind, of.table, dict(of.columns)) for of in features}
        return FeaturesOptions(said)


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
    known: Known | None = None,
) -> Features:
    """Encodes columns as features, one after the other.

    Args:
        columns: The columns, under valid names.
        item_ids: The raw ids of the items, by index.
        unit: That of the actions' times; "" if they are no dates.
        embed_with: Names the encoder of texts.
        known: Features with whose statistics and encoders those of the same names are made.

    Raises:
        ValueError: If values do not fit the kind that was stated.
    """
    marked, unused, notes = list[str](), dict[str, str](), list[str]()
    features, made, projections = [ITEM_FEATURE], dict[str, Column](), dict[str, np.ndarray]()
    coded: dict[str, tuple[Codes, np.ndarray]] = {}
    texts_of_table: dict[str, list[pa.StringArray]] = {}
    earlier = {of.name: of for of in known.schema.features} if known else {}
    for column in columns:
        found, name = column.distinct(), column.name
        if found.marked:
            marked.append(f"{' and '.join(f'{n:,} {text}' for text, n in found.marked.items())} of {name}")
        of_times = unit if column.owner == "item" else ""
        kind = infer_kind(found, of_times) if column.kind == "auto" else column.kind
        if not kind:
            unused[name] = _why_unused(column, found)
            continue
        form, encoder = kind_named(kind), known.encoders.get(name) if known else None
        source = _Source(replace(column, kind=kind), found, notes=notes)
        if form.of_texts and not encoder:
            texts = source.texts().take(pa.array(order_of_texts(source.texts()))).to_pylist()
            if not any(words_of(text) if embed_with == NGRAMS else text for text in texts):
                raise ValueError(f"feature {name} has no text of letters or digits; kind text needs some")
            encoder = TextEncoder.fit(embed_with, texts)
        source = replace(source, column=replace(source.column, encoder=encoder))
        read = getattr(source, form.reads)()
        if isinstance(read, Codes):
            table = column.table or name
            features.append(Feature(name, column.owner, kind, table, columns=dict(column.columns)))
            texts_of_table.setdefault(table, []).append(read.texts)
            coded[name] = read, found.places
            continue
        numbers: np.ndarray = read
        if form.dated and not of_times:
            why = f"is of {column.owner}s" if unit else "has dates, but the times of the actions are none"
            raise ValueError(f"feature {name} {why}; kind {kind} is the age of items at a request")
        if name in earlier:
            mean, deviation = earlier[name].mean, earlier[name].deviation
        else:
            mean, deviation = _statistics(numbers, found.counts) if form.missing is None else (form.missing, 1.0)
        width = 1 if numbers.ndim == 1 else numbers.shape[1]
        of_texts = (encoder.name, encoder.version) if encoder else ("", "")
        if encoder and encoder.projection is not None:
            projections[name] = encoder.projection
        said = (name, column.owner, kind, column.table, width, mean, deviation)
        features.append(Feature(*said, {}, unit if form.dated else "", *of_texts))
        numbers[np.isnan(numbers)] = mean
        made[name] = Column(numbers[found.places])
    vocabularies = {table: pa.concat_arrays(texts).unique() for table, texts in texts_of_table.items() if table != ITEM}
    vocabularies = {table: texts.take(pa.array(order_of_texts(texts))) for table, texts in vocabularies.items()}
    values = {ITEM: item_ids} | vocabularies
    tables = {name: Table(name, 1 + len(texts)) for name, texts in values.items()}
    for feature in features[1:]:
        if feature.sparse:
            codes, places = coded.pop(feature.name)
            made[feature.name] = _look_up(codes, values[feature.table], tables[feature.table]).take(places)
    vocabularies = {table: pa.concat_arrays([pa.nulls(1, pa.string()), of]) for table, of in vocabularies.items()}
    if marked:
        said_of = "; ".join(marked)
        notes.insert(0, f"taken as missing: {said_of} (--schema FILE can state other texts: missing = [])")
    return Features(Schema(tuple(features), tuple(tables.values())), made, vocabularies, unused, notes, projections)


def as_in_requests(feature: Feature, values: pa.Array, encoder: TextEncoder | None = None) -> list[Any]:
    """A column of new items, read as `make_features` reads that of a dataset, as the values that a FeatureReader takes:
    texts, None for a missing one; lists of texts, and of pairs with what is parallel to them; numbers and lists of
    numbers, the feature's mean for missing ones. `encoder`: that of a feature of texts.

    Raises ValueError where values do not fit the feature's kind.
    """
    # A text of an id that is in no vocabulary is as unknown as a missing one.
    found = distinct(values, missing=() if feature.sparse and not feature.form.bag else MISSING)
    if not len(found.present):
        return [None] * len(values)
    column = RawColumn(feature.name, feature.owner, values, feature.kind, columns=feature.columns, encoder=encoder)
    read = getattr(_Source(column, found, exceptions=False), feature.form.reads)()
    if not isinstance(read, Codes):
        numbers: np.ndarray = read
        if numbers[0].size != feature.width:
            raise ValueError(f"feature {feature.name} has lists of {numbers[0].size} numbers, not {feature.width}")
        numbers[np.isnan(numbers)] = feature.mean
        return numbers[found.places].tolist()
    rows = read.column.take(found.places)
    texts = np.array([*read.texts.to_pylist(), None], object)[rows.values].tolist()
    if rows.offsets is None:
        return texts
    if rows.parallel:
        texts = list(zip(texts, *(of.tolist() for of in rows.parallel.values()), strict=True))
    return [texts[first:last] for first, last in pairwise(rows.offsets.tolist())]


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
    options: FeaturesOptions, columns: Sequence[RawColumn], names: Collection[str], titles: Sequence[str]
) -> FeaturesOptions:
    """The options with kind text for the columns that --embed names. ValueError for one that is neither among the
    columns nor `titles`."""
    features = dict(options.features)
    for name in names:
        found = next((of.name for of in columns if name in (of.source, of.name)), None)
        if found is None:
            there = list(dict.fromkeys([*titles, *(of.source for of in columns)]))
            raise ValueError(f"--embed: no column {name!r:.80}{nearest(name, there)}; there are: {', '.join(there)}")
        features[found] = replace(features.get(found, FeatureOptions()), kind="text")
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
        said = options.features.get(column.name)
        if said and not said.use:
            continue
        if said and said.owner != "auto" and said.owner != column.owner:
            if column.owner != "event":
                raise ValueError(
                    f"{source}: features.{column.name} is a column of {column.owner}s; leave its owner out"
                )
            column = replace(column, owner=said.owner, values=of_owner(column, said.owner))
        if said:
            kind = (column.kind or "auto") if said.kind == "auto" else said.kind
            column = replace(column, kind=kind, table=said.table, missing=said.missing, columns=said.columns)
            if kind == "auto" and not infer_kind(column.distinct(), unit if column.owner == "item" else ""):
                raise ValueError(
                    f"{source}: the kind of features.{column.name} cannot be told from its values; "
                    f"set its kind to {', '.join(list(KINDS)[:-1])} or {list(KINDS)[-1]}, or use = false"
                )
        changed.append(column)
    return changed


@dataclass(frozen=True)
class Distinct:
    """The different values of a column. Lists and other nested values count as different in each row."""

    values: pa.Array
    """Null in the last place if rows have none; of lists, anywhere."""
    counts: np.ndarray
    """int64: how many rows have each."""
    places: np.ndarray
    """The place of each row's value."""
    marked: Mapping[str, int] = field(default_factory=dict)
    """How many rows have each of the texts that stand for no value."""

    @property
    def present(self) -> pa.Array:
        return self.values.drop_null()

    @property
    def rows(self) -> int:
        """Returns how many rows have a value."""
        return int(self.counts[as_numpy(self.values.is_valid())].sum())

    @property
    def comes_again(self) -> bool:
        """Returns whether a value occurs at least twice on average."""
        return 2 * len(self.present) <= self.rows

    def merged(self, values: pa.Array) -> "Distinct":
        """Returns the same rows with other values in place of the different ones, of which several may become one."""
        encoded = values.dictionary_encode()
        size = len(encoded.dictionary)
        codes = encoded.indices.fill_null(size).to_numpy()
        missing = pa.nulls(int((codes == size).any()), encoded.dictionary.type)
        counts = np.bincount(codes, self.counts, size + len(missing)).astype(np.int64)
        return replace(
            self, values=pa.concat_arrays([encoded.dictionary, missing]), counts=counts, places=codes[self.places]
        )


def distinct(values: pa.Array, counts: np.ndarray | None = None, missing: tuple[str, ...] = MISSING) -> Distinct:
    """Returns the different values of a column: bytes count as text if they are UTF-8, whole floats as integers, and
    `missing` and blank texts as none. `counts`: how often each row counts; None: once."""
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    if str(values.type).startswith(("binary", "large_binary", "fixed_size_binary")):
        with suppress(pa.ArrowInvalid):
            values = values.cast(pa.binary()).cast(pa.string())
    if pa.types.is_floating(values.type):
        values = pc.if_else(pc.is_nan(values), None, values)
    rows = Distinct(values, np.ones(len(values), np.int64) if counts is None else counts, np.arange(len(values)))
    if pa.types.is_nested(values.type) or pa.types.is_null(values.type):
        return rows
    found = rows.merged(values)
    if pa.types.is_floating(values.type) and _are_whole(found.values):
        # pandas makes floats of integers where one is missing, and Arrow writes large ones with an exponent.
        return found.merged(found.values.cast(pa.int64()))
    if not is_text(values.type):
        return found
    texts = found.values.cast(pa.string())
    none = rf"^\s*(?:{'|'.join(re.escape(text) for text in ('', *missing))})\s*$"
    absent = pc.fill_null(pc.match_substring_regex(texts, none), True)
    marked = Counter[str]()
    for row in np.flatnonzero(as_numpy(absent)):
        marked[(texts[row].as_py() or "").strip()] += int(found.counts[row])
    del marked[""]
    found = replace(found.merged(pc.if_else(absent, None, texts)), marked=marked)
    if len(found.present) and _all_match(found.present, _WHOLE) and not _all_match(found.present, _INTEGER):
        return found.merged(pc.replace_substring_regex(found.values, r"\.0*$", ""))
    return found


def infer_kind(of: Distinct, unit: str = "") -> str | None:
    """Returns the kind by the rules above; None if the column is not used. `unit`: that of the times with which dates
    can be compared."""
    values, kind = of.values, of.values.type
    if not len(of.present):
        return None
    if is_list(kind):
        if _is_integer_or_text(kind.value_type):
            parts = distinct(values.flatten())
            return "ids" if len(parts.present) and parts.comes_again else None
        widths = np.unique(lengths(of.present))
        return "vector" if _is_fraction(kind.value_type) and len(widths) == 1 and widths[0] else None
    if not (_is_scalar(kind) or is_time(kind)) or len(values) == 1:
        return None
    if is_time(kind) or _are_dates(of.present):
        return "date" if unit else None
    if is_text(kind):
        return _infer_text(of)
    return "id" if pa.types.is_boolean(kind) or (pa.types.is_integer(kind) and of.comes_again) else "number"


def _infer_text(of: Distinct) -> str | None:
    texts = of.present
    numbers = read_numbers(texts)
    if numbers.wrong_are_exceptions:
        of_numbers = texts.filter(numbers.values.is_valid())
        if len(of_numbers) and _all_match(of_numbers, _INTEGER):
            return "id" if of.comes_again else "number"
        if len(of_numbers) and not _all_match(of_numbers, "^[0-9]+$"):
            return "number"
    if pc.any(pc.match_substring(texts, SEPARATOR)).as_py():
        lists = _lists(of.values)
        parts = distinct(lists.flatten(), np.repeat(of.counts, lengths(lists)))
        return "ids" if parts.comes_again else None
    return "id" if of.comes_again else None


def _why_unused(column: RawColumn, of: Distinct) -> str:
    """Of a column without a kind."""
    kind = of.values.type
    if not len(of.present):
        return "no values"
    if _is_scalar(kind) and len(of.present) == 1:
        return "all values are the same"
    if column.kind is None:
        return "nearly each row has its own value"
    if is_time(kind) or _are_dates(of.present):
        return "dates, but not of items, or the times of the actions are none"
    if not _is_scalar(kind.value_type if is_list(kind) else kind):
        return f"of type {str(kind).partition('<')[0]}"
    return "lists that hardly come again" if is_list(kind) else "most texts occur once; --embed takes them"


def _are_dates(values: pa.Array) -> bool:
    """Returns whether different values, none of them missing, are written as dates."""
    if not _is_integer_or_text(values.type):
        return False
    # Long texts, such as descriptions, need not all be looked at.
    for some in (values[:: 1 + len(values) // 1000], values):
        try:
            found = read_dates(some)
        except ValueError:
            return False
        there = int(np.isfinite(found.days).sum())
        if not found.written or not there or not are_exceptions(len(some) - there, there):
            return False
    return True


def _all_match(texts: pa.StringArray, pattern: str) -> bool:
    return pc.all(pc.match_substring_regex(texts, pattern)).as_py()


def as_lists(values: pa.Array) -> pa.Array:
    """One list a row: the parts of a text between separators, and a single value as a list of one."""
    found = distinct(values)
    return _lists(found.values).take(pa.array(found.places))


def as_floats(values: pa.Array) -> np.ndarray:
    """float32, NaN for what is no number, is infinite or missing."""
    found = distinct(values)
    numbers = read_numbers(found.values).values if is_text(found.values.type) else found.values
    return (_floats(numbers) if _is_scalar(numbers.type) else np.full(len(numbers), np.nan, np.float32))[found.places]


def ids_as_texts(values: pa.Array) -> pa.StringArray:
    """Ids as they are in vocabularies, null where missing."""
    found = distinct(values)
    return found.values.cast(pa.string()).take(pa.array(found.places))


def is_present(values: pa.Array) -> np.ndarray:
    """Returns which rows of a column have a value."""
    found = distinct(values)
    return as_numpy(found.values.is_valid())[found.places]


def _is_scalar(kind: pa.DataType) -> bool:
    return pa.types.is_boolean(kind) or _is_integer_or_text(kind) or _is_fraction(kind)


def _is_fraction(kind: pa.DataType) -> bool:
    return pa.types.is_floating(kind) or pa.types.is_decimal(kind)


def _is_integer_or_text(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or is_text(kind)


@dataclass(frozen=True)
class Codes:
    """The values of a sparse feature."""

    column: Column
    """Places in the texts instead of rows of a table; the place behind them where a value is missing."""
    texts: pa.StringArray
    """Different ones."""


@dataclass(frozen=True)
class _Source:
    """The different values of a column in the forms in which kinds read them."""

    column: RawColumn
    found: Distinct
    exceptions: bool = True
    """Whether a few texts among numbers may be none."""
    notes: list[str] = field(default_factory=list)
    """How values were read, where a user may want it otherwise."""

    def one_id(self) -> Codes:
        kind = self.found.values.type
        self._require(_is_scalar(kind), "no single ids")
        return Codes(Column(np.arange(len(self.found.values))), self.found.present.cast(pa.string()))

    def ids(self) -> Codes:
        values, kind = self.found.values, self.found.values.type
        if self.column.columns:
            # Lists of structs, as joined.py makes them.
            self._require(
                is_list(kind) and pa.types.is_struct(kind.value_type), "not read with others from this source"
            )
            flat = values.flatten()
            codes = flat.field(VALUE).dictionary_encode()
            parallel = {name: as_numpy(flat.field(name)) for name in self.column.columns}
            ends = np.append(0, np.cumsum(lengths(values)))
            return Codes(Column(codes.indices.to_numpy(), ends, parallel), codes.dictionary)
        self._require(_is_scalar(kind.value_type if is_list(kind) else kind), "no ids")
        lists = _lists(values)
        found = distinct(lists.flatten())
        # Missing elements are left out.
        there = as_numpy(found.values.is_valid())[found.places]
        rows = np.repeat(np.arange(len(lists)), lengths(lists))[there]
        offsets = np.append(0, np.cumsum(np.bincount(rows, minlength=len(lists))))
        return Codes(Column(found.places[there], offsets), found.present.cast(pa.string()))

    def texts(self) -> pa.StringArray:
        """Returns the different texts. ValueError if there are other values."""
        self._require(is_text(self.found.values.type), "no texts")
        return self.found.present

    def text_vectors(self) -> np.ndarray:
        assert self.column.encoder is not None
        vectors = self.column.encoder(self.texts().to_pylist())
        return np.pad(vectors, ((0, self.found.values.null_count), (0, 0)), constant_values=np.nan)

    def numbers(self) -> np.ndarray:
        """Infinite ones are missing, too. ValueError for texts that are no numbers, unless they may be exceptions."""
        given, values, kind = self.found.values, self.found.values, self.found.values.type
        if is_text(kind):
            found = read_numbers(values)
            values = found.values
            note = f" ({found.note})" if found.note else ""
            self.notes.extend(f"{self.column.name}: {found.note}" for _ in note[:1])
            self._note_wrong("number", found.wrong, found.wrong_are_exceptions, note)
            given = given.filter(pc.invert(pc.is_in(given, value_set=found.wrong)))
        elif pa.types.is_temporal(kind):
            values = values.cast(pa.int32() if kind.bit_width == 32 else pa.int64())
        else:
            self._require(_is_scalar(kind) or pa.types.is_null(kind), "no numbers")
        numbers = _floats(values)
        infinite = self.found.values.filter(pa.array(np.isnan(numbers))).drop_null()
        self._note_wrong("finite number", infinite.filter(pc.is_in(infinite, value_set=given)), True)
        return numbers

    def vectors(self) -> np.ndarray:
        """Infinite numbers are missing, too."""
        name, values = self.column.name, self.found.values
        self._require(is_list(values.type) or is_text(values.type), "no lists of numbers")
        values = _lists(values)
        there, size = as_numpy(values.is_valid()), lengths(values)
        widths = np.unique(size[there])
        if len(widths) != 1 or not widths[0]:
            found = ", ".join(map(str, widths[:5])) or "no"
            raise ValueError(f"feature {name} has lists of {found} numbers; a vector needs one width above 0")
        flat = distinct(values.flatten(), np.repeat(self.found.counts, size))
        made = np.full((len(values), int(widths[0])), np.nan, np.float32)
        numbers = replace(self, found=flat, exceptions=False).numbers()
        made[there] = numbers[flat.places].reshape(-1, int(widths[0]))
        return made

    def days(self) -> np.ndarray:
        """ValueError for values that are no dates, unless they may be exceptions."""
        name, values, kind = self.column.name, self.found.present, self.found.values.type
        self._require(_is_scalar(kind) or is_time(kind), "no dates")
        try:
            days = read_dates(values).days
        except ValueError as error:
            problem = str(error).partition(";")[0]
            raise ValueError(f"feature {name} cannot be dates: {problem}; write them as 2024-01-31") from None
        there = np.isfinite(days)
        wrong = values.filter(pa.array(~there))
        self._note_wrong("date", wrong, are_exceptions(len(wrong), int(there.sum())))
        return np.pad(days, (0, self.found.values.null_count), constant_values=np.nan).astype(np.float32)

    def _require(self, fits: bool, what: str) -> None:
        """Raises ValueError if values of the column's type do not fit its kind."""
        if not fits:
            kind = self.found.values.type
            raise ValueError(f"feature {self.column.name} has values of type {kind}, which are {what}")

    def _note_wrong(self, what: str, wrong: pa.Array, are_few: bool, why: str = "") -> None:
        """Notes values that are no numbers or dates. ValueError if they are too many for exceptions."""
        if len(wrong):
            example = f"{wrong[0].as_py()!r:.40}"
            if not (are_few and (self.exceptions or what == "finite number")):
                raise ValueError(f"feature {self.column.name} has the value {example}, which is no {what}{why}")
            rows = int(self.found.counts[as_numpy(pc.is_in(self.found.values, value_set=wrong))].sum())
            are = f"value is no {what} and counts" if rows == 1 else f"values are no {what}s and count"
            self.notes.append(f"{self.column.name}: {rows:,} {are} as missing, such as {example}")


def _are_whole(numbers: pa.Array) -> bool:
    whole = pc.and_(pc.equal(numbers, pc.floor(numbers)), pc.less(pc.abs(numbers), 2.0**53))
    return pc.all(whole, min_count=0).as_py()


def _lists(values: pa.Array) -> pa.Array:
    """Returns a list for each row: the parts of a text between separators, or a single value as a list of one."""
    if is_text(values.type):
        split = pc.split_pattern(values, SEPARATOR)
        return lists_of(lengths(split), pc.utf8_trim_whitespace(split.flatten()), values.is_null())
    return values if is_list(values.type) else lists_of(as_numpy(values.is_valid()), values.drop_null())


def _look_up(coded: Codes, vocabulary: pa.StringArray, table: Table) -> Column:
    """Rows of the table: they follow the unknown one, except for items."""
    rows = pc.add(pc.index_in(coded.texts, value_set=vocabulary).cast(pa.int64()), 0 if table.name == ITEM else 1)
    rows_of_codes = np.append(rows.fill_null(table.unknown).to_numpy(), table.unknown).astype(index_type(table.rows))
    return replace(coded.column, values=rows_of_codes[coded.column.values])


def _floats(values: pa.Array) -> np.ndarray:
    with np.errstate(over="ignore"):
        # Not safe: integers beyond 2^53 lose digits that float32 does not have either.
        numbers = values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False).astype(np.float32)
    numbers[np.isinf(numbers)] = np.nan
    return numbers


def _statistics(numbers: np.ndarray, counts: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation of the values present; 0 and 1 if these are undefined."""
    there = np.isfinite(numbers)
    if not there.any():
        return 0.0, 1.0
    weights = np.broadcast_to(counts.reshape(-1, *[1] * (numbers.ndim - 1)), numbers.shape)[there]
    exact = numbers[there].astype(np.float64)
    mean = float(np.average(exact, weights=weights))
    return mean, float(np.sqrt(np.average((exact - mean) ** 2, weights=weights))) or 1.0
