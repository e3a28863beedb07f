import hashlib
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from reading import actions_of, decoded, file_of, listed, parquet_of, prepared, titles

from logitmix.trainer.data.dataset import Dataset
from logitmix.trainer.prepare.config import PrepareOptions
from logitmix.trainer.prepare.files import InputFile
from logitmix.trainer.prepare.rejects import Rejects
from logitmix.trainer.prepare.sources.table import ColumnNames

MANY = 1 << 18


def test_csv_tables(tmp_path: Path, rejects: Rejects) -> None:
    content = (
        '\ufeffwhen,"who, really",note,what\r\n5,"a ""b""","two\nlines",x\r\n\r\n'
        "6.0,Ä,,y\r\n7,a\r\nseven,a,,x\r\n8,,,x\r\n9,"
    ).encode() + b"\xff,,x\r\n10,c,,z"
    columns = ColumnNames(user="who, really", item="what", timestamp="when")
    assert actions_of(file_of(tmp_path, content), rejects, columns) == [
        ('a "b"', "x", 5),
        ("Ä", "y", 6),
        ("c", "z", 10),
    ]
    assert sorted((int(number), reason) for _, number, reason, _ in listed(rejects)) == [
        (6, "has 2 fields, not 4"),
        (
            7,
            "the timestamp 'seven' is not a number between -2^62 and 2^62, nor a date in a usual form "
            "(--time-format gives another)",
        ),
        (8, "the user is empty"),
        (9, "not UTF-8"),
    ]
    assert rejects.lines == 7


def test_rows_over_chunk_borders(tmp_path: Path, rejects: Rejects) -> None:
    count = 2 * MANY + 5
    content = "user,item,timestamp\n" + "".join(f"{row},i,{-row}\n" for row in range(count))
    read = actions_of(file_of(tmp_path, content.encode()), rejects)
    assert read == [(str(row), "i", -row) for row in range(count)]


OF_TIMES = [("c", 3), ("a", -1), ("b", -1)]


@pytest.mark.parametrize(
    ("users", "times", "expected"),
    [
        (pa.array([3, 1, 2]), pa.array([30, 10, 20], pa.int32()), [("3", 30), ("1", 10), ("2", 20)]),
        (pa.array(["c", None, "b"]), pa.array([3.0, 1.0, 2.0]), [("c", 3), ("b", 2)]),
        (pa.array(["c", "", "b"], pa.large_string()), pa.array([3, 1, None]), [("c", 3)]),
        (pa.array(["c", "a", "b"]).dictionary_encode(), pa.array([3.5, float("nan"), 2]), [("c", 3), ("b", 2)]),
        (pa.array(["c", "a", "b"]), pa.array(["3", "x", "2"], pa.large_string()), [("c", 3), ("b", 2)]),
        (pa.array(["c", "a", "b"]), pa.array([3, None, 2], pa.timestamp("s")), [("c", 3), ("b", 2)]),
        (pa.array(["c", "a", "b"]), pa.array([3999, -1, -1000], pa.timestamp("ms", "Europe/Oslo")), OF_TIMES),
        (pa.array(["c", "a", "b"]), pa.array([3, 1, 2], pa.date32()), [("c", 259200), ("a", 86400), ("b", 172800)]),
        (pa.array(["c", "a", "b"]), pa.array([86400_000, 0, None], pa.date64()), [("c", 86400), ("a", 0)]),
        (pa.array(["c", "a", "b"]), pa.array(["1970-01-02", "1970-01-01T01:00+01", "?"]), [("c", 86400), ("a", 0)]),
    ],
)
def test_parquet_tables(
    users: pa.Array, times: pa.Array, expected: list[tuple[str, int]], tmp_path: Path, rejects: Rejects
) -> None:
    made = {"unused": [[1], [2], [3]], "timestamp": times, "user": users, "item": ["x", "y", "z"]}
    # pandas' row numbers are no column.
    file = parquet_of(tmp_path, made | {"__index_level_0__": [0, 1, 2]})
    assert [(user, time) for user, _, time in actions_of(file, rejects)] == expected
    assert (rejects.count, rejects.lines) == (3 - len(expected), 3)
    if rejects.count:
        assert all(name == "in.parquet" and number in "123" for name, number, _, _ in listed(rejects))


def test_parquet_rows_keep_their_numbers_over_batches(tmp_path: Path, rejects: Rejects) -> None:
    users = pa.array(["a"] * MANY + ["", "b"])
    numbers = range(len(users))
    read = actions_of(parquet_of(tmp_path, {"user": users, "item": numbers, "timestamp": numbers}), rejects)
    assert read[-1] == ("b", str(MANY + 1), MANY + 1)
    assert listed(rejects) == [["in.parquet", str(MANY + 1), "the user is empty", f",{MANY},{MANY}"]]


