"""Names in files of a run do not control a terminal or a page."""

from pathlib import Path
from typing import Any

import pytest
from small_data import made_run

from logitmix.trainer import cli
from logitmix.trainer.commands import retrieve

ESCAPE = "\x1b[31m\x9b\x07"
ROWS = [
    {"kind": "train", "step": 2, "loss": 2.5, "time/step": 0.5},
    {"kind": "validation", "step": 2, "hr@10": 0.5, "mrr": 0.25, "epoch": 1.0},
]
RESULTS = {"hr@10": 0.25, "mrr": 0.1, "users": 60, "corpus": 50, "step": 2, "seconds": 24.0, "examples_per_second": 7.0}
DATASET = {"name": "made", "users": 60, "items": 50, "actions": 700, "schema": {"features": [], "tables": []}}
FILES = {"results": RESULTS, "test_ranks": [1, 3, 40], "test_users": ["u1", "u2", "u3"]}


def test_ranks_that_their_users_do_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made_run(tmp_path / "run", ROWS, {}, dataset=DATASET, **FILES | {"test_users": ["u1"]})
    with pytest.raises(SystemExit):
        cli.main(["report", str(run), "--out", str(tmp_path / "page.html")])
    assert "test_ranks.json has" in capsys.readouterr().err


def test_names_do_not_control_the_terminal_or_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset, results = DATASET | {"name": f"made{ESCAPE}<script>"}, RESULTS | {f"x{ESCAPE}<i>": 1.0}
    files: dict[str, Any] = FILES | {"dataset": dataset, "results": results}
    named = made_run(tmp_path / f"run{ESCAPE}<b>", ROWS, {}, **files)
    cli.main(["report", str(named), "--out", str(tmp_path / f"page{ESCAPE}.html")])
    page = (tmp_path / f"page{ESCAPE}.html").read_text()
    assert r"made\x1b[31m\x9b\x07&lt;script&gt;" in page and r"run\x1b[31m\x9b\x07&lt;b&gt;" in page
    header = f"user,item,timestamp,pri{ESCAPE}ce,same\n"
    lines = [f"u{user},i{action}{ESCAPE},{action},{action % 3},1\n" for user in range(20) for action in range(8)]
    source = tmp_path / f"clicks{ESCAPE}.csv"
    source.write_text(header + "".join(lines) + f"{ESCAPE}\n")
    cli.main(["prepare", "table", "--source", str(source), "--out", str(tmp_path / f"data{ESCAPE}")])
    rows = [{"rank": 1, "id": f"i{ESCAPE}", "title": f"[red]t{ESCAPE}", "score": 0.5}]
    retrieve.show_items(Answering(rows), retrieve.Arguments("served", "i1"))  # type: ignore[arg-type]
    for words in (["report", f"none{ESCAPE}"], [f"what{ESCAPE}"], ["evaluate", str(named)], ["plan", f"x{ESCAPE}"]):
        with pytest.raises(SystemExit):
            cli.main(words)
    said = "".join(capsys.readouterr())
    assert said.count(r"\x1b[31m") > 6 and r"[red]t\x1b" in said
    assert not {"\x1b", "\x9b", "\x07"} & {*page, *said}


class Answering:
    """A Retriever with one answer."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def ask(self, *arguments: object) -> list[dict[str, Any]]:
        return [{"items": self.rows}]
