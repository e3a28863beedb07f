"""Tables as spreadsheets and databases write them: Excel's line sep=;, quotes after backslashes, other encodings than
UTF-8, and UUIDs as 16 bytes."""

import codecs
import gzip
import io
import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROWS = ["u1;a,1;5", "u1;b;6", "u2;a,1;7"]
ACTIONS = {"u1": [("a,1", 5), ("b", 6)], "u2": [("a,1", 7)]}


@pytest.mark.parametrize("first", ["sep=;", '"sep=;"', "SEP=;"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_the_line_that_tells_the_delimiter(prepared: Callable[..., Any], first: str, end: str) -> None:
    """Lines are counted with it."""
    found = prepared(end.join([first, "user;item;timestamp", *ROWS, "short", ""]), max_rejects=1.0)
    assert found.actions == ACTIONS and "clicks.csv:6: has 1 field, not 3" in found.said
    found = prepared(end.join([first, *ROWS, ""]), columns="user,item,timestamp")
    assert found.actions == ACTIONS
    # --delimiter is what counts.
    found = prepared(end.join([first, "user|item|timestamp", *(row.replace(";", "|") for row in ROWS)]), delimiter="|")
    assert found.actions == ACTIONS


def test_any_delimiter_may_be_told(prepared: Callable[..., Any]) -> None:
    text = "\n".join(["sep=^", "user^item^timestamp", *(row.replace(";", "^") for row in ROWS)])
    assert prepared(text).actions == ACTIONS


@pytest.mark.parametrize("rows", [3, 100_000])
def test_quotes_after_backslashes(prepared: Callable[..., Any], rows: int) -> None:
    r"""Where rows are whole only then, \" is a quote; other backslashes stay. Titles may have line ends."""
    lines = [f'u{n % 50},"i{n % 9}",{n},"plain, {n % 9}"' for n in range(rows)]
    lines += [r'u1,x,1,"say \"hi\", you"', r'u1,y,2,"C:\dir"', 'u2,z,3,"two\n\\"lines\\""', r'u2,w,4,"the end \\"']
    found = prepared("\n".join(["user,item,timestamp,title", *lines]) + "\n")
    assert found.description["rejected_lines"] == 0 and found.description["read"]["actions"] == len(lines)
    assert "quotes within fields are taken for escaped by backslashes" in found.said
    column = found.dataset.title_column()
    titles = dict(zip(found.dataset.raw_ids(), column.to_pylist(), strict=True))
    expected = {"x": 'say "hi", you', "y": r"C:\dir", "z": 'two\n"lines"', "w": r"the end \\"}
    assert {item: titles[item] for item in expected} == expected and titles["i1"] == "plain, 1"


def test_backslashes_before_closing_quotes_stay(prepared: Callable[..., Any]) -> None:
    lines = [rf'u1,i{n},{n},"C:\dir\{n}\"' for n in range(9)]
    found = prepared("\n".join(["user,item,timestamp,title", *lines]) + "\n")
    assert found.dataset.title_column().to_pylist() == [rf"C:\dir\{n}" + "\\" for n in range(9)]
    assert "backslashes" not in found.said.partition("read ")[0]


NAMES = {"latin-1": "Zoë", "cp1252": "café: 5 €", "utf-16": "Ångström 🚲", "utf-16-le": "日本", "shift_jis": "日本語"}


@pytest.mark.parametrize("encoding", NAMES)
@pytest.mark.parametrize("packed", [False, True])
def test_text_of_another_encoding(prepared: Callable[..., Any], tmp_path: Path, encoding: str, packed: bool) -> None:
    """Of all tables that are given, however they are compressed."""
    name = NAMES[encoding]

    def pack(text: str) -> bytes:
        return gzip.compress(text.encode(encoding)) if packed else text.encode(encoding)

    (tmp_path / "items").write_bytes(pack(f"item,title\n{name},of {name}\n"))
    content = pack(f"user,item,timestamp\r\nu {name},{name},5\r\n" + f"u,{name},6\r\n" * 20_000)
    found = prepared(content, encoding=encoding, items=tmp_path / "items")
    assert found.actions == {f"u {name}": [(name, 5)], "u": [(name, 6)]}
    assert found.dataset.title_column().to_pylist() == [f"of {name}"]
    rows = [{"user": "u", "item": name, "timestamp": n} for n in range(3)]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    assert prepared(pack(lines), encoding=encoding).actions == {"u": [(name, n) for n in range(3)]}


def test_bytes_that_no_character_has_are_malformed(prepared: Callable[..., Any]) -> None:
    content = b"user,item,timestamp\nu,caf\xe9,5\nu,\x81,6\n"
    found = prepared(content, encoding="cp1252", max_rejects=1.0)
    assert found.actions == {"u": [("café", 5)]} and "clicks.csv:3: not UTF-8" in found.said


def test_what_is_of_no_such_encoding_is_refused(prepared: Callable[..., Any], refusal: Callable[..., str]) -> None:
    text = "user,item,timestamp\nu,i,5\n"
    with pytest.raises(ValueError, match=r"clicks\.csv: is UTF-16 text; for a table, give --encoding UTF-16, else"):
        prepared(text.encode("utf-16"))
    with pytest.raises(ValueError, match=r"clicks\.csv: truncated or damaged \(.*illegal"):
        prepared(codecs.BOM_UTF16_LE + text.encode("utf-16-le") + b"\x00\xdc\x00\xdc", encoding="utf-16")
    for wrong in ("latin-99", "hex"):
        said = refusal("prepare", "table", "--source", "clicks.csv", "--encoding", wrong)
        assert (
            said
            == f"logitmix: --encoding is '{wrong}'; it must be the name of an encoding, such as latin-1 or utf-16\n"
        )
    assert "ml-1m takes no --encoding; leave it out" in refusal("prepare", "ml-1m", "--encoding", "latin-1")


def parquet(**columns: pa.Array) -> bytes:
    stream = io.BytesIO()
    pq.write_table(pa.table(columns), stream)
    return stream.getvalue()


@pytest.mark.parametrize("kind", [pa.uuid(), pa.binary(16)])
def test_uuids_are_read_as_they_are_written(prepared: Callable[..., Any], kind: pa.DataType) -> None:
    """As ids, and as values of a feature."""
    known = [uuid.UUID(int=2**127 + 2**64 * n + 255) for n in range(5)]
    rows = [(known[n % 2], known[2 + n % 3], known[n % 2]) for n in range(12)]
    users, items, values = (pa.array([of.bytes for of in column], kind) for column in zip(*rows, strict=True))
    found = prepared(parquet(user=users, item=items, timestamp=pa.array(range(12)), brand=values), "clicks.parquet")
    expected = {str(known[user]): [(str(known[2 + n % 3]), n) for n in range(user, 12, 2)] for user in range(2)}
    assert found.actions == expected and found.features == {"brand": "id"}
    assert found.dataset.vocabulary("brand") == ["", *sorted(map(str, known[:2]))]


def test_a_missing_uuid_is_a_missing_id(prepared: Callable[..., Any]) -> None:
    user = uuid.uuid5(uuid.NAMESPACE_DNS, "a")
    users = pa.array([user.bytes, None, user.bytes], pa.binary(16))
    content = parquet(user=users, item=pa.array(["a", "b", "c"]), timestamp=pa.array([1, 2, 3]))
    found = prepared(content, "clicks.parquet", max_rejects=1.0)
    assert found.actions == {str(user): [("a", 1), ("c", 3)]} and found.description["rejected_lines"] == 1


def test_16_bytes_of_text_are_text(prepared: Callable[..., Any]) -> None:
    users = pa.array([f"user-{n:011}".encode() for n in range(4)], pa.binary(16))
    found = prepared(parquet(user=users, item=pa.array(["a"] * 4), timestamp=pa.array(range(4))), "clicks.parquet")
    assert sorted(found.actions) == [f"user-{n:011}" for n in range(4)]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le", "utf-16"])
def test_a_byte_order_mark_is_no_part_of_the_header(prepared: Callable[..., Any], encoding: str) -> None:
    mark = "" if encoding == "utf-16" else "\ufeff"
    text = (mark + "\n".join(["user;item;timestamp", *ROWS])).encode(encoding)
    assert prepared(text, encoding=encoding).actions == ACTIONS


@pytest.mark.parametrize("module", ["bz2", "lzma"])
def test_a_damaged_second_stream_is_not_the_end(prepared: Callable[..., Any], module: str) -> None:
    compress = __import__(module).compress
    first, second = ("\n".join(rows).encode() for rows in (["user;item;timestamp", *ROWS, ""], ROWS))
    assert prepared(compress(first) + compress(second)).actions.keys() == ACTIONS.keys()
    damaged = bytearray(compress(second))
    damaged[2] ^= 1
    with pytest.raises(ValueError, match="truncated or damaged"):
        prepared(compress(first) + bytes(damaged))


def test_a_stray_quote_between_letters_swallows_no_rows(prepared: Callable[..., Any]) -> None:
    rows = [f"{'abcdefghij'[n % 10]}{'klmno'[n // 10 % 5]};{'pqrst'[n % 5]}" for n in range(60)]
    rows[3], rows[40] = '"' + rows[3], rows[40] + '"'
    found = prepared("\n".join(["user;item", *rows]), timestamp_column="", max_rejects=1.0, keep_duplicates=True)
    assert sum(map(len, found.actions.values())) >= 58 and "quote" in found.said


def test_long_numbers_beside_fractions_keep_their_digits(prepared: Callable[..., Any]) -> None:
    lines = [
        {"user": f"u{n % 20}", "item": f"i{n % 9}", "timestamp": n, "brand": 0.5 if n == 3 else 10**23 + n % 7}
        for n in range(200)
    ]
    said = prepared("\n".join(map(json.dumps, lines)), name="clicks.jsonl").said
    assert "all values are the same" not in said