def test_without_a_time_column_the_order_counts_over_all_parts(tmp_path: Path, rejects: Rejects) -> None:
    parts = [parquet_of(tmp_path, {"user": [1, 1], "item": [5, 6]}), file_of(tmp_path, b"item,user\n7,1\n8,1\n")]
    assert actions_of(parts, rejects, ColumnNames(timestamp="")) == [
        ("1", "5", 0),
        ("1", "6", 1),
        ("1", "7", 2),
        ("1", "8", 3),
    ]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_columns_that_are_not_there_are_named_beside_those_that_are(
    kind: str, tmp_path: Path, rejects: Rejects
) -> None:
    (tmp_path / "in.csv").write_text("user,movie,when\na,x,1\n")
    pq.write_table(pa.table({"user": ["a"], "movie": ["x"], "when": [1]}), tmp_path / "in.parquet")
    file = InputFile(tmp_path / f"in.{kind}")
    with pytest.raises(ValueError, match=f"^in.{kind}: no column 'item'; there are: user, movie, when.* --item-col"):
        actions_of(file, rejects)
    with pytest.raises(ValueError, match=r"no column 'timestamp'; .* --timestamp-column; for the order .*column \"\""):
        actions_of(file, rejects, ColumnNames(item="movie"))


ACTIONS = """user,item,timestamp,action,seconds,session,shelf
u2,c,2,click,3.5,s5,
u1,c,3,click,,s3,top
u1,a,1,click,0.5,s1,top
u2,d,3,buy,4.5,s6,top
u2,a,1,,2.5,s4,low
u1,b,2,buy,1.5,s2,low
"""
ITEMS = """sku,title,brand,tags,price,notes
a,Ärmel,acme,red|new,1.5,first
b,,acme,new,,second
c,Crème,bolt,red,2.5,third
x,Unseen,bolt,new,9.5,fourth
a,Apple,acme,red|new,3.5,fifth
"""


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    (tmp_path / "catalog.csv").write_text(ITEMS)
    users = {"name": ["Ann", "Bob"], "user": ["u2", "u1"], "taste": [[0.5, 1.0], [1.5, 2.0]], "favorite": ["x", "acme"]}
    pq.write_table(pa.table(users), tmp_path / "users.parquet")
    return tmp_path


def of_shop(shop: Path, schema: str = "", clicks: str = ACTIONS, **options: Any) -> tuple[Dataset, str]:
    """The dataset, and what prepare said."""
    (shop / "clicks.csv").write_text(clicks)
    if schema:
        (shop / "schema.toml").write_text(schema)
        options["schema"] = shop / "schema.toml"
    sides = {"items": shop / "catalog.csv", "users": shop / "users.parquet"} if clicks == ACTIONS else {}
    return prepared(shop / "clicks.csv", **sides | options)


REPEATED = "1 id occurs in several rows of catalog.csv, such as a: the last row counts\n"


def test_items_users_and_further_columns_become_features(shop: Path) -> None:
    dataset, said = of_shop(shop)
    assert dataset.raw_ids() == ["a", "b", "c", "d"]
    assert titles(dataset) == ["Apple", None, "Crème", None]
    kinds = {feature.name: (feature.owner, feature.kind) for feature in dataset.schema.features[1:]}
    assert kinds == {
        "tags": ("item", "ids"),
        "price": ("item", "number"),
        "taste": ("user", "vector"),
        "action": ("event", "id"),
        "seconds": ("event", "number"),
        "shelf": ("event", "id"),
    }
    assert said == REPEATED + (
        "not used, unless --schema FILE states a kind: brand, notes, name, favorite, session (most texts occur "
        "once; --embed takes them)\n"
    )
    # The last row of an item counts; b has no price, and d is in no row.
    assert decoded(dataset, "item") == {"tags": [["red", "new"], ["new"], ["red"], []], "price": [3.5, 3, 2.5, 3]}
    assert decoded(dataset, "user") == {"taste": [[1.5, 2.0], [0.5, 1.0]]}
    assert decoded(dataset, "event") == {
        "action": ["click", "buy", "click", "", "click", "buy"],
        "seconds": [0.5, 1.5, 2.5, 2.5, 3.5, 4.5],
        "shelf": ["top", "low", "top", "low", "", "top"],
    }
    description = json.loads(dataset.description())
    digest = hashlib.sha256(ITEMS.encode()).hexdigest()
    assert description["source"]["items"] == {"name": "catalog.csv", "sha256": {"catalog.csv": digest}}
    assert set(description["source"]) == {"name", "sha256", "items", "users"}


