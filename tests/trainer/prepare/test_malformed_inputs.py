"""Malformed input for `prepare`: every file of the corpus is read by rule, or reported with the file, the line and the
reason. There is no traceback, every line is either accepted or rejected, and nothing else is written."""

import gzip
import io
import json
import os
import re
import stat
import struct
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from folders import files_in
from rich.console import Console
from sampling import one_of_each

from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.prepare import prepare as preparing
from logitmix.trainer.prepare import text
from logitmix.trainer.prepare.config import PrepareOptions
from logitmix.trainer.prepare.rejects import Rejects

Files = dict[str, bytes]
Problem = tuple[str, int, str]
"""File, line and reason of a reject."""
LONGEST_LINE = 200_000
"""For the corpus."""
DAMAGED = r"truncated or damaged \(.*\); fetch it again"


@dataclass(frozen=True)
class Case:
    label: str
    name: str
    """Of the format."""
    files: Files
    """By path. The first one, or the folder that it is in, is the source."""
    said: str = ""
    """What the error says, as a regular expression; empty if the input is accepted."""
    rejects: tuple[Problem, ...] = ()
    actions: int = 6
    """Accepted."""
    side_rows: int = 0
    """Rows of side files that were accepted."""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Format:
    """A text format, with a way to write a line of it."""

    name: str
    file: str
    line: Callable[[bytes, bytes, bytes], bytes]
    header: bytes = b""
    fields: int = 4

    def lines(self, *more: bytes) -> list[bytes]:
        """The header, six good lines, and others between the first and the last three."""
        good = [
            self.line(user, item, str(100 * at).encode())
            for at, (user, item) in enumerate(zip((b"1", b"1", b"2", b"2", b"1", b"3"), b"456546", strict=True))
            for item in [bytes([item])]
        ]
        return [*([self.header] if self.header else []), *good[:3], *more, *good[3:]]

    def text(self, *more: bytes, end: bytes = b"\n") -> bytes:
        return b"".join(line + end for line in self.lines(*more))

    @property
    def at(self) -> int:
        """Number of the line after the first three good ones."""
        return 5 if self.header else 4


def review(user: bytes, item: bytes, time: bytes) -> bytes:
    return b'{"reviewerID": "%s", "asin": "%s", "unixReviewTime": %s}' % (user, item, time)


FORMATS = {
    "dat": Format("ml-1m", "ratings.dat", lambda user, item, time: b"%s::%s::3::%s" % (user, item, time)),
    "tabs": Format("ml-100k", "u.data", lambda user, item, time: b"%s\t%s\t3\t%s" % (user, item, time)),
    "csv": Format(
        "ml-latest",
        "ratings.csv",
        lambda user, item, time: b"%s,%s,3.5,%s" % (user, item, time),
        b"userId,movieId,rating,timestamp",
    ),
    "amazon": Format("amazon-books", "in.csv", lambda user, item, time: b"%s,%s,3.0,%s" % (user, item, time)),
    "reviews": Format("amazon-books", "in.json", review),
    "sequences": Format("sequences", "in.txt", lambda user, item, time: b"%s %s" % (user, item), fields=2),
    "table": Format("table", "in.csv", lambda *row: b",".join(row), b"user,item,timestamp", fields=3),
}


def whole_files() -> Iterator[Case]:
    """What can be wrong with a text as a whole."""
    for kind, of in FORMATS.items():
        good = of.text()

        def case(label: str, content: bytes, said: str = "", of: Format = of, kind: str = kind, **more: Any) -> Case:
            return Case(f"{kind}: {label}", of.name, {of.file: content}, said, **more)

        yield case("good", good)
        yield case("byte-order mark, gzip", gzip.compress(b"\xef\xbb\xbf" + good))
        yield case("CRLF", of.text(end=b"\r\n"))
        yield case("no line end at the end", good[:-1])
        yield case("blank lines", of.text(b"", b""))
        yield case("gzip", gzip.compress(good))
        for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32"):
            shown = encoding.upper().replace("16-", "16")
            said = rf"is {shown} text; for a table, give --encoding {shown}, else .*: iconv -f {shown} -t UTF-8$"
            yield case(encoding, good.decode().encode(encoding), said)
        yield case("blank", b"\n \n\n", "holds no actions|no column|starts with|malformed")
        yield case("truncated gzip", gzip.compress(good * 99, mtime=0)[:-40], "truncated or damaged")
        yield case("gzip without its end", gzip.compress(good, mtime=0)[:-8], "truncated or damaged")
        yield case("gzip with more after it", gzip.compress(good, mtime=0) + b"rubbish", "truncated or damaged")
        yield case("one long line", b"x" * (LONGEST_LINE + 1), rf"{of.file}:1: a line of more than")
        if kind != "table":
            yield case("a long line", of.text(b"x" * (LONGEST_LINE + 1)), rf"{of.file}:{of.at}: a line of more than")
        yield case("CR alone", of.text(end=b"\r"))
        yield case("NUL bytes", bytes(5_000), "malformed|no column|starts with|no actions")
        yield case("random bytes", bytes(range(1, 256)) * 9, "malformed|no column|starts with|no actions")
        columns = parquet(user=["a"], item=["b"], timestamp=[1])
        if kind == "table":
            yield case("Parquet", columns, actions=1)
        else:
            yield case("Parquet", columns, "malformed|starts with")


