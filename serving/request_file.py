"""A file of requests -> a file of answers, one JSON value per line."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from logitmix.common.files import from_json, writing_whole
from logitmix.common.messages import prefixed
from logitmix.serving.request import Request
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
        with prefixed(f"{path}, line {number}: not JSON: "):
            found = from_json(line)
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


def answer_file(
    retriever: Retriever,
    requests: list[Request],
    out: Path,
    defaults: Mapping[str, Any],
    advance: Callable[[int], None] = lambda count: None,
) -> dict[int, str]:
    """Writes the answers of a retriever, one JSON object per line; the file appears complete or not at all.

    Args:
        retriever: What answers.
        requests: What is asked.
        out: The file to write.
        defaults: The options of requests that do not say, as of `Question.of`.
        advance: Called with the number of requests answered since its last call.

    Returns:
        By number of a request, from 0, why it cannot be answered; its line has that as `error`.
    """
    problems = {}
    with writing_whole(out) as file:
        for start in range(0, len(requests), TOGETHER):
            part = requests[start : start + TOGETHER]
            for number, answer in enumerate(retriever.ask(part, defaults), start):
                file.write(json.dumps(answer) + "\n")
                if "error" in answer:
                    problems[number] = answer["error"]
            advance(len(part))
    return problems


def line_of(number: int, path: Path) -> int:
    """The line of a file of requests that has the request with this number, from 0."""
    return [*_lines(path)][number]