def test_a_file_says_what_columns_are(shop: Path) -> None:
    dataset, said = of_shop(
        shop,
        """
        [features.brand]
        kind = "id"
        [features.favorite]
        kind = "id"
        table = "brand"
        [features.shelf]
        owner = "item"
        kind = "id"
        [features.price]
        kind = "ids"
        [features.session]
        use = false
        [features.notes]
        use = false
        """,
    )
    assert said == REPEATED + (
        "not used, unless --schema FILE states a kind: name (most texts occur once; --embed takes them)\n"
    )
    assert dataset.vocabulary("brand") == ["", "acme", "bolt", "x"]
    assert decoded(dataset, "user")["favorite"] == ["acme", "x"]
    assert decoded(dataset, "item")["brand"] == ["acme", "acme", "bolt", ""]
    assert decoded(dataset, "item")["price"] == [["3.5"], [], ["2.5"], []]
    # Each item's first in time that is there: a's is u1's or u2's at time 1, whichever comes first among equals; c's is
    # u1's, because the earlier one of u2 has none.
    assert decoded(dataset, "item")["shelf"] == ["top", "low", "top", "top"]
    assert set(decoded(dataset, "event")) == {"action", "seconds"}
    assert json.loads(dataset.description())["source"]["schema"]["name"] == "schema.toml"


OF_USERS = {"plan": "id", "seconds": "number"}


def test_later_actions_say_nothing_about_the_user(shop: Path) -> None:
    """They may be held out: the last one is the target, with either split. v's first action has no plan."""
    plans = {"u": ["a", "b", "c", "d"], "v": ["", "b", "b", "d"], "w": ["a", "c", "c", ""]}
    clicks = "user,item,timestamp,plan,seconds\n" + "".join(
        # Not in the order of time.
        f"{user},{user}{at},{at},{plan},{'' if not plan else at + 1}\n"
        for user, of in plans.items()
        for at, plan in reversed(list(enumerate(of)))
    )
    schema = "".join(f"[features.{name}]\nowner = 'user'\nkind = '{kind}'\n" for name, kind in OF_USERS.items())
    dataset, _ = of_shop(shop, schema, clicks)
    assert decoded(dataset, "user") == {"plan": ["a", "", "a"], "seconds": [1, 1, 1]}
    assert dataset.vocabulary("plan") == ["", "a"]


def test_features_keep_to_the_actions_that_the_filters_leave(shop: Path) -> None:
    dataset, _ = of_shop(shop, min_item_actions=2)
    assert dataset.raw_ids() == ["a", "c"]
    assert decoded(dataset, "event")["action"] == ["click", "click", "", "click"]
    assert decoded(dataset, "event")["seconds"] == pytest.approx([0.5, 6.5 / 3, 2.5, 3.5])


def test_the_id_is_the_first_column_or_the_named_one(shop: Path) -> None:
    pq.write_table(pa.table({"price": [1.0, 2.0, 4.0], "item": ["a", "b", "c"]}), shop / "named.parquet")
    (shop / "folder").mkdir()
    (shop / "folder" / "1.csv").write_text("code,price\na,1\n,5\n")
    (shop / "folder" / "2.csv").write_text("code,price\nb,2\nc,4\n")
    for name in ("named.parquet", "folder"):
        dataset, _ = of_shop(shop, items=shop / name, users="", max_rejects=0.5)
        assert decoded(dataset, "item")["price"] == [1, 2, 4, pytest.approx(7 / 3)]
    assert (shop / "out" / "rejects.tsv").read_text().splitlines()[1:] == ["1.csv\t3\tthe id is empty\t,5"]


def test_columns_of_parts_are_joined(shop: Path) -> None:
    """A column that a part has not is missing there; CSV and Parquet may call a number differently."""
    parts = shop / "parts"
    parts.mkdir()
    (parts / "1.csv").write_text("user,item,timestamp,price,extra\nu,a,1,1.5,x\nu,b,2,2.5,x\n")
    rows = {"user": ["u", "u"], "item": ["c", "d"], "timestamp": [3, 4], "price": pa.array([3.5, 4.5], pa.float32())}
    pq.write_table(pa.table(rows), parts / "2.parquet")
    dataset, _ = prepared(parts)
    assert decoded(dataset, "event") == {"price": [1.5, 2.5, 3.5, 4.5], "extra": ["x", "x", "", ""]}
    pq.write_table(pa.table(rows | {"price": [[1.0], [2.0]]}), parts / "2.parquet")
    with pytest.raises(
        ValueError,
        match=r"column price is of type varchar in 1.csv and double\[\] in 2.parquet; write it in one type",
    ):
        prepared(parts)


