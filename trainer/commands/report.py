"""`logitmix report`: which run is best, and the runs' curves, metrics and settings, as one HTML page."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from logitmix.common.messages import show
from logitmix.common.storage import fetch_run
from logitmix.trainer.commands.options import importing
from logitmix.trainer.commands.words import parse


@dataclass(frozen=True)
class Arguments:
    """Which of the runs is best at the metric, and their curves, metrics and settings, as one HTML page that needs no
    network. Seeds of the same settings are one row."""

    runs: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="RUN [RUN ...]")]
    """Run directories."""
    out: str = "report.html"
    """File to write."""


def run(words: list[str]) -> None:
    arguments = parse(Arguments, "report", words)
    with importing():
        from logitmix.trainer.commands.report_page import write_report

    write_report([fetch_run(place) for place in arguments.runs], Path(arguments.out))
    show(arguments.out)
