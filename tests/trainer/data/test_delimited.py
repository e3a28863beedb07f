import bz2
import gzip
import lzma
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import pyarrow as pa
import pytest
from reading import PROGRESS, Action, actions, file_of, listed
from rich.console import Console
from rich.progress import Progress

from logitmix.trainer.data import delimited
from logitmix.trainer.data.delimited import Layout, line_blocks, read_delimited
from logitmix.trainer.data.files import InputFile
from logitmix.trainer.data.rejects import Rejects, TooManyRejects
from logitmix.trainer.data.sources import amazon
from logitmix.trainer.data.sources.movielens import RATINGS_CSV, RATINGS_DAT, U_DATA
from logitmix.trainer.data.sources.sequences import LINES

TWO = [("7", "30", 1000000007), ("8", "4", -5)]


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize(
    ("layout", "lines", "expected"),
    [
        (RATINGS_DAT, [b"7::30::5::1000000007", b"8::4::1::-5"], TWO),
        (U_DATA, [b"7\t30\t5\t1000000007", b"8\t4\t1\t-5.0"], TWO),
        (RATINGS_CSV, [b"userId,movieId,rating,timestamp", b"7,30,3.5,1000000007", b"8,4,1,-5"], TWO),
        (amazon.RATINGS, [b"7,30,5.0,1000000007", b"", b"8,4,1.0,-5"], TWO),
        (LINES, [b"7 30", b" 8\t 4 ", b"  ", b"7 4"], [("7", "30", 1), ("8", "4", 2), ("7", "4", 4)]),
    ],
)
def test_text_formats(
    layout: Layout, lines: list[bytes], expected: list[Action], end: bytes, last: bool, tmp_path: Path, rejects: Rejects
) -> None:
    content = end.join(lines) + (end if last else b"")
    assert actions(read_delimited(file_of(tmp_path, content), layout, rejects, PROGRESS)) == expected
    assert (rejects.count, rejects.lines) == (0, len(expected))


def test_lines_over_block_borders_keep_their_numbers(tmp_path: Path, rejects: Rejects) -> None:
    lines = [f"{number} {'x' * (number % 400)}i" for number in range(1, 50_001)]
    lines[25_000] = "one-field"
    content = "\n".join(lines).encode()
    assert len(content) > 2 * delimited.BLOCK_BYTES
    read = actions(read_delimited(file_of(tmp_path, content), LINES, rejects, PROGRESS))
    assert [user for user, _, _ in read] == [str(number) for number in range(1, 50_001) if number != 25_001]
    assert all(int(user) == line for user, _, line in read)
    assert listed(rejects) == [["in.txt", "25001", "has 1 field, not 2", "one-field"]]


def test_malformed_lines_are_named(tmp_path: Path, rejects: Rejects) -> None:
    content = b"1::2::3::4\r\n1::2::3\r\n1::2::3::2024-01-31\r\n1::\xff::3::4\r\n5::6::7::8"
    assert actions(read_delimited(file_of(tmp_path, content), RATINGS_DAT, rejects, PROGRESS)) == [
        ("1", "2", 4),
        ("5", "6", 8),
    ]
    assert (rejects.count, rejects.lines) == (3, 5)
    assert sorted(listed(rejects)) == [
        ["in.txt", "2", "has 3 fields, not 4", "1::2::3"],
        ["in.txt", "3", "the timestamp '2024-01-31' is not a number between -2^62 and 2^62", "1::2::3::2024-01-31"],
        ["in.txt", "4", "not UTF-8", r"1::\\xff::3::4"],
    ]


def test_another_format_is_noticed_before_the_end(tmp_path: Path) -> None:
    rejects = Rejects(tmp_path / "rejects.tsv", 0.5, Console(quiet=True))
    file = file_of(tmp_path, (b"1,2,3," + b"4" * 200 + b"\n") * 50_000)
    with pytest.raises(TooManyRejects, match=r"all of the first [\d,]+ lines are malformed; is it of another format"):
        actions(read_delimited(file, U_DATA, rejects, PROGRESS))
    rejects.close()
    assert 1_000 <= rejects.lines < 50_000