@pytest.mark.parametrize("name", ["items", "users", "schema"])
def test_files_that_are_not_there_are_named(shop: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"^no file( or folder)? at nowhere; --{name} must name one$"):
        prepared(file_of(shop, ACTIONS.encode()), **{name: "nowhere"})


VIEW, HALF = pa.string_view(), pa.float16()
NEWER: dict[str, list[tuple[str, list[Any], pa.DataType, pa.DataType]]] = {
    "clicks": [
        ("user", ["u", "v", "u", None, "v"], VIEW, pa.string()),
        ("item", ["a", "b", "b", "a", "a"], VIEW, pa.string()),
        ("timestamp", [1.0, 2.0, 3.0, 4.0, 5.0], HALF, pa.float32()),
        ("price", [0.5, 1.5, None, 2.5, float("nan")], HALF, pa.float32()),
        ("fee", [Decimal("0.5"), Decimal("1.5"), None, Decimal(0), None], pa.decimal32(5, 2), pa.decimal128(5, 2)),
        ("shop", ["x", "y", "x", "", None], VIEW, pa.string()),
        ("path", [["x", "y"], ["y", "x"], None, [], ["y", "x"]], pa.list_(VIEW), pa.list_(pa.string())),
        ("far", [["x", "y"], ["y", "x"], None, [], ["y", "x"]], pa.large_list(VIEW), pa.large_list(pa.string())),
        ("rows", [{"a": "x"}] * 5, pa.struct({"a": VIEW}), pa.struct({"a": pa.string()})),
        ("raw", [b"x"] * 5, pa.binary_view(), pa.binary()),
    ],
    "items": [
        ("item", ["a", None, "b"], VIEW, pa.string()),
        ("title", ["A", "?", "B"], VIEW, pa.string()),
        ("weight", [0.5, 1.5, 2.5], HALF, pa.float32()),
        ("codes", [["x", "y"], None, ["x", "x"]], pa.list_(VIEW, 2), pa.list_(pa.string(), 2)),
        ("size", [Decimal(1), None, Decimal(2)], pa.decimal64(9, 0), pa.decimal128(9, 0)),
        ("image", [[0.5, 1.0], None, [1.5, 2.0]], pa.list_(HALF, 2), pa.list_(pa.float32(), 2)),
    ],
    "users": [
        ("user", ["v", "u"], VIEW, pa.string()),
        ("taste", [[0.5, 1.0], [1.5, 2.0]], pa.list_(HALF), pa.list_(pa.float32())),
        ("marks", [[("a", "x")], []], pa.map_(VIEW, VIEW), pa.map_(pa.string(), pa.string())),
    ],
}
"""Columns of tables: the name, the values, a type that Arrow reads but cannot filter or compare, and the older one that
it is read as."""


def test_half_floats_small_decimals_and_views_are_read_as_older_types(shop: Path) -> None:
    made, said = [], []
    for newer in (False, True):
        for table, columns in NEWER.items():
            plain = {name: pa.array(values, kind) for name, values, _, kind in columns}
            arrays = {name: plain[name].cast(kind) for name, _, kind, _ in columns} if newer else plain
            pq.write_table(pa.table(arrays), shop / f"{table}.parquet")
        sides = {of: shop / f"{of}.parquet" for of in ("items", "users")}
        dataset, more = prepared(shop / "clicks.parquet", where=("price != 1.5",), max_rejects=0.5, **sides)
        said.append(more)
        made.append([decoded(dataset, owner) for owner in ("item", "user", "event")])
        assert titles(dataset) == ["A", "B"]
    assert made[0] == made[1] and said[0] == said[1]
    assert [set(of_owner) for of_owner in made[1]] == [
        {"weight", "codes", "size", "image"},
        {"taste"},
        {"price", "fee", "shop", "path", "far"},
    ]


MOMENTS = [-1_500_000_000, -1_999_999_999, 7_000_000_001, 7_000_000_000, 7_999_999_999, 7_000_000_001, 8_000_000_000]
"""Nanoseconds since 1970, in no order; two are the same."""


