"""Malformed lines: shown, written to a file, counted."""

from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console

from logitmix.common.messages import tell

SHOWN = 5
ENOUGH_TO_JUDGE = 1000


class TooManyRejects(ValueError):
    """More malformed lines than `max_rejects` allows."""


class Rejects:
    """Collects malformed lines in a tab-separated file: file, line, reason, text.

    The file starts with the first reject. Tabs, line ends, backslashes and undecodable bytes of the text are escaped,
    so that each reject is one line. Rows of a Parquet file are counted from 1.
    """

    def __init__(self, path: Path, max_share: float, console: Console) -> None:
        self.path = path
        self.max_share = max_share
        self.console = console
        self.count = 0
        self.lines = 0
        """Lines read so far, including malformed ones."""
        self._file: TextIO | None = None
        self._first = ""
        self._said: set[str] = set()

    def add(self, file: str, line: int, reason: str, text: str | bytes) -> None:
        if self._file is None:
            self._file = self.path.open("w", encoding="utf-8", newline="\n")
            self._file.write("file\tline\treason\ttext\n")
        self.count += 1
        self._file.write(f"{file}\t{line}\t{_escape(reason)}\t{_escape(text)}\n")
        problem = f"{file}:{line}: {_escape(reason)}"
        self._first = self._first or problem
        if self.count <= SHOWN:
            self.say(problem)

    def stop_early(self, file: str, first: Sequence[tuple[int, str | None, str]]) -> None:
        """Raises TooManyRejects if none of the first lines of a file, each with its number, reason and text, could be
        read: that is another format, not a few bad lines."""
        if len(first) < ENOUGH_TO_JUDGE or self.max_share == 1:
            return
        wrong = [(line, reason, text) for line, reason, text in first if reason]
        if len(wrong) == len(first):
            for line, reason, text in wrong:
                self.add(file, line, reason, text)
            raise TooManyRejects(
                f"{file}: all of the first {len(wrong):,} lines are malformed; is it of another format?"
            )

    def finish(self) -> None:
        """Raises TooManyRejects if the share of malformed lines is above the limit."""
        self.close()
        if self.count > SHOWN:
            self.say(f"… and {self.count - SHOWN:,} more malformed lines")
        if self.count and self.count / self.lines > self.max_share:
            raise TooManyRejects(
                f"{self.count:,} of {self.lines:,} lines are malformed, above --max-rejects {self.max_share:g}; "
                f"the first is {self._first}"
            )

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def say_once(self, message: str) -> None:
        """Prints one line, unless that line was printed before, of another part."""
        if message not in self._said:
            self._said.add(message)
            self.say(message)

    def say(self, message: str) -> None:
        """Prints one line."""
        tell(self.console, message, "yellow")


def _escape(text: str | bytes) -> str:
    plain = text.decode("utf-8", "backslashreplace") if isinstance(text, bytes) else text
    plain = plain.rstrip("\r\n").replace("\\", "\\\\")
    for character, escaped in (("\t", "\\t"), ("\n", "\\n"), ("\r", "\\r")):
        plain = plain.replace(character, escaped)
    return plain.encode("utf-8", "backslashreplace").decode()
