"""`logitmix rollback`: the export that was there before."""

from collections.abc import Callable
from pathlib import Path

import pytest
from small_models import export_small, small_model

from logitmix.common.files import former, whole_directory
from logitmix.serving.directory.format import WEIGHTS
from logitmix.serving.directory.reader import read
from logitmix.trainer import cli


def replaced(out: Path, by: Path) -> None:
    with whole_directory(out, 2) as staging:
        for file in by.iterdir():
            (staging / file.name).write_bytes(file.read_bytes())


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """An export of 12 items, before which there was one of 11."""
    exports = [export_small(small_model("dot", count), tmp_path / f"of-{count}") for count in (11, 12)]
    for export in exports:
        replaced(tmp_path / "served", export)
    return tmp_path / "served"


def test_the_export_before_comes_back(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for count in (11, 12):
        cli.main(["rollback", str(out)])
        assert capsys.readouterr().out == f"{out}: {count} items, step 12 of small\n"
        assert read(out).about.num_items == count


def test_what_cannot_be_rolled_back_stays(out: Path, tmp_path: Path, refusal: Callable[..., str]) -> None:
    weights = former(out)[1] / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1])
    for words, said in (
        ([str(out)], f"logitmix: {weights}"),
        ([str(out), "--to", "3"], f"logitmix: there is no {out}.former-3; there are: 1\n"),
        ([str(tmp_path / "nowhere")], f"logitmix: no serving directory at {tmp_path / 'nowhere'}"),
        ([str(tmp_path / "of-11")], f"logitmix: {tmp_path / 'of-11'} has no former exports"),
    ):
        assert refusal("rollback", *words).startswith(said)
    assert read(out).about.num_items == 12
