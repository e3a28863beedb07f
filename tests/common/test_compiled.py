"""That the compiled parts are there to be tested: tests of a part that is missing are skipped, or test plain torch."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from logitmix.common import compiled
from logitmix.common.compiled import compiled_library, has_triton, lazy_library, plain_torch

PARTS = re.findall(r'"(logitmix\.[\w.]+)"', (Path(__file__).parents[2] / "setup.py").read_text())


def test_setup_names_them() -> None:
    assert len(PARTS) >= 6 and "logitmix.modules.encoders._hstu" in PARTS


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler here")
@pytest.mark.parametrize("module", PARTS)
def test_where_there_is_a_compiler_each_was_built(module: str) -> None:
    assert compiled_library(module), f"{module} was not built: install again, and read what the compiler said"


@pytest.fixture
def without_mol(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process without the compiled parts of MoL, which has said nothing of it yet."""
    monkeypatch.setattr(compiled, "compiled_library", lambda module, **_: None if "_mol" in module else object())
    for cached in (compiled._say_what_is_missing, has_triton):
        cached.cache_clear()
    yield
    for cached in (compiled._say_what_is_missing, has_triton):
        cached.cache_clear()


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_what_is_missing_is_said_once_by_the_first_rank(
    rank: str, lines: int, without_mol: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    assert lazy_library("logitmix.modules._noise")()
    assert not capsys.readouterr().err
    for part in ("losses._mol", "similarity._mol_scores", "losses._mol"):
        assert lazy_library(f"logitmix.modules.{part}")() is None
    said = capsys.readouterr().err.splitlines()
    assert len(said) == lines
    for line in said:
        assert line.startswith("not compiled here: MoL's loss, MoL's scores: plain torch does it, ")
        assert "install a C compiler, then logitmix again" in line and "logitmix doctor" in line


def test_plain_torch_finds_no_library_and_says_nothing(without_mol: None, capsys: pytest.CaptureFixture[str]) -> None:
    noise, loss = (lazy_library(f"logitmix.modules.{part}") for part in ("_noise", "losses._mol"))
    with plain_torch():
        assert noise() is None and loss() is None
    assert noise() is not None and not capsys.readouterr().err
