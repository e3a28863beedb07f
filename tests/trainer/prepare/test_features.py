import datetime
from decimal import Decimal
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitmix.modules.kinds.date import NO_DATE
from logitmix.modules.schema import Feature, Owner, Table
from logitmix.serving.features import FeatureReader
from logitmix.trainer.data.numbers import MISSING
from logitmix.trainer.export.export import in_order
from logitmix.trainer.export.export import texts_of as stored
from logitmix.trainer.prepare.features import (
    FeatureOptions,
    Features,
    FeaturesOptions,
    RawColumn,
    apply_options,
    as_in_requests,
    distinct,
    find_features,
    infer_kind,
    make_features,
    name_features,
)

ITEMS = pa.array(["x", "y", "z"])
OWNERS: tuple[Owner, ...] = ("item", "user", "event")


def made(*columns: RawColumn) -> Features:
    return make_features(columns, ITEMS)


def texts_of(features: Features, name: str) -> list[Any]:
    """What the rows of a sparse feature are, "" for the unknown one."""
    feature = next(feature for feature in features.schema.features if feature.name == name)
    column = features.columns[name]
    if feature.table == "item":
        vocabulary = [*ITEMS.to_pylist(), ""]
    else:
        vocabulary = [value or "" for value in features.vocabularies[feature.table].to_pylist()]
    values = [vocabulary[row] for row in column.values]
    return values if column.offsets is None else [values[start:stop] for start, stop in pairwise(column.offsets)]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["a", "b", "a", "b"], "id"),
        (["a", "b", "a", "c"], None),
        (["a", "a", None], "id"),
        (["3", "4", "4", "3"], "id"),
        (["3", "4", "-5", "0"], "number"),
        (["3", "4.5", "-5e-1", ".5"], "number"),
        (["3.0", "4.0", "4.0", "3.0", ""], "id"),
        (["3.5", "NULL", "4", "4"], "number"),
        (["b", "-", "b", "a", "a"], "id"),
        (["NULL", "-", "--"], None),
        (["12,50", "3,99", "4"], "number"),
        (["€ 5", "$ 6"], None),
        ([f"{n}.5" for n in range(10)] + ["TBA"], "number"),
        ([f"{n}.5" for n in range(9)] + ["TBA"], None),
        ([str(n) for n in range(10)] * 2 + ["XL", "XL"], "id"),
        ([f"0{n}" for n in range(10)] + ["TBA"], None),
        (["01", "02", "03", "04"], None),
        (["3", "4", "x", "5"], None),
        (["a|b", "b | a", "a", ""], "ids"),
        (["a|b", "c|d", "e"], None),
        ([3, 4, 4, 3], "id"),
        ([3, 4, 5, 6], "number"),
        ([1.0, 2.0, 2.0, 1.0], "id"),
        ([1.0, 2.0, 3.0, float("nan")], "number"),
        ([b"a", b"b", b"a", b"b", b"NULL"], "id"),
        ([b"\xff", b"\xfe", b"\xff", b"\xfe"], None),
        ([True, False, True], "id"),
        ([Decimal("1.5"), Decimal("2.5")], "number"),
        ([["a"], ["a"], [], None], "ids"),
        ([[1, 2], [1], [2, None]], "ids"),
        ([["of its own"], ["each another"]], None),
        ([[1.0, 2.0], None, [3.0, 4.0]], "vector"),
        ([[1.0, 2.0], [3.0]], None),
        ([datetime.datetime(2020, 1, 1), datetime.datetime(2021, 1, 1)], None),
        ([{"a": 1}, {"a": 2}], None),
    ],
)
def test_kinds_are_told_from_values(values: list[Any], kind: str | None) -> None:
    column = pa.array(values)
    features = made(RawColumn("given", "item", column))
    assert [feature.kind for feature in features.schema.features[1:]] == ([kind] if kind else [])
    assert list(features.unused) == ([] if kind else ["given"])
    if column.type == pa.string():
        encoded = column.dictionary_encode()
        assert [f.kind for f in made(RawColumn("given", "item", encoded)).schema.features[1:]] == ([kind] * bool(kind))


