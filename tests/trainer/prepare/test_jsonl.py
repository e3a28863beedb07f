import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reading import PROGRESS, actions_of, decoded, file_of, listed, prepared, titles

from logitmix.trainer.data.dataset import Dataset
from logitmix.trainer.data.engine import scratch
from logitmix.trainer.prepare import jsonl, text
from logitmix.trainer.prepare.jsonl import read_json
from logitmix.trainer.prepare.rejects import Rejects
from logitmix.trainer.prepare.sources.table import ColumnNames

LARGE = 2**53 + 1


def lines(*objects: Any) -> bytes:
    return "".join(json.dumps(each) + "\n" for each in objects).encode()


def of_lines(tmp_path: Path, content: bytes, **options: Any) -> tuple[Dataset, str]:
    return prepared(file_of(tmp_path, content, "in.jsonl"), **options)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_lines_are_read_or_listed(pack: Callable[[bytes], bytes], tmp_path: Path, rejects: Rejects) -> None:
    content = b"\n".join(
        [
            b'\xef\xbb\xbf{"user": {"id": "u"}, "item": %d, "timestamp": 3}' % LARGE,
            b'{"item": 2, "timestamp": 4.0, "user": {"id": "u", "age": 5}}',
            b"  ",
            b'{"user": {"id": null}, "item": 1, "timestamp": 5}',
            b'{"user": {}, "item": 1, "timestamp": 5}',
            b'{"user": {"id": "u"}, "timestamp": 5}',
            b'{"user": {"id": "u"}, "item": 1, "timestamp": "soon"}',
            b'{"user": {"id": "u"}, "item": 1, "timest',
            b"[1]",
            b"[" * 100_000,
            b'{"user": {"id": "\\ud800"}, "item": 1, "timestamp": 5}',
            b'{"user": {"id": "\xff"}, "item": 1, "timestamp": 5}',
            b'{"user": {"id": "u"}, "item": 0, "item": 1, "timestamp": 5}',
            b'{"user": {"id": "v"}, "item": 18446744073709551617, "timestamp": 6}',
            b'{"user": {"id": "v"}, "item": "x", "timestamp": 7, "\\ud800": 1}',
            b'{"user": {"id": "v"}, "item": "x", "timestamp": 8}',
        ]
    )
    names = ColumnNames(user="user.id")
    read = actions_of(file_of(tmp_path, pack(content)), rejects, names)
    assert read == [("u", str(LARGE), 3), ("u", "2", 4), ("v", "18446744073709551617", 6), ("v", "x", 8)]
    reasons = {int(number): reason.split(" is not a number")[0] for _, number, reason, _ in listed(rejects)}
    assert reasons == {
        4: "the user is empty",
        5: "the user is empty",
        6: "the item is empty",
        7: "the timestamp 'soon'",
        8: "not JSON in UTF-8",
        9: "not a JSON object",
        10: "not JSON in UTF-8",
        11: "not JSON in UTF-8",
        12: "not JSON in UTF-8",
        13: "has a key twice",
        15: "not JSON in UTF-8",
    }
    assert rejects.lines == 15


@pytest.mark.parametrize("block", [60, 1 << 20])
def test_types_may_change_from_block_to_block(
    block: int, tmp_path: Path, rejects: Rejects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "BLOCK_BYTES", block)
    values = [(None, []), (5, [1]), ("x", ["y", 1]), (2.5, None), (True, [None]), ("z", [2.5, "y", 2.5])]
    content = [
        {"user": "u", "item": at, "timestamp": at, "value": value, "list": of} for at, (value, of) in enumerate(values)
    ]
    expected = [[], ["1"], ["y", "1"], [], [], ["2.5", "y", "2.5"]]
    assert decoded(of_lines(tmp_path, lines(*content))[0], "event")["list"] == expected


def test_values_of_several_types_are_text(tmp_path: Path, rejects: Rejects) -> None:
    values = ["x", 1, 1.5, True, None, {"a": 1}, [1, "b"], "\ud800", 10**30]
    content = lines(*({"user": at, "value": value} for at, value in enumerate(values)))
    raw = read_json(file_of(tmp_path, content), lambda label, header: ["user"], rejects, PROGRESS, scratch())
    found = scratch().table(f"select {raw.columns['value']} as value from {raw.relation} where problem is null")
    expected = ["x", "1", "1.5", "true", None, '{"a":1}', '[1,"b"]', str(10**30)]
    assert found["value"].to_pylist() == expected and rejects.count == 0


