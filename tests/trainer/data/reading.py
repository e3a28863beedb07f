"""What the tests of readers share."""

from collections.abc import Iterator
from pathlib import Path

from rich.progress import Progress

from logitmix.trainer.data.files import InputFile
from logitmix.trainer.data.raw import ActionBlock
from logitmix.trainer.data.rejects import Rejects

Action = tuple[str, str, int]
PROGRESS = Progress(disable=True)


def listed(rejects: Rejects) -> list[list[str]]:
    """File, line, reason and text of every reject."""
    rejects.close()
    header, *lines = rejects.path.read_text(encoding="utf-8").split("\n")[:-1]
    assert header == "file\tline\treason\ttext"
    return [line.split("\t") for line in lines]


def actions(blocks: Iterator[ActionBlock]) -> list[Action]:
    read: list[Action] = []
    for block in blocks:
        read += zip(block.users.to_pylist(), block.items.to_pylist(), block.timestamps.tolist(), strict=True)
    return read


def file_of(tmp_path: Path, content: bytes, name: str = "in.txt") -> InputFile:
    (tmp_path / name).write_bytes(content)
    return InputFile(tmp_path / name)