DAYS = [f"2024-01-{day:02d}" for day in range(1, 21)]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (DAYS, "date"),
        ([*DAYS, "", None, "NULL", "soon"], "date"),
        ([*DAYS, "soon", "later"], None),
        (["2024-01-31 12:00", "31.01.2024"], "date"),
        (["01/02/2024", "02/03/2024"], None),
        (["01/02/2024", "02/13/2024"], "date"),
        ([20240131, 20240201, None], "date"),
        ([20240131, 20241301, 20240201], "number"),
        ([1_706_659_200, 1_706_745_600, 1_706_800_000], "number"),
        ([datetime.date(2024, 1, 31), None, datetime.date(2024, 2, 1)], "date"),
        (["1995", "1996", "1995", "1996"], "id"),
    ],
)
def test_dates_are_told_from_values_where_the_times_of_actions_are_dates(values: list[Any], kind: str | None) -> None:
    column = pa.array(values)
    assert infer_kind(distinct(column), "s") == kind
    # Users have no age at a request, and neither have items where times are an order.
    for owner, unit in (("user", "s"), ("item", "")):
        features = make_features([RawColumn("given", owner, column)], ITEMS, unit=unit)  # type: ignore[arg-type]
        assert all(of.kind != "date" for of in features.schema.features)
        assert not pa.types.is_temporal(column.type) or "given" in features.unused


def test_dates_are_days_since_1970_and_missing_ones_before_all() -> None:
    values = ["2024-01-31", "1969-12-31T12:00:00Z", "", "2024-01-31 01:00+01:00", *DAYS, "soon"]
    features = make_features([RawColumn("released", "item", pa.array(values))], ITEMS, unit="ms")
    assert features.schema.features[1] == Feature("released", "item", "date", mean=NO_DATE, unit="ms")
    found = features.columns["released"].values
    assert found[:4].tolist() == [19_753, -0.5, NO_DATE, 19_753] and found[-1] == NO_DATE
    assert features.notes == [
        "released: 1 value is no date and counts as missing, such as 'soon'",
    ]
    stated = RawColumn("released", "item", pa.array([1_706_659_200_000, None, 0]), "date")
    found = make_features([stated], ITEMS, unit="s").columns["released"].values
    assert found.tolist() == [19_753, NO_DATE, 0]


@pytest.mark.parametrize(
    ("owner", "values", "unit", "problem"),
    [
        ("item", ["soon", "later"], "s", "has the value 'soon', which is no date"),
        ("item", ["01/02/2024"], "s", "cannot be dates: it cannot be told which of the first two numbers is the month"),
        ("item", [3, 4], "s", "cannot be dates: are no dates (value:1: 3)"),
        ("item", [[1.0]], "s", "has values of type list<item: double>, which are no dates"),
        ("item", DAYS, "", "has dates, but the times of the actions are none"),
        ("user", DAYS, "s", "is of users; kind date is the age of items at a request"),
    ],
)
def test_what_are_no_dates_of_items_is_refused(owner: Owner, values: list[Any], unit: str, problem: str) -> None:
    with pytest.raises(ValueError) as error:
        make_features([RawColumn("released", owner, pa.array(values), "date")], ITEMS, unit=unit)
    assert str(error.value).startswith(f"feature released {problem}")


def test_lists_of_a_fixed_length_are_vectors() -> None:
    values = pa.array([[1.0, 2.0], None, [3.0, 5.0]], pa.list_(pa.float32(), 2))
    assert infer_kind(distinct(values)) == "vector"
    features = made(RawColumn("given", "item", values))
    mean = (1 + 2 + 3 + 5) / 4
    assert features.columns["given"].values.tolist() == [[1, 2], [mean, mean], [3, 5]]
    deviation = float(np.std([1, 2, 3, 5]))
    assert features.schema.features[1] == Feature("given", "item", "vector", "", 2, mean, deviation)


