"""A file of requests -> a file of answers, one JSON value per line."""

import json
import re
from collections.abc import Callable
from pathlib import Path

from logitmix.common.files import from_json, writing_whole
from logitmix.serving.request import Options, Request
from logitmix.serving.retriever import Retriever

TOGETHER = 256
"""Requests answered at once."""


def read_requests(path: Path) -> list[Request]:
    """One request per line: an object as `Retriever.recommend` takes it, or a list, the history. ValueError that names
    the line for anything else."""
    if not path.is_file():
        raise ValueError(f"no file at {path}; --histories must name one, with JSON in each line")
    requests: list[Request] = []
    for number, line in _lines(path).items():
        try:
            found = from_json(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from None
        if isinstance(found, list):
            requests.append({"history": found})
        elif isinstance(found, dict):
            requests.append(found)  # type: ignore[arg-type]
        else:
            raise ValueError(f"{path}, line {number}: it must be a list of ids, or an object with history")
    return requests


def _lines(path: Path) -> dict[int, str]:
    """Those that are not blank, by number."""
    text = path.read_text(encoding="utf-8-sig", errors="surrogateescape")
    return {number: line for number, line in enumerate(text.split("\n"), start=1) if line.strip()}


def at_line(problem: str, path: Path) -> str:
    """What is wrong with a request of a file, with its line in place of its number."""
    found = re.match(r"request (\d+)", problem)
    return f"{path}, line {[*_lines(path)][int(found[1])]}: the request{problem[found.end() :]}" if found else problem


def answer_file(
    retriever: Retriever,
    requests: list[Request],
    out: Path,
    options: Options,
    advance: Callable[[int], None] = lambda count: None,
) -> None:
    """Writes the answer of the retriever to each request, one list per line; the file appears complete or not
    at all. `advance` is called with the number of requests answered since its last call.

    Raises ValueError with the number of the request, from 0, that cannot be answered.
    """
    with writing_whole(out) as file:
        for start in range(0, len(requests), TOGETHER):
            part = requests[start : start + TOGETHER]
            for rows in retriever.answer(part, options, first=start):
                file.write(json.dumps(rows) + "\n")
            advance(len(part))