@pytest.mark.parametrize(("unit", "nanoseconds"), [("", 1), ("ns", 1), ("us", 1000), ("ms", 1_000_000)])
def test_fractions_order_the_actions_of_a_second(unit: str, nanoseconds: int, tmp_path: Path) -> None:
    times = [moment // nanoseconds * nanoseconds for moment in MOMENTS]
    stamps = pa.array([time // nanoseconds for time in times], pa.timestamp(unit or "ns"))
    items = pa.array([str(row) for row in range(len(times))])
    if unit:
        file = parquet_of(tmp_path, {"user": ["u"] * len(times), "item": items, "timestamp": stamps})
    else:
        texts = stamps.cast(pa.string()).to_pylist()
        rows = [f"u,{item},{text}" for item, text in zip(items, texts, strict=True)]
        # A time that is a number, and one that is none, beside the texts.
        file = file_of(tmp_path, "\n".join(["user,item,timestamp", "u,no,?", *rows, "u,last,9"]).encode())
    dataset, _ = prepared(file, max_rejects=0.5)
    order = sorted(range(len(times)), key=lambda row: times[row])
    expected = [(str(row), times[row] // 10**9) for row in order] + ([] if unit else [("last", 9)])
    raw = dataset.raw_ids()
    assert [
        (raw[item], time) for item, time in zip(dataset.items_flat, dataset.timestamps_flat, strict=True)
    ] == expected


def test_titles_of_actions_are_the_last_in_time_that_is_there(shop: Path) -> None:
    clicks = "user;item;timestamp;title\nu;a;2024-01-02;new\nu;a;2024-01-01;old\nu;b;2024-01-03;\nv;b;2023-01-01;B\n"
    clicks += "u;c;2024-01-03;\nv;d;2024-01-03;D\n"
    dataset, _ = of_shop(shop, clicks=clicks)
    assert titles(dataset) == ["new", "B", None, "D"]
    assert [feature.name for feature in dataset.schema.features] == ["item"]
    assert json.loads(dataset.description())["titles"] == 3
    # A table of items has the first word; b has no title there.
    assert titles(of_shop(shop, clicks=clicks, items=shop / "catalog.csv")[0]) == ["Apple", "B", "Crème", "D"]
    file = parquet_of(shop, {"user": ["u"], "item": ["a"], "timestamp": [1], "title": [["x"]]})
    for owner, sides in (("actions", {}), ("items", {"items": file.path})):
        problem = rf"^column title of the {owner} is of type list<.*>, not text; rename it"
        with pytest.raises(ValueError, match=problem):
            prepared(file, **sides)


def test_the_delimiter_can_be_given(shop: Path) -> None:
    clicks = "user^item^timestamp^note\nu^a,b^1^x;y\n"
    with pytest.raises(ValueError, match=r"no column 'user'; there are: user\^item"):
        of_shop(shop, clicks=clicks)
    for delimiter, character in (("^", "^"), ("\\t", "\t")):
        dataset, _ = of_shop(shop, clicks=clicks.replace("^", character), delimiter=delimiter)
        assert dataset.raw_ids() == ["a,b"]


@pytest.mark.parametrize("delimiter", ["ab", "ü", '"', "\n"])
def test_delimiters_that_cannot_be(delimiter: str) -> None:
    with pytest.raises(ValueError, match=r"^--delimiter is '.*'; it must be one character: ;$"):
        PrepareOptions("table", "x.csv", delimiter=delimiter)


def test_conditions_keep_actions(shop: Path) -> None:
    """They act on the columns as the source has them, and before the counts of items and users."""
    dataset, _ = of_shop(shop, where=("action = click", "seconds >= 1"), min_item_actions=1)
    # Of u1's clicks one took 0.5 seconds and one is without.
    assert (dataset.num_users, dataset.raw_ids()) == (1, ["c"])
    filters = json.loads(dataset.description())["filters"]
    assert filters["where"] == ["action = click", "seconds >= 1"]
    assert filters["removed"] == {
        "where": {"users": 1, "items": 3, "actions": 5},
        "duplicates": {"users": 0, "items": 0, "actions": 0},
        "shown": {"users": 0, "items": 0, "actions": 0},
        "min_item_actions": {"users": 0, "items": 0, "actions": 0},
        "min_user_actions": {"users": 0, "items": 0, "actions": 0},
    }
    with pytest.raises(ValueError, match=r"^--where seconds > 9 leaves none of the 6 actions$"):
        of_shop(shop, where=("seconds > 9",))
    with pytest.raises(ValueError, match=r"no user has 9 or more actions \(there were 2 users with 3 actions, "):
        of_shop(shop, where=("action = click",), min_user_actions=9)