def test_each_kind_with_what_is_missing() -> None:
    features = made(
        RawColumn("brand", "item", pa.array(["b", None, "a", ""]), "id"),
        RawColumn("tags", "user", pa.array(["b|a", None, "", "c||a|c"]), "ids"),
        RawColumn("sizes", "user", pa.array([[10, None, 9], None, [], [9, 10]])),
        RawColumn("price", "item", pa.array([1.0, None, float("nan"), float("inf"), 4.0])),
        RawColumn("shape", "event", pa.array([[1.0, None], None, [4.0, 4.0]])),
    )
    assert texts_of(features, "brand") == ["b", "", "a", ""]
    assert features.columns["brand"].values.tolist() == [2, 0, 1, 0]
    assert texts_of(features, "tags") == [["b", "a"], [], [], ["c", "a", "c"]]
    assert texts_of(features, "sizes") == [["10", "9"], [], [], ["9", "10"]]
    assert features.vocabularies["sizes"].to_pylist() == [None, "9", "10"], "in the order of numbers"
    assert features.columns["price"].values.tolist() == [1, 2.5, 2.5, 2.5, 4]
    assert features.columns["shape"].values.tolist() == [[1, 3], [3, 3], [4, 4]]
    for name in ("price", "shape"):
        assert features.columns[name].values.dtype == np.float32
    assert features.schema.features == (
        Feature("item", "item", "id", "item"),
        Feature("brand", "item", "id", "brand"),
        Feature("tags", "user", "ids", "tags"),
        Feature("sizes", "user", "ids", "sizes"),
        Feature("price", "item", "number", mean=2.5, deviation=1.5),
        Feature("shape", "event", "vector", width=2, mean=3.0, deviation=float(np.sqrt(2))),
    )
    assert features.schema.tables == (Table("item", 4), Table("brand", 3), Table("tags", 4), Table("sizes", 3))


@pytest.mark.parametrize("values", [[None, None], [2.0, 2.0, None]])
def test_numbers_that_say_nothing_are_not_divided_by_nothing(values: list[float | None]) -> None:
    features = made(RawColumn("price", "item", pa.array(values, pa.float64()), "number"))
    mean = values[0] or 0.0
    assert features.schema.features[1] == Feature("price", "item", "number", mean=mean, deviation=1.0)
    assert features.columns["price"].values.tolist() == [mean] * len(values)


def test_features_share_a_table_by_its_name() -> None:
    features = made(
        RawColumn("brand", "item", pa.array(["b", "a", "b"])),
        RawColumn("favorites", "user", pa.array(["c|b", "a"]), "ids", "brand"),
    )
    assert features.schema.tables[1:] == (Table("brand", 4),)
    assert features.vocabularies["brand"].to_pylist() == [None, "a", "b", "c"]
    assert texts_of(features, "favorites") == [["c", "b"], ["a"]]


def test_items_are_a_table_as_well() -> None:
    """Its rows are item indices, and the last one is for items that are not in the dataset."""
    features = made(
        RawColumn("like", "item", pa.array([["z", "x"], None, ["w", "y"]]), "ids", "item"),
        RawColumn("first", "user", pa.array(["y", None, "w"]), "id", "item"),
    )
    assert features.columns["like"].values.tolist() == [2, 0, 3, 1]
    assert features.columns["first"].values.tolist() == [1, 3, 3]
    assert features.schema.tables == (Table("item", 4),) and not features.vocabularies


def test_what_stands_for_no_value_is_said_and_can_be_stated() -> None:
    country = pa.array(["NA", "DE", "NA", "NULL", " - ", "", None, "DE", "NULL"])
    kind: str = "id"
    price = pa.array(["1", "2.5", r"\N", "n/a", "4", "NaN", "NULL", "", "NA"])
    features = made(RawColumn("country", "item", country, kind), RawColumn("price", "item", price))
    assert texts_of(features, "country") == ["", "DE", "", "", "", "", "", "DE", ""]
    assert features.columns["price"].values.tolist() == [1, 2.5, 2.5, 2.5, 4, 2.5, 2.5, 2.5, 2.5]
    assert features.notes == [
        r"taken as missing: 2 NA and 2 NULL and 1 - of country; 1 \N and 1 n/a and 1 NaN and 1 NULL and 1 NA of "
        "price (--schema FILE can state other texts: missing = [])"
    ]
    features = made(RawColumn("country", "item", country, kind, missing=("NULL", "DE")))
    assert texts_of(features, "country") == ["NA", "", "NA", "", " - ", "", "", "", ""]
    assert made(RawColumn("country", "item", country, kind, missing=())).vocabularies["country"].to_pylist() == [
        None, " - ", "DE", "NA", "NULL",
    ]  # fmt: skip
    # Occupations of MovieLens, of which none is one.
    assert not made(RawColumn("job", "user", pa.array(["none", "other"] * 2))).notes