def test_a_line_without_an_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delimited, "LONGEST_LINE", 100)
    monkeypatch.setattr(delimited, "BLOCK_BYTES", 16)

    class Endless(InputFile):
        reads = 0

        @contextmanager
        def open(self, progress: Progress) -> Iterator[BinaryIO]:
            yield cast(BinaryIO, self)

        def read(self, size: int) -> bytes:
            type(self).reads += 1
            assert self.reads < 9
            return b"x" * size

    with pytest.raises(ValueError, match=r"^in\.txt:1: a line of more than 100 bytes; is this a text file\?"):
        list(line_blocks(Endless(Path("in.txt")), PROGRESS))


CODECS = {"zstd": lambda text: pa.compress(text, "zstd", asbytes=True), "bzip2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize(("name", "zipped"), [("zstd", False), ("zstd", True), ("bzip2", True), ("xz", True)])
def test_other_compressions_are_named(name: str, zipped: bool, tmp_path: Path, rejects: Rejects) -> None:
    content = CODECS[name](b"1 2\n" * 1000)
    file = file_of(tmp_path, content)
    if zipped:
        with zipfile.ZipFile(file.path, "w") as archive:
            archive.writestr("a.txt", content)
        file = InputFile(file.path, "a.txt")
    within = r", a\.txt" if zipped else ""
    problem = rf"in\.txt{within}: is compressed by {name}; decompress it first \({name} -d\)$"
    with pytest.raises(ValueError, match=problem):
        list(read_delimited(file, LINES, rejects, PROGRESS))


def test_files_of_other_kinds_are_named(tmp_path: Path, rejects: Rejects) -> None:
    with pytest.raises(ValueError, match=r"in\.txt: is a file of ORC; write it as Parquet or CSV$"):
        list(read_delimited(file_of(tmp_path, b"ORC\x0a\x00\x00\x01" * 9), LINES, rejects, PROGRESS))
    assert len(actions(read_delimited(file_of(tmp_path, b"ORC 2\n"), LINES, rejects, PROGRESS))) == 1


@pytest.mark.parametrize("name", ["bzip2", "xz"])
def test_bzip2_and_xz_are_read(name: str, tmp_path: Path, rejects: Rejects) -> None:
    content = b"".join(b"%d 2\n" % user for user in range(9_000))
    packed = CODECS[name](content[:20_000]) + CODECS[name](content[20_000:])
    read = actions(read_delimited(file_of(tmp_path, packed), LINES, rejects, PROGRESS))
    assert len(read) == 9_000
    second = len(CODECS[name](content[:20_000]))
    for broken in (packed[:-20], packed[:second] + b"damage" + packed[second + 6 :], packed + b"more"):
        with pytest.raises(ValueError, match=r"in\.txt: truncated or damaged \(.*\); fetch it again"):
            actions(read_delimited(file_of(tmp_path, broken), LINES, rejects, PROGRESS))


def test_the_bar_is_full_at_the_end_of_each_file(tmp_path: Path, rejects: Rejects) -> None:
    with zipfile.ZipFile(tmp_path / "in.zip", "w") as archive:
        archive.writestr("first.txt", b"1 2\n")
        archive.writestr("second.txt", b"1 2\n" * 1_000)
    progress = Progress(disable=True)
    for file in (InputFile(tmp_path / "in.zip", "first.txt"), file_of(tmp_path, gzip.compress(b"1 2\n" * 1_000))):
        assert actions(read_delimited(file, LINES, rejects, progress))
    assert [task.completed for task in progress.tasks] == [
        (tmp_path / name).stat().st_size for name in ("in.zip", "in.txt")
    ]
