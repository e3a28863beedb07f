"""Datasets that are prepared in little memory, with the actions in files, are those that are prepared in much."""

import io
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from folders import files_in
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from logitmix.trainer.data import arrange, config, raw, spool, tabular
from logitmix.trainer.data.config import PrepareOptions
from logitmix.trainer.data.prepare import prepare
from logitmix.trainer.data.spool import File, Pieces, Spool, TextCodes

LITTLE = "1KiB"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in ((raw, "PIECE", 50), (spool, "PIECE", 30), (tabular, "BLOCK_BYTES", 400)):
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many parts the actions were divided into."""
    divide, found = arrange._divide, list[int]()

    def divided(*arguments: Any) -> Any:
        made = divide(*arguments)
        found.append(len(made))
        return made

    monkeypatch.setattr(arrange, "_divide", divided)
    return found


def outcome(
    source: Path | str, out: Path, memory: str, name: str = "table", **options: Any
) -> tuple[dict[str, bytes], str]:
    """All files, and what is said."""
    said = io.StringIO()
    given = {"min_user_actions": 1, "max_rejects": 1.0, "overwrite": True} | options
    try:
        prepare(PrepareOptions(name, str(source), str(out), memory=memory, **given), Console(file=said, width=500))
    except ValueError as error:
        return {}, said.getvalue() + str(error)
    return files_in(out), said.getvalue()


def without_columns(said: str) -> str:
    """But for the line that columns are read whole."""
    return "".join(line for line in said.splitlines(True) if " are read whole, " not in line)


def csv_of(rows: int = 300, seed: int = 0, users: str = "u{}") -> str:
    """Texts, numbers, dates, missing values, duplicates, ties, a counter and titles, in no order."""
    random = np.random.default_rng(seed)
    lines = ["user,item,timestamp,event,price,note,session,title,tags"]
    for row in range(rows):
        user, item, time = (int(of) for of in random.integers(0, (25, 40, 60)))
        event = random.choice(["view", "cart", "", "NULL"])
        price = random.choice(["1.5", "2", "$3,000.00", "-", "7.25"])
        lines.append(
            f"{users.format(user)},i{item},{1_600_000_000 + time},{event},{price},n{row},{row},T{item % 7},a|b{row % 5}"
        )
        lines += [lines[-1]] * (row % 20 == 3) + ["bad"] * (row % 90 == 7)
    return "\n".join(lines) + "\n"


ITEMS = "item,brand,weight\n" + "".join(f"i{n},b{n % 6},{n / 7:.3f}\n" for n in range(35)) + "i3,other,1\n"
SCHEMA = """
features.event.owner = "user"
features.price.owner = "item"
features.tags = { kind = "ids", table = "t" }
"""


def parquet(path: Path) -> None:
    random = np.random.default_rng(1)
    count = 400
    columns: dict[str, Any] = {
        "user": random.integers(0, 30, count),
        "item": random.integers(0, 50, count).astype(float),
        "timestamp": pa.array(random.integers(0, 10**6, count), pa.timestamp("us")),
        "flag": pa.array(random.random(count) < 0.5),
        "number": pa.array([None if of < 0.1 else of for of in random.random(count)]),
        "whole": pa.array(np.where(random.random(count) < 0.1, np.nan, random.integers(0, 9, count)), from_pandas=True),
        "shape": pa.array(random.random((count, 3)).tolist(), pa.list_(pa.float32(), 3)),
        "several": pa.array([[f"x{of % 6}"] * (of % 3) for of in random.integers(0, 30, count)]),
        "word": pa.array([f"w{of}" for of in random.integers(0, 12, count)]).dictionary_encode(),
        "nothing": pa.nulls(count),
    }
    path.mkdir()
    table = pa.table(columns)
    pq.write_table(table[:150], path / "1.parquet")
    # Another type for a column, one that is missing, and a header alone.
    changed = table[150:].drop_columns("word")
    pq.write_table(changed.set_column(3, "flag", changed["flag"].cast(pa.string())), path / "2.parquet")
    (path / "3.csv").write_text("user,item,timestamp,number\n")


def write(name: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(name) and None


def numbered(line: Callable[[int], str]) -> Callable[[Path], None]:
    return write("user,item,timestamp\n" + "".join(f"{line(n)}\n" for n in range(90)))


LISTS = "".join(f"u{n % 30},a{n % 9} b{n % 4} c{n},{n}\n" for n in range(200))
MIXED = numbered(lambda n: f"{n % 12 if n % 2 else f'x{n}'},i{n % 5},{n}")
CASES: dict[str, tuple[Callable[[Path], None], dict[str, Any]]] = {
    "csv": (write(csv_of()), {}),
    "filters": (write(csv_of()), {"min_user_actions": 10, "min_item_actions": 6}),
    "duplicates stay": (write(csv_of()), {"keep_duplicates": True, "min_item_actions": 2}),
    "conditions": (
        write(csv_of()),
        {
            "where": ("event != cart", "price >= 2", "timestamp < 2020-09-13T12:27:30", "user != u7"),
            "min_item_actions": 2,
        },
    ),
    "condition that none fulfills": (write(csv_of()), {"where": ("item = none",)}),
    "no user": (write(csv_of()), {"min_user_actions": 99}),
    "order of rows": (write(csv_of()), {"timestamp_column": ""}),
    "schema and items": (write(csv_of()), {"schema": SCHEMA, "items": ITEMS}),
    "ids of digits": (write(csv_of(users="{}")), {}),
    # The users that are kept have digits alone, and so another order.
    "digits are left by a filter": (MIXED, {"min_user_actions": 5}),
    "digits are left by a condition": (MIXED, {"where": ("user < 100",)}),
    "parquet": (parquet, {}),
    "parquet with numbers of rows": (parquet, {"where": ("number > 0.5",), "min_user_actions": 5}),
    "lists": (write("user,item,timestamp\n" + LISTS), {"list_separator": " "}),
    "fractions": (numbered(lambda n: f"u{n % 9},i{n % 5},{n % 7}.{n % 3}"), {}),
    "dates in digits": (numbered(lambda n: f"u{n % 9},i{n % 5},202401{n % 28 + 1:02}"), {}),
    "days and months": (numbered(lambda n: f"u{n % 9},i{n % 5},{n % 28 + 1}/{n % 3 + 1}/2024"), {}),
    "whole numbers with a zero": (numbered(lambda n: f"{n % 9}.0,{n % 5}{'.0' * (n % 2)},{n}"), {}),
}


def both(case: str, folder: Path) -> Iterator[tuple[dict[str, str], str]]:
    source = folder / "in"
    make, options = CASES[case]
    make(source)
    for setting in ("schema", "items"):
        if setting in options:
            (folder / setting).write_text(options[setting])
            options = options | {setting: str(folder / setting)}
    yield outcome(source, folder / "much", "1GiB", **options)
    yield outcome(source, folder / "little", LITTLE, **options)


@pytest.mark.parametrize("case", CASES)
def test_little_memory_gives_the_same_bytes(case: str, tmp_path: Path, parts: list[int]) -> None:
    much, little = both(case, tmp_path)
    assert without_columns(little[1]) == much[1].replace("/much", "/little")
    assert little[0] == much[0] and (much[0] or "no user" in case or "none" in case)
    assert not parts or (parts[0] == 1 and max(parts) > 1)
    assert {path.name for path in tmp_path.iterdir()} <= {"in", "much", "little", "schema", "items"}


def test_demo_features_in_little_memory(tmp_path: Path, parts: list[int]) -> None:
    parameters: Any = {"name": "demo-features", "max_rejects": 0.01}
    found = [outcome("", tmp_path / "out", memory, **parameters) for memory in ("1GiB", "4MiB")]
    assert found[0] == (found[1][0], without_columns(found[1][1])) and found[0][0]
    assert parts[0] == 1 < parts[1]


@pytest.mark.parametrize("memory", ["1GiB", LITTLE])
def test_users_are_in_the_order_of_those_that_are_kept(memory: str, tmp_path: Path) -> None:
    MIXED(tmp_path / "in")
    outcome(tmp_path / "in", tmp_path / "out", memory, min_user_actions=5)
    users = pq.read_table(tmp_path / "out" / "sequences")["raw_user_id"].to_pylist()
    assert users == ["1", "3", "5", "7", "9", "11"]


rows = st.lists(
    st.tuples(
        st.sampled_from(["1", "02", "2", "u", "10", "v"]),
        st.sampled_from(["a", "b", "7", "12", "c"]),
        st.integers(0, 3) | st.integers(-(2**61), 2**61),
        st.sampled_from(["", "x", "y", "1", "2.0"]),
    ),
    min_size=1,
    max_size=60,
)


@given(rows, st.integers(0, 3), st.integers(1, 3), st.booleans(), st.sampled_from([(), ("more = x",)]))
def test_any_rows_in_little_memory(rows: list[Any], of_items: int, of_users: int, keep: bool, shown: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "in.csv")
        source.write_text("user,item,timestamp,more\n" + "".join(",".join(map(str, row)) + "\n" for row in rows))
        filters: dict[str, Any] = {"min_item_actions": of_items, "min_user_actions": of_users, "keep_duplicates": keep}
        filters["shown"] = shown
        much, little = (outcome(source, Path(folder, "out"), memory, **filters) for memory in ("1GiB", LITTLE))
        assert much == (little[0], without_columns(little[1]))


def test_a_failed_job_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in.csv").write_text(csv_of())

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(spool.os, "pwrite", full)
    files, said = outcome(tmp_path / "in.csv", tmp_path / "out", LITTLE)
    assert not files and "the actions do not fit into --memory, nor on this disk, of which" in said
    assert said.endswith("GiB are free (No space left on device); free some of it, or give more --memory")
    assert [path.name for path in tmp_path.iterdir()] == ["in.csv"]


def test_columns_that_are_read_whole_are_said(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text(csv_of())
    _, said = outcome(tmp_path / "in.csv", tmp_path / "out", LITTLE)
    line = "are read whole, one after the other: each takes about 0.0 GiB, more than --memory leaves"
    assert line in said and line not in outcome(tmp_path / "in.csv", tmp_path / "out", "1GiB")[1]


def test_ids_that_leave_no_memory(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("user,item,timestamp\n" + "".join(f"u{n},i,1\n" for n in range(40_000)))
    _, said = outcome(tmp_path / "in.csv", tmp_path / "out", "2MiB")
    assert said.startswith("the distinct ids and texts alone take 0.0 GiB; give --memory 0.3GiB or more")


digits = st.integers(0, 40).map(str) | st.sampled_from(
    ["007", "0", "00", "9999999999", "123456", "-1", "1.0", "", "٣", "x"]
)


@given(
    st.lists(st.lists(st.integers(0, 40).map(str) | st.none(), max_size=9) | st.lists(digits, max_size=9), max_size=6)
)
def test_texts_are_numbered_in_the_order_of_their_appearance(pieces: list[list[str | None]]) -> None:
    """Small numbers by a table, until there is another text."""
    codes, known = TextCodes("column x", Spool()), dict[str, int]()
    for piece in pieces:
        expected = [None if text is None else known.setdefault(text, len(known)) for text in piece]
        assert codes.encode(pa.array(["", *piece], pa.string())[1:]).to_pylist() == expected
        if len(known) % 2:
            assert codes.texts.to_pylist() == list(known)
    assert codes.texts.to_pylist() == list(known)


def test_pieces_are_read_as_an_array(tmp_path: Path) -> None:
    made = Spool(tmp_path / "spool", 0)
    pieces, expected = Pieces(File(made)), np.arange(95)
    for start in range(0, 95, 10):
        pieces.append(expected[start : start + 10])
    assert made.in_files and len(pieces) == 95
    for which in (slice(None), slice(7, 8), slice(9, 31), slice(20, 30), slice(95, 99), np.array([0, 9, 10, 94])):
        np.testing.assert_array_equal(pieces[which], expected[which])
    made.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("written", "size"),
    [("4GiB", 4 << 30), ("512 MiB", 512 << 20), ("1.5gb", 1_500_000_000), ("1000", 1000), ("2K", 2000), ("7B", 7)],
)
def test_sizes(written: str, size: int) -> None:
    assert PrepareOptions("table", memory=written).bytes_of_memory == size
    assert PrepareOptions("table").bytes_of_memory == config.machine_memory() // 2


@pytest.mark.parametrize("written", ["much", "0", "-1GiB", "4GiBs"])
def test_what_is_no_size(written: str) -> None:
    with pytest.raises(ValueError, match=r"^--memory is '.*'; it must be a size such as 4GiB or 512MiB"):
        PrepareOptions("table", memory=written)