def test_texts_that_are_no_numbers_are_said() -> None:
    price = pa.array([f"{n}.5" for n in range(30)] + ["on request"] * 3)
    assert made(RawColumn("price", "item", price)).notes == [
        "price: 3 values are no numbers and count as missing, such as 'on request'"
    ]


def test_unused_columns_have_a_reason() -> None:
    columns = {
        "empty": pa.array(["NULL", "", None]),
        "same": pa.array(["a", "a", "a"]),
        "unique": pa.array(["a", "b", "c"]),
        "raw": pa.array([b"\xff", b"\xfe", b"\xff"]),
        "ragged": pa.array([[1.5], [1.5, 2.5], []]),
    }
    assert made(*(RawColumn(name, "item", values) for name, values in columns.items())).unused == {
        "empty": "no values",
        "same": "all values are the same",
        "unique": "most texts occur once; --embed takes them",
        "raw": "of type binary",
        "ragged": "lists that hardly come again",
    }


def test_whole_numbers_are_the_same_however_they_are_written() -> None:
    """pandas writes 1995.0 for 1995 as soon as one year is missing."""
    for values in (["1995", "2001.", "1995.00", "2001.0", "NULL"], [1995.0, 2001.0, 1995.0, 2001.0, float("nan")]):
        features = made(RawColumn("year", "item", pa.array(values)))
        assert texts_of(features, "year") == ["1995", "2001", "1995", "2001", ""]


def test_values_that_no_row_has_are_no_part_of_a_vocabulary() -> None:
    """The dictionary of a column may know more than the rows that the filters have left."""
    column = pa.array(["b", "a", "c", "b"]).dictionary_encode().take(pa.array([0, 3, 1]))
    features = made(RawColumn("brand", "item", column, "id"))
    assert features.vocabularies["brand"].to_pylist() == [None, "a", "b"]


@pytest.mark.parametrize(
    ("values", "kind", "texts"),
    [
        (pa.array([3, 10, 3]), "id", ["3", "10", "3"]),
        (pa.array([1.0, 2.5, None]), "id", ["1", "2.5", ""]),
        (pa.array([123456789012.0, None, -0.0, float("nan")]), "id", ["123456789012", "", "0", ""]),
        (pa.array([[2.0**52], None, [5.0, None]]), "ids", [[str(2**52)], [], ["5"]]),
        (pa.array([True, None, False]), "id", ["true", "", "false"]),
        (pa.array([3, None, 10]), "ids", [["3"], [], ["10"]]),
        (pa.array(["a", "", "b"]), "ids", [["a"], [], ["b"]]),
        (pa.array(["a|b", "a", None]), "id", ["a|b", "a", ""]),
    ],
)
def test_stated_kinds_of_sparse_features(values: pa.Array, kind: str, texts: list[Any]) -> None:
    assert texts_of(made(RawColumn("given", "item", values, kind)), "given") == texts


