"""Tables of items and users whose ids do not fit those of the actions, or are not unique."""

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from reading import file_of, prepared, summary

from logitmix.trainer.data.description import read_description
from logitmix.trainer.prepare.matching import alike, match
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


def test_ids_that_come_again_with_other_values_are_said() -> None:
    columns: dict[str, Any] = {"note": ["n"] * 6, "brand": ["x", "y", "z", "x", "y", "w"]}
    table = SideTable(pa.array(["a", "b", "b", "a", "b", "c"]), {name: pa.array(of) for name, of in columns.items()})
    assert table.contradictions("t.csv") == (
        "1 id occurs in several rows of t.csv with different values, such as b with those of brand: the last row counts"
    )
    assert table.of(pa.array(["b", "a"]))["brand"].to_pylist() == ["y", "x"]
    harmless = SideTable(pa.array(["a", "b", "a"]), {"brand": pa.array(["x", "y", "x"])})
    assert harmless.contradictions("t.csv") == SideTable().contradictions("t.csv") == ""
    assert SideTable(pa.array(["a", "a"]), {"v": pa.array([[1.0], None])}).contradictions("t.csv").startswith("1 id")


@pytest.mark.parametrize(
    ("ids", "known", "said"),
    [
        (
            ["a", "A", "b", "\u3000a", "c "],
            None,
            "2 items differ from another only by .*, such as 'A' and 'a': they count",
        ),
        (["Caf\u00e9", "Cafe\u0301"], None, r"1 item differs .* such as 'Cafe\\u0301' and 'Caf\\xe9': they count"),
        (["a", "\ufeffa"], None, r"1 item differs .* such as '\\ufeffa' and 'a'"),
        (["B", "c"], ["x", "X", "b"], "1 item differs .* such as 'B' and 'b'"),
        (["7", "007", "0", "00", "70"], None, "2 items differ .* such as '007' and '7'"),
        (["a", "a b", "ab", "1", "0a1", "10", "\u00e4"], ["x", "X"], ""),
        ([], ["x"], ""),
    ],
)
def test_ids_that_could_be_one_are_said(ids: list[str], known: list[str] | None, said: str) -> None:
    found = alike("item", pa.array(ids, pa.string()), None if known is None else pa.array(known, pa.large_string()))
    assert len(found) == bool(said) and re.match(said, "".join(found))


def test_prepare_names_ids_that_could_be_one(tmp_path: Path) -> None:
    file = file_of(tmp_path, b"user,item,timestamp\nu,i,1\nU,j,2\n")
    dataset, said = prepared(file)
    assert "1 user differs from another only by blanks, case, zeros or Unicode's forms, such as 'U' and 'u'" in said
    later = file_of(tmp_path, b"user,item,timestamp\nu,I,3\n", "later.csv")
    said = prepared(later, append=dataset.path, min_user_actions=5, overwrite=False, out=tmp_path / "both")[1]
    assert "1 new item differs from another only by blanks, case, zeros or Unicode's forms, such as 'I' and 'i'" in said
    assert "user differs" not in said


def test_prepare_names_what_does_not_fit(tmp_path: Path) -> None:
    rows = "".join(f"u{user},i{item},{item}\n" for user in range(3) for item in range(6))
    file = file_of(tmp_path, f"user,item,timestamp\n{rows}".encode())
    brands = "".join(f"i{n},b{n % 2}\n" for n in (0, 1, 2, 3, 70, 71, 72))
    items = file_of(tmp_path, f"item,brand\n{brands}i2,b7\n".encode(), "items.csv").path
    users = file_of(tmp_path, b"user,plan\nu0,p0\nu1,p1\nu2,p0\n", "users.csv").path
    dataset, said = prepared(file, items=items, users=users)
    assert "1 id occurs in several rows of items.csv with different values, such as i2 with those of brand" in said
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
