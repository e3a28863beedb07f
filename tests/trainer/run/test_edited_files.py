"""Every field of a run's files with values that nobody would write: each is either taken, or refused in one line that
names the file and the field."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hostile_json import VALUES, edited, places
from small_data import made_run, small_config, write_dataset

from logitmix.trainer import cli
from logitmix.trainer.commands import retrieve
from logitmix.trainer.export.export import export
from logitmix.trainer.loop import train

ESCAPE = "\x1b[31m\x9b\x07"

EACH = pytest.mark.parametrize("each", [1, pytest.param(6, marks=pytest.mark.slow)])
"""Values for each field, chosen at random."""
TOML_VALUES = [
    "0", "-1", "1.5", "inf", "-inf", "nan", "1" + "0" * 400, "1" + "0" * 5000, "0x" + "f" * 5000, '""', '"x"',
    '"\\u001b[31m"', "[]", "[1]", "{}", "{a = 1}", "true", "1979-05-27", "9223372036854775808", "1e-320", "1e308",
]  # fmt: skip
TRAINED = {"kind": "train", "loss": 2.5, "time/step": 0.5, "time/forward": 0.5, "gates/entropy": 0.9}
WIRE = {"wire/item/forward/bytes_per_step": 2000.0, "wire/item/forward/fp32_bytes_per_step": 8000.0}
VALIDATED = {"kind": "validation", "hr@10": 0.5, "hr@200": 0.75, "mrr": 0.25, "epoch": 1.0}
ROWS = [
    TRAINED | WIRE | {"step": 2, "wire/item/forward/relative_rms_error": 0.01},
    VALIDATED | {"step": 2},
    {"kind": "skipped", "step": 3, "rank": 0, "users": [4, 7]},
    TRAINED | WIRE | {"step": 4},
    VALIDATED | {"step": 4, "hr@10": 0.25},
]
RESULTS = {
    "hr@10": 0.25, "mrr": 0.1, "users": 60, "corpus": 50, "step": 2, "seconds": 24.0, "examples_per_second": 7.0,
    "popularity/hr@10": 0.3, "recommended/coverage@10": 0.6, "recommended/top_1_percent": 0.1,
    "recommended/top_10_percent": 0.5, "targets/top_1_percent": 0.1, "targets/top_10_percent": 0.5,
}  # fmt: skip
RANKS, USERS = [1, 3, 40], ["u1", "u2", "u3"]
DATASET = {"name": "made", "users": 60, "items": 50, "actions": 700, "schema": {"features": [], "tables": []}}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Beside it another one, of another group, to be compared with."""
    files = {"dataset": DATASET, "results": RESULTS, "test_ranks": RANKS, "test_users": USERS}
    made_run(tmp_path / "other", ROWS, {"dense.lr": 0.1, "data.path": str(tmp_path / "run")}, **files)
    return made_run(tmp_path / "run", ROWS, {}, **files)