@pytest.mark.parametrize(
    ("values", "kind", "numbers"),
    [
        (pa.array(["1", "2.5", ""]), "number", [1, 2.5, 1.75]),
        (pa.array(["1,5", "NULL", "2,5"]), "number", [1.5, 2, 2.5]),
        (pa.array([*(f"{n}.0" for n in range(1, 11)), "?!"]), "number", [*range(1, 11), 5.5]),
        (pa.array([True, False]), "number", [1, 0]),
        (pa.array([Decimal("1.50"), Decimal("2.50")]), "number", [1.5, 2.5]),
        (pa.array([1, 3], pa.date32()), "number", [1, 3]),
        (pa.array([2**60 + 1, None, 2**62]), "number", [2**60, 5 * 2**59, 2**62]),
        (pa.array([2**63 + 1, 2**63], pa.uint64()), "number", [2**63, 2**63]),
        (pa.array([[2**60 + 1, 2]]), "vector", [[2**60, 2]]),
        (pa.array(["1|2", "", "3|5.5"]), "vector", [[1, 2], [2.875, 2.875], [3, 5.5]]),
    ],
)
def test_stated_kinds_of_numbers(values: pa.Array, kind: str, numbers: list[Any]) -> None:
    assert made(RawColumn("given", "item", values, kind)).columns["given"].values.tolist() == numbers


@pytest.mark.parametrize(
    ("values", "kind", "message"),
    [
        (pa.array(["1", "two"]), "number", "has the value 'two', which is no number"),
        (pa.array([[1.0]]), "number", "has values of type list<.*>, which are no numbers"),
        (pa.array([b"\xff"], pa.binary(1)), "number", r"of type fixed_size_binary\[1\], which are no numbers"),
        (pa.array(["1,5", "2.5"]), "number", "the value '1,5', which is no number .'1,5' and '2.5' differ in"),
        (pa.array([["a"]]), "id", "has values of type list<.*>, which are no single ids"),
        (pa.array([{"a": 1}]), "ids", "has values of type struct<.*>, which are no ids"),
        (pa.array([[1.0], [1.0, 2.0, 3.0]]), "vector", "has lists of 1, 3 numbers; a vector needs one width"),
        (pa.array([1.5]), "vector", "has values of type double, which are no lists of numbers"),
    ],
)
def test_kinds_that_values_do_not_fit_are_named(values: pa.Array, kind: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^feature given .*{message}"):
        made(RawColumn("given", "item", values, kind))


value = (
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="|"), max_size=3)
    .map(str.strip)
    .filter(lambda text: text not in MISSING)
)


@given(st.lists(st.none() | value, min_size=1), st.lists(st.none() | st.lists(value)))
def test_any_text_comes_back(single: list[str | None], lists: list[list[str] | None]) -> None:
    joined = [None if row is None else "|".join(row) for row in lists]
    features = made(
        RawColumn("one", "item", pa.array(single, pa.string()), "id"),
        RawColumn("some", "user", pa.array(lists, pa.list_(pa.string())), "ids", "one"),
        RawColumn("split", "event", pa.array(joined, pa.string()), "ids"),
    )
    plain = [[text for text in row or [] if text] for row in lists]
    assert texts_of(features, "one") == [text or "" for text in single]
    assert texts_of(features, "some") == texts_of(features, "split") == plain


def named(*names: tuple[str, Owner]) -> str:
    return " ".join(of.name for of in name_features([RawColumn(name, owner, pa.nulls(1)) for name, owner in names]))


def test_names_are_made_to_fit_and_told_apart() -> None:
    names = named(("Average price ($)", "item"), ("2nd", "user"), ("größe", "item"), ("a.b", "event"))
    assert names == "Average_price _2nd größe a_b"
    # Of several owners, and of the dataset itself.
    names = named(("country", "item"), ("country", "user"), ("title", "user"), ("item", "event"), ("raw_id", "item"))
    assert names == "item_country user_country user_title event_item item_raw_id"
    with pytest.raises(ValueError, match="columns 'a b' and 'a-b' of items would both be feature a_b; rename one"):
        named(("a b", "item"), ("a-b", "item"))


def of_owner(values: pa.Array, owner: Owner) -> pa.Array:
    return pa.array([f"of {owner}", f"of {owner}"])


def options(**said: FeatureOptions) -> FeaturesOptions:
    return FeaturesOptions(said)


COLUMNS = [
    RawColumn("price", "item", pa.array(["1.5", "2.5"])),
    RawColumn("notes", "item", pa.array(["a", "b"])),
    RawColumn("shop", "event", pa.array(["a", "a", "b", "b"])),
]