def parquet(**columns: Any) -> bytes:
    return written(pa.table(columns))


def named(*names: str) -> bytes:
    """A row of numbers in columns of these names."""
    return written(pa.table([[number] for number in range(len(names))], list(names)))


def written(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def lines() -> Iterator[Case]:
    """What can be wrong with a line. It is between good ones, which are read."""
    for kind, of in FORMATS.items():

        def case(label: str, line: bytes, *reasons: str, of: Format = of, kind: str = kind, **more: Any) -> Case:
            problems = tuple((of.file, of.at, reason) for reason in reasons)
            return Case(f"{kind}: {label}", of.name, {of.file: of.text(line)}, rejects=problems, **more)

        line = of.line
        json_line = kind == "reviews"
        nul = b"\\u0000" if json_line else b"\0"
        yield case("NUL in the user", line(b"1" + nul, b"4", b"7"), "the user has a NUL byte")
        yield case("NUL in the item", line(b"1", nul + b"4", b"7"), "the item has a NUL byte")
        yield case("not UTF-8 in the user", line(b"\xff", b"4", b"7"), "not UTF-8|not JSON in UTF-8")
        yield case("not UTF-8 in the item", line(b"1", b"\xc3", b"7"), "not UTF-8|not JSON in UTF-8")
        yield case("NUL bytes alone", bytes(9), "has 1 field, not|not JSON in UTF-8")
        yield case("CR", line(b"1", b"4", b"7") + b"\r" + line(b"1", b"5", b"8"), actions=8)
        if not json_line:
            delimiter = b" " if kind == "sequences" else line(b"", b"", b"")[-1:]
            yield case(
                "too many fields", line(b"1", b"4", b"7") + 2 * delimiter + b"9", rf"has \d fields, not {of.fields}"
            )
        if kind != "sequences":
            yield case("no user", line(b"", b"4", b"7"), "the user is empty")
            yield case("no item", line(b"1", b"", b"7"), "the item is empty")
            wrong = ["", "1.x" if json_line else " 1", "\uff11\uff12", str(2**62), "9" * 19, "-" + "9" * 19, "9" * 400]
            for time in ("NaN", "inf", "-Infinity", "1e999", "x", "0x10", "1_0", "+5", *wrong):
                reason = "is not a number|is missing|not JSON in UTF-8"
                yield case(f"time {time[:20]!r}", line(b"1", b"4", time.encode()), reason)
            fractions = [] if json_line else ["12.0", "1.5", "1.2e3"]
            for time in ("-5", "0", "-0", str(2**62 - 1), str(1 - 2**62), *fractions):
                yield case(f"time {time}", line(b"1", b"4", time.encode()), actions=7)


GOOD = {kind: of.text() for kind, of in FORMATS.items()}


def archive(
    files: Files, compression: int = zipfile.ZIP_DEFLATED, mode: int = 0, flags: int = 0, method: int | None = None
) -> bytes:
    """A zip; with another mode, flags or compression method in its directory than it was written with."""
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", compression) as made, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # names that are there twice
        for name, content in files.items():
            info = zipfile.ZipInfo(name.rstrip("~"), (2020, 1, 1, 0, 0, 0))
            info.external_attr, info.compress_type = (mode or stat.S_IFREG | 0o644) << 16, compression
            made.writestr(info, content)
    whole = bytearray(sink.getvalue())
    for signature, at in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        place = whole.index(signature) + at
        whole[place] |= flags & 0xFF
        whole[place + 1] |= flags >> 8
        if method is not None:
            whole[place + 2] = method
    return bytes(whole)


def archives() -> Iterator[Case]:
    """Zips of MovieLens. They are read in place, so nothing that they name is ever written."""
    good = GOOD["dat"]

    def case(label: str, content: bytes, said: str = "", **more: Any) -> Case:
        return Case(f"zip: {label}", "ml-1m", {"in.zip": content}, said, **more)

    random = np.random.default_rng(0).integers(0, 256, 3_000).astype(np.uint8).tobytes().hex().encode()
    for name, method in (("stored", 0), ("deflate", 8), ("bzip2", 12), ("lzma", 14)):
        yield case(name, archive({"x/ratings.dat": good}, method))
        content = bytearray(archive({"x/ratings.dat": random}, method))
        yield case(f"{name}, truncated", bytes(content[: len(content) // 2]), DAMAGED)
        content[2_000] ^= 1
        yield case(f"{name}, with a flipped bit", bytes(content), DAMAGED)
    yield case("with a password", archive({"ratings.dat": good}, flags=1), "truncated or damaged .*encrypted")
    yield case("of an unknown method", archive({"ratings.dat": good}, method=99), "truncated or damaged")
    yield case("leads out", archive({"../../ratings.dat": good}), r"member ../../ratings.dat is a link or leads out of")
    yield case("link", archive({"ratings.dat": b"/etc/passwd"}, mode=stat.S_IFLNK | 0o777), "is a link or leads out of")
    yield case(
        "folder of the name",
        archive({"ratings.dat/": b""}),
        r"there is no ratings\.dat in it; ml-1m needs the original zip, its folder or",
    )
    zipped = archive({"ratings.dat": good})
    yield case("ratings that are a zip", archive({"ratings.dat": zipped}), "malformed.*ratings.dat:1")
    yield case("bomb of one line", archive({"ratings.dat": bytes(40 << 20)}), r"ratings\.dat:1: a line of more than")
    yield case("bomb of lines", archive({"ratings.dat": b"::\n" * (1 << 16)}), "all of the first 1,000 lines are ")
    yield case("bomb of blank lines", archive({"ratings.dat": b"\n" * (1 << 22) + good}))
    unnamed = archive({"ratings.dat": good})
    yield case("name that is of no encoding", unnamed.replace(b"ratings.dat", b"ratings.d\xfft"), "there is no ratings")
    yield case("directory before the start", unnamed[:-6] + b"\xff" + unnamed[-5:], "truncated or damaged")
    lying = bytearray(archive({"ratings.dat": good * 9}))
    place = lying.index(b"PK\1\2") + 24
    lying[place : place + 4] = struct.pack("<I", 20)
    yield case("of another size than it says", bytes(lying), "truncated or damaged")


def side_files() -> Iterator[Case]:
    """Titles and users beside the ratings of MovieLens."""
    movies = b"movieId,title,genres\n4,One,Drama\n5,Two,Drama\n6,Three,Drama\n"
    movie, user = b"4::One (1999)::Drama\n", b"1::F::25::3::01234\n"
    for kind, file, content, side_rows, *problems in (
        ("csv", "movies.csv", movies, 3),
        ("csv", "movies.csv", movies + b'7,"a ""b""\n, c",Drama\n', 4),
        ("csv", "movies.csv", movies + b"7,a\n", 3, (5, "has 2 fields, not 3")),
        ("csv", "movies.csv", movies + b"7,\xff,b\n", 3, (5, "not UTF-8")),
        ("csv", "movies.csv", movies + b'7,"a"b,c\n', 3, (5, "not CSV")),
        ("csv", "movies.csv", b"", 0),
        ("dat", "movies.dat", movie + b"5::Two\n", 1, (2, "has 2 fields, not 3")),
        ("dat", "movies.dat", movie + b"5::\xff\x80::Drama\n", 2),
        ("dat", "users.dat", user + b"2::F::25::3::0::1\n", 1, (2, "has 6 fields, not 5")),
        ("tabs", "u.item", b"4|One\n", 0, (1, "has 2 fields, not 24")),
        ("tabs", "u.item", b"|".join([b"4"] * 24) + b"\n", 1),
    ):
        files = {f"x/{FORMATS[kind].file}": GOOD[kind], f"x/{file}": content}
        rejects = tuple((file, line, reason) for line, reason in problems)
        yield Case(f"{file}: {content[-20:]!r}", FORMATS[kind].name, files, "", rejects, side_rows=side_rows)


def metadata() -> Iterator[Case]:
    """--items of amazon."""
    first = b'{"asin": "4", "title": "One"}\n'

    def case(label: str, line: bytes, *reasons: str, side_rows: int = 1, said: str = "") -> Case:
        files = {"in.csv": GOOD["amazon"], "meta.json": first + line + b"\n"}
        rejects = tuple(("meta.json", 2, reason) for reason in reasons)
        return Case(f"metadata: {label}", "amazon-books", files, said, rejects, 6, side_rows, {"items": "meta.json"})

    yield case("a literal of Python", b"{'asin': '5', 'title': 'a\\d', 'price': 3.5}", side_rows=2)
    yield case("huge price", b'{"asin": "5", "price": 1' + b"0" * 400 + b"}", side_rows=2)
    yield case("price of lists", b'{"asin": "5", "price": [[]], "title": {}, "category": {"a": 1}}', side_rows=2)
    yield case("surrogates", b'{"asin": "5", "title": "\\ud800", "category": ["\\udfff"]}', side_rows=2)
    yield case("no asin", b'{"title": "x"}', "no asin that is text")
    yield case("asin is a number", b'{"asin": 5}', "no asin that is text")
    yield case("nested deeply", b"[" * 90_000, "nested too deeply|not JSON")
    yield case("nested deeply, of Python", b"(" * 90_000, "nested too deeply|not JSON")
    yield case("a call", b"__import__('os').getcwd()", "not JSON in UTF-8")
    yield case("UTF-8", b'{"asin": "\xff"}', "not JSON in UTF-8")


def reviews() -> Iterator[Case]:
    of = FORMATS["reviews"]

    def case(label: str, line: bytes, *reasons: str) -> Case:
        rejects = tuple((of.file, of.at, reason) for reason in reasons)
        return Case(f"review: {label}", of.name, {of.file: of.text(line)}, rejects=rejects, actions=7 - len(reasons))

    def made(**changes: Any) -> bytes:
        return json.dumps({"reviewerID": "1", "asin": "4", "unixReviewTime": 3, "overall": 5.0} | changes).encode()

    yield case("line end in a text", made(reviewText="a\nb\r"))
    yield case("huge rating", made(overall=10**400))
    yield case("user is missing", made(reviewerID=None), "the user is empty")
    yield case("time is true", made(unixReviewTime=True), "the timestamp 'true' is not a number")
    yield case("time is 2^62", made(unixReviewTime=2**62), "is not a number between -2.62 and 2.62")
    yield case("open", made()[:-1], "not JSON in UTF-8")
    yield case("nested deeply", b'{"a": ' * 30_000, "not JSON in UTF-8")


HEADER = "^ratings.csv: starts with '.*', not with the header userId,movieId,rating,timestamp$"


def amazon_ratings() -> Iterator[Case]:
    of = FORMATS["amazon"]
    quoted = of.text(b'"1","4",3.0,"7"')
    yield Case("amazon: quotes", of.name, {of.file: quoted}, actions=7)
    first_item = b"B0MADEUP17,A0000000000MARY,1.0,1300000005\n"
    yield Case("amazon: item first", of.name, {of.file: first_item}, "give it a header and prepare it as a table")
    ratings = FORMATS["csv"].text(b'"1","4",3.0,"7"')
    yield Case("csv: quotes", "ml-latest", {"ratings.csv": ratings}, actions=7)
    yield Case("csv: quoted header", "ml-latest", {"ratings.csv": b'"userId","movieId"\n'}, HEADER)
    for kind in ("amazon", "sequences", "reviews"):
        zipped = archive({"a": GOOD[kind]})
        yield Case(f"{kind}: zip", FORMATS[kind].name, {"in.zip": zipped}, "this format is one text file, plain or .gz")
    yield Case("table: zip", "table", {"in.zip": archive({"in.csv": GOOD["table"]})}, "is a zip")


def tables() -> Iterator[Case]:
    """CSV."""
    head, rows = b"user,item,timestamp,note\n", b"1,4,1,a\n2,5,2,b\n3,6,3,c\n"

    def case(
        label: str, content: bytes, *problems: tuple[int, str], said: str = "", actions: int = 3, **of: Any
    ) -> Case:
        rejects = tuple(("in.csv", line, reason) for line, reason in problems)
        return Case(f"csv: {label}", "table", {"in.csv": content}, said, rejects, actions, 0, of)

    yield case("quoted comma, quote and line end", head + b'9,7,5,"x, ""y""\nz"\n' + rows, actions=4)
    yield case("quoted ids", head + b'"9","a,b",5,x\n' + rows, actions=4)
    yield case("line end in an id", head + b'"9\n8",7,5,x\n' + rows, actions=4)
    yield case("open quote", head + rows + b'9,7,5,"x\n1,2,3,4\n', (5, "a quote opens that would"), actions=4)
    yield case("open quote of a text", head + rows + b'9,7,5,"x\nfor,y\n', (5, "a quote opens"), (6, "has 2 fields"))
    yield case("long field", head + b"9,7,5," + b"x" * 131_073 + b"\n" + rows, actions=4)
    yield case("long field in quotes", head + b'9,7,5,"' + b"x\n" * 70_000 + b'"\n' + rows, said="malformed")
    yield case("quote inside a field", head + b'9,7,5,x"y\n' + rows, actions=4)
    yield case("too few fields", head + b"9,7\n" + rows, (2, "has 2 fields, not 4"))
    yield case("too many fields", head + b"9,7,5,x,y\n" + rows, (2, "has 5 fields, not 4"))
    yield case("two columns of one name", b"user,item,timestamp,item\n" + rows, said="two columns named 'item'")
    yield case("no user column", b"who,item,timestamp,note\n" + rows, said="no column 'user'; there are: who, item")
    yield case("no header", rows, said="no column 'user'; there are: 1, 4, 1, a")
    yield case("column without a name", b",user,item,timestamp\n0,1,4,1\n1,2,5,2\n", actions=2)
    yield case("another delimiter", head + rows, said="no column 'user'; there are: user,item", delimiter=";")
    yield case("time of another calendar", head + b"9,7,2024-02-30,x\n" + rows, (2, "is not a number"))
    yield case("times of two kinds", head + b"9,7,2024-02-29,x\n" + rows, actions=4)
    yield case("year 10000", head + b"9,7,10000-01-01,x\n" + rows, (2, "is not a number"))
    yield case("title not UTF-8", b"user,item,timestamp,title\n9,7,5,\xff\n" + rows, (2, "not UTF-8"))
    for column, content, problem in (
        ("empty", b"", "^items.csv: has no columns; give a table with --items"),
        ("id twice", b"item,item\n4,5\n", "two columns named 'item'"),
        ("two features of one name", b"item,a b,a_b\n4,5,6\n", "would both be feature a_b"),
        ("UTF-16", "item,a\n4,5\n".encode("utf-16"), "is UTF-16 text"),
        ("zip", archive({"a": b"item\n"}), "is a zip"),
        ("one long line", b"x" * (LONGEST_LINE + 1), "a line of more than"),
        ("truncated gzip", gzip.compress(b"item,a\n4,5\n" * 99)[:-20], "truncated or damaged"),
        ("damaged Parquet", b"PAR1" + bytes(90) + b"PAR1", "not readable Parquet"),
    ):
        files = {"in.csv": GOOD["table"], "items.csv": content}
        yield Case(f"items: {column}", "table", files, problem, options={"items": "items.csv"})
    for column, content, problem in (
        ("id is empty", b"item,a\n4,5\n,6\n", "the id is empty"),
        ("id has a NUL", b"item,a\n4,5\n5\0,6\n", "the id has a NUL byte"),
        ("id is not UTF-8", b"item,a\n4,5\n\xff,6\n", "not UTF-8"),
        ("too few fields", b"item,a\n4,5\n5\n", "has 1 field, not 2"),
    ):
        files = {"in.csv": GOOD["table"], "items.csv": content}
        rejects = (("items.csv", 3, problem),)
        yield Case(f"items: {column}", "table", files, "", rejects, 6, 1, {"items": "items.csv"})
    for label, content, problem in (
        ("not TOML", b"[features", "schema.toml: not valid TOML"),
        ("not UTF-8", b"# \xff", "schema.toml: not valid TOML"),
        ("UTF-16", "[features]".encode("utf-16"), "schema.toml: not valid TOML"),
        ("NUL", b"\0", "schema.toml: not valid TOML"),
        ("unknown column", b"[features.x]\nkind = 'id'", "schema.toml: no column x; there are: note"),
        ("unknown key", b"[features.note]\nkinds = 'id'", r"schema.toml: unknown key .*kinds \(did you mean kind"),
        (
            "unknown kind",
            b"[features.note]\nkind = 'txt'",
            r"schema.toml: features\.note: its kind is 'txt' \(did you mean text\?\); it must",
        ),
        (
            "name of a table",
            b"[features.note]\nkind = 'id'\ntable = 'my notes'",
            "schema.toml: table 'my notes': a name",
        ),
        ("another type", b"features = 3", "schema.toml.*features"),
        ("kind that does not fit", b"[features.note]\nkind = 'vector'", "schema.toml: feature note"),
        ("byte-order mark", b"\xef\xbb\xbf[features.note]\nuse = false", ""),
        ("empty", b"", ""),
    ):
        files = {"in.csv": head + rows, "schema.toml": content}
        yield Case(f"schema: {label}", "table", files, problem, actions=3, options={"schema": "schema.toml"})


def parquet_tables() -> Iterator[Case]:
    def case(
        label: str, content: bytes, *problems: tuple[int, str], said: str = "", actions: int = 3, **options: Any
    ) -> Case:
        rejects = tuple(("in.parquet", line, reason) for line, reason in problems)
        return Case(f"parquet: {label}", "table", {"in.parquet": content}, said, rejects, actions, options=options)

    good: dict[str, Any] = {"user": ["1", "2", "3"], "item": [4, 5, 6], "timestamp": [1, 2, 3]}

    def of(**changes: Any) -> bytes:
        return parquet(**good | changes)

    def bad(*values: Any, kind: Any = None) -> pa.Array:
        return pa.array(values, kind)

    yield case("good", of())
    whole = of(note=["a", "b", "c"])
    yield case("truncated", whole[:-20], said="not readable Parquet")
    yield case("signatures alone", b"PAR1PAR1", said="not readable Parquet")
    yield case("footer of 4 GB", whole[:-8] + b"\xff\xff\xff\xff" + b"PAR1", said="not readable Parquet")
    yield case("name that is not UTF-8", of().replace(b"item", b"it\xffm"), said="not readable Parquet")
    yield case("encrypted", whole[:-4] + b"PARE", said="not readable Parquet")
    twins, features = (named(*good, *more) for more in (["item"], ["x", "x"]))
    yield case("two columns of one name", twins, said="two columns named 'item'; rename one")
    yield case("two features of one name", features, said="two columns named 'x'; rename one")
    yield case("no rows", parquet(**{name: pa.array([], pa.int64()) for name in good}), said="holds no actions")
    yield case("no item column", parquet(user=[1], timestamp=[1]), said="no column 'item'; there are: user, timestamp")
    for name, values in (
        ("numbers", bad(1.0, 2.0, 3.0)),
        ("bytes", bad(b"1", b"2", b"3")),
        ("truths", bad(True, False, True)),
    ):
        yield case(f"ids that are {name}", of(user=values))
    fractions = of(user=bad(1.0, 1.5, 3.0))
    yield case("ids that are fractions", fractions, (2, "the user 1.5 is not a whole number"), actions=2)
    for name, values in (
        ("lists", bad([1], [2], [3])),
        ("times", bad(1, 2, 3, kind=pa.timestamp("s"))),
        ("nothing", pa.nulls(3)),
    ):
        problem = r"^in\.parquet: column user is of type .*; ids must be integers or text"
        yield case(f"ids that are {name}", of(user=values), said=problem)
    rows = bad({"a": 1}, {"a": 2}, {"a": 3})
    yield case("ids that are rows", of(user=rows), said=r"no column 'user'; there are: user\.a, item, timestamp")
    yield case("ids that are missing", of(user=["1", None, ""]), (2, "user is empty"), (3, "user is empty"), actions=1)
    yield case("ids with NUL", of(user=["1", "2\0", "3"]), (2, "the user has a NUL byte"), actions=2)
    raw = pa.array([b"1", b"\xff", b"3"]).view(pa.string())
    lists = pa.ListArray.from_arrays([0, 1, 2, 3], raw)
    for name, values in (("texts", raw), ("views", raw.cast(pa.string_view())), ("lists", lists)):
        yield case(f"{name} that are not UTF-8", of(note=values), said="not readable .* is not valid UTF8")
    yield case("ids that are not UTF-8", of(user=raw), said="not readable .* is not valid UTF8")
    yield case("ids of a dictionary", of(user=pa.array(["1", "2", "2"]).dictionary_encode()))
    yield case("negative and large ids", of(item=bad(-(2**63), 0, 2**63 - 1)))
    yield case("unsigned ids", of(item=bad(0, 1, 2**64 - 1, kind=pa.uint64())))
    wrong = "is not a number between -2.62 and 2.62, nor a date"
    for name, values in (
        ("NaN", bad(1.0, float("nan"), 3.0)),
        ("infinite", bad(1.0, float("-inf"), 3.0)),
        ("huge", bad(1.0, 1e300, 3.0)),
        ("whole floats", bad(1.0, -(2.0**62), 3.0)),
        ("missing", bad(1, None, 3)),
        ("unsigned", bad(1, 2**64 - 1, 3, kind=pa.uint64())),
        ("large", bad(1, 2**62, 3)),
        ("largest", bad(1, 2**63 - 1, 3)),
        ("smallest", bad(1, -(2**63), 3)),
        ("texts", bad("1", "yesterday", "3")),
        ("days", bad(1, None, 3, kind=pa.date32())),
        ("endless", bad(1, 2**63 - 1, 3).view(pa.timestamp("ms"))),
    ):
        absent = "the timestamp is missing" if values.null_count else wrong
        yield case(f"times: {name}", of(timestamp=values), (2, absent), actions=2)
    for name, values in (
        ("small", bad(1, -5, 100, kind=pa.int8())),
        ("fractions", bad(1.0, 1.5, 3.0)),
        ("half floats", bad(1.0, 1.5, 3.0, kind=pa.float16())),
        ("decimals", bad(1, 2, 3, kind=pa.decimal128(5, 0))),
        ("near the limit", bad(2**62 - 1, 1 - 2**62, 0)),
        ("milliseconds of timestamps", bad(1, 2**53, 3).view(pa.timestamp("ms"))),
        ("nanoseconds", bad(1, 2**62, -5).view(pa.timestamp("ns"))),
        ("days", bad(1, 2**20, -5, kind=pa.date32())),
        ("milliseconds", bad(1, 2, 86_400_000 * 9, kind=pa.date64())),
    ):
        yield case(f"times: {name}, accepted", of(timestamp=values))
    for name, values in (
        ("truths", bad(True, False, True)),
        ("lists", bad([1], [2], [3])),
        ("times of day", bad(1, 2, 3, kind=pa.time32("s"))),
        ("nothing", pa.nulls(3)),
    ):
        yield case(f"times: {name}", of(timestamp=values), said="^in.parquet: column timestamp is of type .*; times")
    for name, values in (
        ("rows", bad({"a": 1}, {"a": 2}, {"a": 3})),
        ("maps", bad([("a", 1)], [], [], kind=pa.map_(pa.string(), pa.int64()))),
        ("bytes", bad(b"\xff", b"", None)),
        ("lists of lists", bad([[1]], [[2]], None)),
        ("nothing", pa.nulls(3)),
        ("durations", bad(1, 2, 3, kind=pa.duration("s"))),
        ("decimals", bad(1, 2, 3, kind=pa.decimal128(38, 0))),
        ("numbers that are none", bad(float("nan"), float("inf"), 1e300)),
        ("empty lists", bad([], [], [], kind=pa.list_(pa.float32()))),
        ("vectors of two widths", bad([1.0], [1.0, 2.0], None)),
        ("vectors", bad([1.0, None], [1.0, float("nan")], None)),
    ):
        yield case(f"feature of {name}", of(note=values))


CORPUS = [
    *whole_files(), *lines(), *archives(), *side_files(), *metadata(), *reviews(), *amazon_ratings(), *tables(),
    *parquet_tables(),
]  # fmt: skip


class Counted(Rejects):
    made: list["Counted"] = []  # noqa: RUF012

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.made.append(self)


def put(folder: Path, files: Files) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder / next(iter(files)).partition("/")[0]


def attempt(case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, dict[str, Any], list[list[str]]]:
    monkeypatch.setattr(text, "LONGEST_LINE", LONGEST_LINE)
    monkeypatch.setattr(preparing, "Rejects", Counted)
    source = put(folder / "in", case.files)
    before = files_in(folder)
    out = folder / "made" / "out"
    options: dict[str, Any] = {"min_user_actions": 1, "max_rejects": 0.9} | case.options
    options |= {name: str(folder / "in" / options[name]) for name in ("items", "schema") if name in options}
    try:
        given = PrepareOptions(case.name, str(source), str(out), **options)
        description, said = preparing.prepare(given, Console(quiet=True)), ""
    except ValueError as error:
        description, said = {}, str(error)
    rejects = Counted.made.pop() if Counted.made else None
    after = files_in(folder)
    listing = after.get("made/out/rejects.tsv" if not said else "made/out.rejects.tsv", b"").decode()
    rows = [row.split("\t") for row in listing.split("\n")[1:-1]]
    written = {name for name in after if name not in before}
    assert before.items() <= after.items()
    assert "\n" not in said
    if said:
        assert written <= {"made/out.rejects.tsv"}
    else:
        assert all(name.startswith("made/out/") for name in written)
        load_dataset(out)
        assert rejects and description["rejected_lines"] == rejects.count
        assert rejects.lines == description["read"]["actions"] + case.side_rows + rejects.count
    return said, description, rows


DELIMITED = {"dat", "tabs", "csv", "amazon", "sequences"}
"""One reader reads these."""


def kind(case: Case) -> tuple[str, str]:
    """What is wrong, for which reader."""
    of, _, wrong = case.label.partition(": ")
    return "delimited" if of in DELIMITED else of, wrong


@pytest.mark.parametrize("case", one_of_each(CORPUS, kind), ids=lambda case: case.label)
def test_malformed_input_is_read_by_rule_or_reported(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, description, rows = attempt(case, tmp_path, monkeypatch)
    if case.said:
        assert re.search(case.said, said), said or description
        named = {*(Path(name).name for name in case.files), "ratings.dat", "movies.dat", "columns "}
        assert any(name in said for name in named), said
        return
    assert not said
    assert description["read"]["actions"] == case.actions
    assert case.actions != 6 or (description["users"], description["items"]) == (3, 3)
    assert len(rows) == len(case.rejects) == description["rejected_lines"], rows
    for row, (file, line, reason) in zip(rows, case.rejects, strict=True):
        assert (row[0], row[1]) == (file, str(line))
        assert re.search(reason, row[2]), row[2]


def refused(name: str, source: Path, out: Path, said: str, **options: Any) -> None:
    before = sorted(out.parent.rglob("*"))
    with pytest.raises(ValueError, match=said):
        preparing.prepare(PrepareOptions(name, str(source), str(out), **options), Console(quiet=True))
    assert sorted(out.parent.rglob("*")) == before


@pytest.mark.parametrize("kind", ["folder", "pipe", "broken link"])
def test_what_has_the_name_of_the_file_but_is_none(kind: str, tmp_path: Path) -> None:
    """A pipe would be waited for without an end."""
    for name, file in (("ml-1m", "ratings.dat"), ("table", "part-0.parquet")):
        place = tmp_path / name / file
        place.parent.mkdir()
        if kind == "folder":
            place.mkdir()
        elif kind == "pipe":
            os.mkfifo(place)
        else:
            place.symlink_to(tmp_path / "nothing")
        refused(name, place.parent, tmp_path / "out", r"there is no ratings\.dat in it|no \.parquet, \.csv")


@pytest.mark.parametrize("name", ["ml-1m", "amazon-beauty", "table", "sequences"])
def test_a_source_that_is_a_pipe(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused(name, tmp_path / "pipe", tmp_path / "out", "pipe is a pipe, not a file")
    if name == "table":
        (tmp_path / "in.csv").write_bytes(GOOD["table"])
        refused(name, tmp_path / "in.csv", tmp_path / "out", "pipe is a pipe", items=str(tmp_path / "pipe"))


def test_files_that_are_folders(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_bytes(GOOD["table"])
    (tmp_path / "folder").mkdir()
    refused("sequences", tmp_path / "folder", tmp_path / "out", "this format is one text file")
    refused("table", tmp_path / "in.csv", tmp_path / "out", "no file at .*folder", schema=str(tmp_path / "folder"))


@pytest.mark.parametrize("within", ["", "parts"])
def test_names_that_are_not_utf_8(within: str, tmp_path: Path) -> None:
    file = tmp_path / within / os.fsdecode(b"caf\xe9.csv")
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(FORMATS["table"].text(b"only"))
    options = PrepareOptions(
        "table", str(tmp_path / within if within else file), str(tmp_path / "out"), min_user_actions=1, max_rejects=0.9
    )
    source = preparing.prepare(options, Console(quiet=True))["source"]
    assert source["name"] == (within or "caf\\udce9.csv") and list(source["sha256"]) == ["caf\\udce9.csv"]
    assert "caf\\udce9.csv\t5\thas 1 field, not 3" in (tmp_path / "out" / "rejects.tsv").read_text()


def measured(of: Format, source: Path, out: Path) -> tuple[int, str]:
    """The most memory of a process that prepares the source, in bytes, and what it refuses."""
    program = Path(__file__).with_name("measured_prepare.py")
    words = [sys.executable, str(program), of.name, str(source), str(out)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=200)
    peak, said, *_ = done.stdout.split("\n")
    return int(peak), said


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Memory for a tiny source: the program and its libraries."""
    folder = tmp_path_factory.mktemp("usual")
    peak, said = measured(FORMATS["table"], put(folder, {"in.csv": GOOD["table"]}), folder / "out")
    assert not said and peak < 200 << 20
    return peak


BLOCKS = 32 << 20
"""Bytes for a block of 4 MiB, and what is made of it."""
LONG = [("sequences", 10), ("table", 10)]
LONG_OF_ALL = [pytest.param(kind, size, marks=pytest.mark.slow) for kind in FORMATS for size in (15, 100)]


@pytest.mark.parametrize(("kind", "size"), [*LONG, *LONG_OF_ALL])
def test_memory_for_a_long_line(kind: str, size: int, usual: int, tmp_path: Path) -> None:
    """Of so many MB. What is read has up to 12 copies, among them the fields and the text of the reject; what is longer
    than 16 MiB is refused once so much of it is there, with the copy that it is added to."""
    of, refused = FORMATS[kind], size > 16
    content = of.text(b"x" * (size * 1_000_000))
    source = put(tmp_path, {of.file: gzip.compress(content, 1) if refused else content})
    peak, said = measured(of, source, tmp_path / "out")
    assert said == (f"{of.file}:{of.at}: a line of more than 16 MiB; is this a text file?" if refused else "")
    assert peak - usual < (2 * (16 << 20) if refused else 12_000_000 * size) + BLOCKS


def repeated(megabytes: int, what: bytes) -> bytes:
    """In gzip, of which each MiB has 1 KiB."""
    return gzip.compress(what * ((1 << 20) // len(what))) * megabytes


BOMBS: dict[str, tuple[str, str, Callable[[], bytes], str]] = {
    "zip of one line": ("dat", "in.zip", lambda: archive({"ratings.dat": bytes(100 << 20)}), "a line of more than"),
    "one line": ("dat", "ratings.dat", lambda: repeated(1000, b"\0"), "a line of more than"),
    "blank lines": ("dat", "ratings.dat", lambda: repeated(200, b"\n"), "holds no actions"),
    "blank lines of a table": ("table", "in.csv", lambda: gzip.compress(GOOD["table"]) + repeated(200, b"\n"), ""),
    "an open quote": (
        "table",
        "in.csv",
        lambda: gzip.compress(GOOD["table"] + b'"') + repeated(200, b"\n"),
        "",
    ),
    "malformed lines": ("dat", "ratings.dat", lambda: repeated(200, b"::\n"), "are malformed"),
}


@pytest.mark.parametrize(
    "label", [*list(BOMBS)[:1], *(pytest.param(of, marks=pytest.mark.slow) for of in list(BOMBS)[1:])]
)
def test_memory_for_a_bomb(label: str, usual: int, tmp_path: Path) -> None:
    """As for a long line, or for a block of 4 MiB with as many lines, whatever their number is."""
    kind, name, content, expected = BOMBS[label]
    peak, said = measured(FORMATS[kind], put(tmp_path, {name: content()}), tmp_path / "out")
    assert expected in said and bool(said) == bool(expected)
    assert peak - usual < 256 << 20