def report(run: Path, file: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What `logitmix report` of this and another run says: nothing, or one line that names the file. The page and the
    line hold no controls."""
    page = run.parent / "page.html"
    page.unlink(missing_ok=True)
    try:
        cli.main(["report", str(run), str(run.parent / "other"), "--out", str(page)])
        shown, said = page.read_text(), ""
    except SystemExit as end:
        assert end.code == 2
        shown, said = "", capsys.readouterr().err
        assert said.startswith(f"logitmix: {run / file}") and said.count("\n") == 1 and len(said) < 700
    assert not {"\x1b", "\0", "\ud800"} & {*shown, *said}
    return said


OBJECTS, LISTS = ("results.json", "dataset.json"), ("test_ranks.json", "test_users.json")
LINES = [*((name, 0) for name in (*OBJECTS, *LISTS)), *(("metrics.jsonl", line) for line in range(len(ROWS)))]


@EACH
@pytest.mark.parametrize(("name", "line"), LINES)
def test_every_field_and_entry_of_a_json_file(
    run: Path, name: str, line: int, each: int, capsys: pytest.CaptureFixture[str]
) -> None:
    file, refused, chance = run / name, 0, random.Random(line)
    lines = file.read_text().splitlines()
    tree, where = json.loads(lines[line]), name if name != "metrics.jsonl" else f"{name}, line {line + 1}"
    for at in places(tree):
        for value in chance.sample(VALUES, each):
            file.write_text("\n".join([*lines[:line], edited(tree, (at, value)), *lines[line + 1 :], ""]))
            said = report(run, "", capsys)
            refused += bool(said)
            field = at[0] if at and name in OBJECTS else where
            assert not said or where in said
            assert not said or field in said or "nested too deep" in said or "more than 4300 digits" in said
    assert refused > (3 * each if name in OBJECTS else each - 1)


@pytest.mark.parametrize("name", LISTS)
def test_ranks_that_their_users_do_not_fit(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (run / name).write_text(json.dumps(json.loads((run / name).read_text())[1:]))
    assert "test_ranks.json has" in report(run, "", capsys)


@EACH
def test_every_setting(run: Path, each: int, capsys: pytest.CaptureFixture[str]) -> None:
    file, chance = run / "config.toml", random.Random(0)
    lines, refused = file.read_text().splitlines(), 0
    for number, line in enumerate(lines):
        name = line.partition(" = ")[0]
        for value in chance.sample(TOML_VALUES, each) if " = " in line else ():
            file.write_text("\n".join([*lines[:number], f"{name} = {value}", *lines[number + 1 :]]))
            said = report(run, "config.toml", capsys)
            refused += bool(said)
            assert not said or name in said or "not valid TOML" in said or "more than 4300 digits" in said
    assert refused > 25 * each


@pytest.mark.parametrize("times", [10, pytest.param(60, marks=pytest.mark.slow)])
def test_several_edits_at_once(run: Path, times: int, capsys: pytest.CaptureFixture[str]) -> None:
    """What a page computes of several numbers: differences, sums, ratios."""
    file, taken, chance = run / "metrics.jsonl", 0, random.Random(0)
    shares, sizes = ["0", "1", "1e-320", "0.5000000000000001"], ["0", "1e99", "1e-320", "1" + "0" * 99]
    numbers = [*shares, *sizes, "-1e99", "NaN", "Infinity", "-1"]
    of_kind = {"step": ["0", "1", "4", "1000000000000"], "loss": numbers, "gates/entropy": numbers, "epoch": numbers}
    for _ in range(times):
        rows = []
        for row in ROWS:
            keys = chance.sample([key for key in row if key not in ("kind", "users", "rank")], len(row) // 3)
            values = [of_kind.get(key, sizes if "/" in key else shares) for key in keys]
            rows.append(edited(row, *(((key,), chance.choice(of)) for key, of in zip(keys, values, strict=True))))
        file.write_text("\n".join([*rows, ""]))
        taken += not report(run, "metrics.jsonl", capsys)
    assert taken == times


def test_names_do_not_control_the_terminal_or_the_page(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = run.rename(tmp_path / f"run{ESCAPE}<b>")
    (named / "dataset.json").write_text(json.dumps(DATASET | {"name": f"made{ESCAPE}<script>"}))
    (named / "results.json").write_text(json.dumps(RESULTS | {f"x{ESCAPE}<i>": 1.0}))
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


def test_names_in_a_table_of_new_items_do_not_control_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, served = tmp_path / "run", tmp_path / "served"
    train(small_config(write_dataset(tmp_path / "data"), {"train.epochs": 1, "evaluate.every_epochs": 0}), run)
    export(run, served)
    capsys.readouterr()
    table = tmp_path / f"new{ESCAPE}.csv"
    table.write_text(f"item,co{ESCAPE}lor\nnew{ESCAPE},a\nnew{ESCAPE},b\n")
    cli.main(["update-items", str(served), "--items", str(table)])
    said = "".join(capsys.readouterr())
    assert said.count(r"\x1b[31m") >= 4 and not {"\x1b", "\x9b", "\x07"} & {*said}
    assert "with different values" in said and "not used" in said