OTTO = [
    {
        "session": 1,
        "events": [{"aid": 5, "ts": 10, "type": "see"}, {"aid": LARGE, "ts": 11, "type": "buy", "n": {"m": 1}}],
    },
    {"session": 2, "events": []},
    {"session": 3, "events": [{"aid": 5, "ts": 12, "type": "see", "n": {"m": 1}}, {"ts": 13}]},
    {"session": 4, "events": None, "other": [{"a": 1}], "more": {"other": [{"a": 1}]}},
    {"session": 5, "events": [{"aid": "x", "ts": 14.0, "type": "buy", "n": {"m": 2}}]},
]


@pytest.mark.parametrize(("block", "pack"), [(60, bytes), (1 << 20, gzip.compress)])
def test_events_of_sessions(
    pack: Callable[[bytes], bytes], block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "BLOCK_BYTES", block)
    names = {"user_column": "session", "item_column": "events.aid", "timestamp_column": "events.ts"}
    dataset, said = of_lines(tmp_path, pack(lines(*OTTO)), max_rejects=0.5, **names)
    assert said.splitlines()[:4] == [
        "in.jsonl: not read, as they are lists of objects, or objects of more than 50 keys: other, more.other",
        "in.jsonl:3: the item is empty",
        "3 rows have lists: read as 5 actions, each with its own events.aid, events.ts, events.type, events.n.m",
        "2 more rows have empty lists, such as in.jsonl:2",
    ]
    assert sorted(dataset.raw_ids()) == ["5", str(LARGE), "x"]
    assert dataset.timestamps_flat.tolist() == [10, 11, 12, 14]
    assert decoded(dataset, "event")["events_type"] == ["see", "buy", "see", "buy"]


def test_tables_of_items_and_users_may_be_json(tmp_path: Path) -> None:
    clicks = [{"user": f"u{at % 3}", "item": at % 4, "timestamp": at} for at in range(12)]
    items = [{"item": at, "title": f"T{at}", "maker": {"land": "NO" if at % 2 else "CH"}} for at in range(4)]
    users = [{"user": f"u{at}", "age": 30 + at} for at in range(3)]
    of_items = file_of(tmp_path, gzip.compress(lines(*items)), "items.json").path
    of_users = file_of(tmp_path, lines(*users), "users.ndjson").path
    dataset, _ = of_lines(tmp_path, lines(*clicks), items=of_items, users=of_users)
    assert titles(dataset) == ["T0", "T1", "T2", "T3"]
    assert decoded(dataset, "item") == {"maker_land": ["CH", "NO"] * 2}
    assert decoded(dataset, "user") == {"age": [30, 31, 32]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[{"user": 1}]', r"is a JSON array; write its elements one a line: jq -c '\.\[\]' in\.jsonl > lines\.jsonl"),
        (b'[\n  {"user": 1}\n]', "is a JSON array"),
        (b"[[1, 2]]", "is a JSON array"),
        (b'{\n  "user": 1\n}\n', r"is JSON with objects of several lines; write one a line: jq -c \. in\.jsonl > "),
        (b'{"user": 1,\n "item": 2}\n', "none of its lines is a JSON object; if its objects take several"),
        (b'{"who": 1, "item": {"id": 2}}', r"no column 'user'; there are: who, item\.id\. Name the right one with"),
    ],
)
def test_json_of_another_shape_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"^in\.jsonl: {message}"):
        of_lines(tmp_path, content)


def test_objects_with_many_keys_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MOST_KEYS", 2)
    content = [{"user": "u", "item": at, "timestamp": at, "more": {"a": "x", f"b{at}": at}} for at in range(5)]
    assert "objects of more than 2 keys: more\n" in of_lines(tmp_path, lines(*content))[1]


@pytest.mark.parametrize("begin", ["[", '{"a":', '[{"a":'])
@pytest.mark.parametrize("levels", [10, 40])
def test_deep_nesting_is_rejected(levels: int, begin: str, tmp_path: Path, rejects: Rejects) -> None:
    end = "".join({"[": "]", "{": "}"}.get(character, "") for character in reversed(begin))
    deep = f'"x": {begin * levels}1{end * levels}'
    content = '{"user": "u", "item": 1, "timestamp": 1}\n{"user": "u", "item": 1, "timestamp": 2, ' + deep + "}\n"
    read = actions_of(file_of(tmp_path, content.encode()), rejects)
    assert (len(read), rejects.count) == ((2, 0) if levels == 10 else (1, 1))
