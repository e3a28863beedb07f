import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from reading import actions_of, decoded, file_of, listed, parquet_of, prepared

from logitmix.trainer.data.engine import scratch
from logitmix.trainer.prepare.lists import split
from logitmix.trainer.prepare.rejects import Rejects

OF_USERS = {
    "user": ["u", "v", "w", "x", "y"],
    "item": [["a", "b"], ["b", "c", "a"], [], ["c"], None],
    "timestamp": [[1, 2], [3, 4], [], [5], [6]],
    "kind": [["buy", None], ["see", "see", "buy"], [], None, None],
}


@pytest.mark.parametrize("kind", [pa.list_, pa.large_list])
def test_a_row_with_a_list_of_items_is_an_action_for_each(kind: Any, tmp_path: Path, rejects: Rejects) -> None:
    of = {"item": pa.string(), "timestamp": pa.int32(), "kind": pa.string()}
    made = {name: pa.array(values, kind(of[name]) if name in of else None) for name, values in OF_USERS.items()}
    read = actions_of(parquet_of(tmp_path, made), rejects, more=["kind"])
    assert read == [("u", "a", 1, "buy"), ("u", "b", 2, None), ("x", "c", 5, None)]
    assert [line[1:3] for line in listed(rejects)] == [
        ["2", "timestamp has 2 values for 3 items"],
        ["5", "timestamp has 1 values for 0 items"],
    ]
    # 3 actions, two rows with a wrong number of times, and one without items.
    assert rejects.lines == 6


def test_lists_of_one_width_are_lists(tmp_path: Path, rejects: Rejects) -> None:
    items = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int64(), 2))
    file = parquet_of(tmp_path, {"user": ["u", "v", "w"], "item": items, "timestamp": [7, 8, 9]})
    read = actions_of(file, rejects)
    # One time for all: their order in the list counts.
    assert read == [("u", "1", 7), ("u", "2", 7), ("w", "3", 9), ("w", "4", 9)]


@pytest.mark.parametrize(
    ("separator", "text", "parts"),
    [
        ("|", "a|b", ["a", "b"]),
        ("|", "a|b|", ["a", "b"]),
        ("|", "a||b", ["a", "", "b"]),
        (" ", "  N1  N2\tN3 ", ["N1", "N2", "N3"]),
        (",", "[1, 2,3]", ["1", "2", "3"]),
        (",", "['it''s', \"x\"]", ["it''s", "x"]),
        (" ", "['a' 'b'\n 'c']", ["a", "b", "c"]),
        (",", "(4, 5)", ["4", "5"]),
        (",", "", None),
        (",", "[]", None),
        (".", "a.b", ["a", "b"]),
        ("::", "a::b", ["a", "b"]),
    ],
)
def test_texts_are_split(separator: str, text: str, parts: list[str] | None) -> None:
    scratch().put("texts", pa.table({"text": ["x", text, None]}))
    found = scratch().table(f"select {split('text', separator)} as parts from texts")
    assert found["parts"].to_pylist() == [["x"], parts, None]


def test_texts_of_users_are_read_with_a_separator(tmp_path: Path) -> None:
    """The session's number says nothing, and so it is no feature; the shop is one for all its actions."""
    rows = [f"{row},u{row},s{row % 2},{row}|{row + 1}|{row + 2},1|2|3,buy|see|see" for row in range(6)]
    rows += ["6,u6,s1,5,1,see", "7,u7,s1,5|6,1,see|see", "8,u8,s1,,,"]
    file = file_of(tmp_path, "\n".join(["session,user,shop,item,timestamp,kind", *rows]).encode(), "in.csv")
    dataset, said = prepared(file, list_separator="|", max_rejects=0.1)
    assert said.splitlines() == [
        "in.csv:9: timestamp has 1 values for 2 items",
        "7 rows have lists: read as 19 actions, each with its own item, timestamp, kind",
        "1 more rows have empty lists, such as in.csv:10",
        "not used, unless --schema FILE states a kind: session (nearly each row has its own value)",
    ]
    assert set(decoded(dataset, "event")) == {"kind", "shop"}
    assert decoded(dataset, "event")["kind"] == ["buy", "see", "see"] * 6 + ["see"]
    assert dataset.timestamps_flat.tolist() == [1, 2, 3] * 6 + [1]