def test_options_change_kinds_tables_owners_and_use() -> None:
    said = options(
        notes=FeatureOptions(kind="ids", table="words"),
        price=FeatureOptions(use=False),
        shop=FeatureOptions(owner="user", kind="id"),
    )
    notes, shop = apply_options(COLUMNS, said, "s.toml", of_owner)
    assert (notes.kind, notes.table, notes.owner) == ("ids", "words", "item")
    assert (shop.kind, shop.table, shop.owner, shop.values.to_pylist()) == ("id", "", "user", ["of user"] * 2)
    assert apply_options(COLUMNS, options(), "", of_owner) == COLUMNS
    # What is stated is wanted.
    number = RawColumn("order", "event", pa.array([1, 2]), None)
    for stated, kind in ((options(), None), (options(order=FeatureOptions(owner="event")), "auto")):
        assert apply_options([number], stated, "", of_owner)[0].kind == kind


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (options(prize=FeatureOptions()), r"no column prize \(did you mean price\?\); there are: price, notes, shop"),
        (options(notes=FeatureOptions()), "the kind of features.notes cannot be told from its values; set its kind"),
        (options(price=FeatureOptions(owner="user")), "features.price is a column of items; leave its owner out"),
    ],
)
def test_options_that_do_not_fit_are_named(said: FeaturesOptions, message: str) -> None:
    with pytest.raises(ValueError, match=f"^s.toml: {message}"):
        apply_options(COLUMNS, said, "s.toml", of_owner)


def test_columns_of_new_items_have_the_names_of_those_of_a_dataset() -> None:
    none = pa.nulls(3)
    columns = [RawColumn(name, "item", none) for name in ("release-year", "price", "7th")]
    named = name_features([*columns, RawColumn("price", "user", none)])
    features = [column.name for column in named if column.owner == "item"]
    assert features == ["release_year", "item_price", "_7th"]
    names = [column.name for column in columns]
    assert find_features([*names, "note"], features) == dict(zip(names, features, strict=True)) | {"note": "note"}
    assert find_features(features, features) == {name: name for name in features}
    with pytest.raises(ValueError, match="'release-year' and 'release_year' would both be feature release_year"):
        find_features(["release-year", "release_year"], features)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("id", pa.array([True, None, False])),
        ("id", pa.array(["b", "", "a"])),
        ("ids", pa.array(["Action | Comedy", None, "Comedy|"])),
        ("ids", pa.array([["a", None, ""], None, ["b", "a"]])),
        ("number", pa.array([Decimal("1.25"), None, Decimal("8.75")])),
        ("number", pa.array([1.5, float("nan"), float("inf")])),
        ("number", pa.array(["$1,299.00", "NULL", "$12.50"])),
        ("ids", pa.array(["a|NULL", "NULL", "b|a"])),
        ("vector", pa.array([[1.0, float("nan")], None, [2.0, 3.0]])),
    ],
)
def test_new_items_are_read_as_those_of_a_dataset(kind: str, values: pa.Array) -> None:
    features = made(RawColumn("of", "item", values, kind))
    (feature,) = features.schema.of("item")
    found = as_in_requests(feature, values)
    texts = {name: in_order(stored(pa.chunked_array([of])), name, True) for name, of in features.vocabularies.items()}
    reader = FeatureReader(features.schema, texts)
    read = reader.read("item", [{"of": value} for value in found], ["an item"] * 3)["of"]
    column = features.columns["of"]
    assert np.array_equal(read.values.numpy(), column.values)
    assert (read.offsets is None) == (column.offsets is None)
    assert column.offsets is None or np.array_equal(read.offsets.numpy(), column.offsets)  # type: ignore[union-attr]
    assert as_in_requests(feature, pa.nulls(2)) == [None, None]


def test_new_items_have_no_exceptions() -> None:
    (_, feature) = made(RawColumn("of", "item", pa.array([1.5, 2.5]))).schema.features
    with pytest.raises(ValueError, match="feature of has the value 'TBA', which is no number"):
        as_in_requests(feature, pa.array([*map(str, range(30)), "TBA"]))
