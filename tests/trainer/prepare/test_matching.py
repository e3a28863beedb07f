"""Tables of items and users whose ids do not fit those of the actions, or are not unique."""

from pathlib import Path

import pyarrow as pa
import pytest
from reading import file_of, prepared, summary

from logitmix.trainer.data.description import read_description
from logitmix.trainer.prepare.matching import match
from logitmix.trainer.prepare.tables import SideTable


def matched(
    table: list[str], read: list[str], kept: list[str] | None = None, given: bool = True
) -> tuple[dict[str, int], str]:
    ids = (pa.array(of, pa.string()) for of in (table, read, read if kept is None else kept))
    return match("items", "items.csv", *ids, given=given)


def test_what_a_table_knows_is_counted() -> None:
    counts = {"ids": 5, "matched": 1, "without_actions": 3}
    assert matched(["a", "b", "b", "x", "y", "z"], ["a", "b", "c"], ["a", "c"]) == (counts, "")
    # All that it knows is filtered out, which is no fault of the table.
    assert matched(["b"], ["a", "b"], ["a"])[1] == "0 of 1 items of the actions are in items.csv (ids a / b)"


@pytest.mark.parametrize(
    ("ids", "table", "said"),
    [
        (["12.0", "7.0"], ["7", "12"], "ids 12.0 / 12, which differ by a trailing .0"),
        (["7", "12"], ["12.00", "7.00"], "ids 7 / 7.00, which differ by a trailing .0"),
        (["B1", "B2"], ["b1", "b2"], "ids B1 / b1, which differ by case"),
        (["12 ", "7"], ["7 ", "12"], "ids '12 ' / 12, which differ by blanks"),
        (["0012", "0007"], ["12", "7"], "ids 0012 / 12, which differ by leading zeros"),
        ([" A1", " B1"], ["a1", "b1"], "ids ' A1' / a1, which differ by blanks, case, a trailing .0 or leading zeros"),
        (["12", "7"], ["x", "y"], "ids 12 / x"),
        (["12", "7"], [], "ids 12 / none"),
    ],
)
def test_a_table_that_knows_none_is_refused_with_an_id_of_each(ids: list[str], table: list[str], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        matched(table, ids)
    line = f"0 of 2 items of the actions are in items.csv ({said})"
    assert str(caught.value) == f"{line}; give the actions and --items the same ids"
    # It is a line where the table is a part of the source, or where one fits.
    assert matched(table, ids, given=False)[1] == line
    assert matched([*table, "z"], [*ids, "z"])[1] == line.replace("0 of 2", "1 of 3").replace("none", "z")


def test_few_that_are_missing_are_counted_alone() -> None:
    known, more = [str(n) for n in range(30)], ["X1", "X2", "X3"]
    assert matched([*known, "x9"], known + more) == ({"ids": 31, "matched": 30, "without_actions": 1}, "")
    assert matched([*known, "x1", "x2"], known + more)[1] == (
        "30 of 33 items of the actions are in items.csv (ids X1 / x1, which differ by case)"
    )


def test_the_last_row_of_an_id_counts() -> None:
    table = SideTable(pa.array(["a", "b", "b", "c"]), {"brand": pa.array(["x", "y", "z", "w"])})
    assert table.repeated("t.csv") == "1 id occurs in several rows of t.csv, such as b: the last row counts"
    assert table.of(pa.array(["b", "a"]))["brand"].to_pylist() == ["z", "x"]
    assert SideTable().repeated("t.csv") == ""


def test_prepare_names_what_does_not_fit(tmp_path: Path) -> None:
    rows = "".join(f"u{user},i{item},{item}\n" for user in range(3) for item in range(6))
    file = file_of(tmp_path, f"user,item,timestamp\n{rows}".encode())
    brands = "".join(f"i{n},b{n % 2}\n" for n in (0, 1, 2, 3, 70, 71, 72))
    items = file_of(tmp_path, f"item,brand\n{brands}i2,b7\n".encode(), "items.csv").path
    users = file_of(tmp_path, b"user,plan\nu0,p0\nu1,p1\nu2,p0\n", "users.csv").path
    dataset, said = prepared(file, items=items, users=users)
    assert "1 id occurs in several rows of items.csv, such as i2: the last row counts" in said
    assert [line for line in summary(dataset).splitlines() if line.startswith(("items", "users     3 of"))] == [
        "items     4 of 6 are in items.csv, which has 7",
        "users     3 of 3 are in users.csv, which has 3",
    ]
    assert read_description(dataset.path)["side_tables"] == {
        "items": {"ids": 7, "matched": 4, "without_actions": 3},
        "users": {"ids": 3, "matched": 3, "without_actions": 0},
    }
    others = file_of(tmp_path, b"user,plan\nU0,p1\nU1,p2\n", "others.csv").path
    problem = (
        r"0 of 3 users of the actions are in others\.csv \(ids u0 / U0, which differ by case\); give the actions and"
    )
    with pytest.raises(ValueError, match=f"^{problem} --users the same ids$"):
        prepared(file, items=items, users=others)