def test_lists_that_look_like_lists_are_proposed(tmp_path: Path) -> None:
    rows = [f"u{row},{' '.join(f'N{row % 7 + at}' for at in range(5))},{row}" for row in range(40)]
    file = file_of(tmp_path, "\n".join(["user,item,timestamp", *rows]).encode(), "in.csv")
    note = "in.csv: item looks like lists ('N0 N1 N2 N3 N4'); if a row has several items, split them with "
    # Histories that come again are the ids of a few items.
    assert note not in prepared(file)[1]
    rows = [f"u{row},{' '.join(f'N{row * 3 % 40 + at}' for at in range(5))},{row}" for row in range(40)]
    file = file_of(tmp_path, "\n".join(["user,item,timestamp", *rows]).encode(), "in.csv")
    assert f'{note}--list-separator " "\n' in prepared(file)[1]
    assert "40 rows have lists: read as 200 actions" in prepared(file, list_separator=" ")[1]
    none = "no text of item has '|' in it (--list-separator): each is one item\n"
    assert none in prepared(file, list_separator="|")[1]


def test_other_lists_and_times_with_blanks_stay_whole(tmp_path: Path) -> None:
    tags = [["red", "new"], ["red"], ["new", "red"], ["red"]]
    items = [["a", "b", "c"], ["b", "c", "a"], ["a"], ["c", "a"]]
    file = parquet_of(tmp_path, {"user": ["u", "v", "w", "x"], "item": items, "timestamp": [1, 2, 3, 4], "tags": tags})
    expected = [part for part, of_row in zip(tags, items, strict=True) for _ in of_row]
    assert decoded(prepared(file)[0], "event")["tags"] == expected
    rows = ["u,a b c,2024-01-31 10:00:00", "v,c b,2024-01-31 10:00:01"]
    file = file_of(tmp_path, "\n".join(["user,item,timestamp", *rows]).encode(), "in.csv")
    assert "2 rows have lists: read as 5 actions, each with its own item\n" in prepared(file, list_separator=" ")[1]


def test_structs_are_columns_by_path(tmp_path: Path) -> None:
    events = [
        [{"aid": 1, "at": {"ts": 10}, "kind": "see"}, {"aid": 2, "at": {"ts": 11}, "kind": "buy"}],
        None,
        [{"aid": 1, "at": {"ts": 12}, "kind": "buy"}],
    ]
    who = [{"id": "u", "from": {"land": "NO"}}, {"id": "v", "from": None}, {"id": "w", "from": {"land": "CH"}}]
    file = parquet_of(tmp_path, {"who": who, "events": events, "more": events})
    names = {"user_column": "who.id", "item_column": "events.aid", "timestamp_column": "events.at.ts"}
    schema = tmp_path / "schema.toml"
    schema.write_text("[features.events_kind]\nkind = 'id'")
    dataset, _ = prepared(file, **names, schema=schema)
    assert decoded(dataset, "event") == {"events_kind": ["see", "buy", "buy"]}
    assert dataset.timestamps_flat.tolist() == [10, 11, 12]
    description = json.loads(dataset.description())
    assert description["read"] == {"users": 2, "items": 2, "actions": 3}
    with pytest.raises(ValueError, match=r"no column 'user'; there are: who\.id, who\.from\.land, events, events\.aid"):
        prepared(file)


def test_what_a_list_has_twice_is_no_duplicate(tmp_path: Path) -> None:
    """Its one time is the same for all, so their places tell them apart, and keep their order."""
    file = parquet_of(tmp_path, {"user": ["u"], "item": [["b", "a", "b"]], "timestamp": [7]})
    dataset, said = prepared(file)
    assert dataset.items_flat.tolist() == [1, 0, 1] and "equal" not in said
    assert json.loads(dataset.description())["times"]["tied_actions"] == 0
