"""The architecture's rules on imports, and that the linter which holds them sees a breach of each."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("comm", "common", "launch", "modules", "serving", "trainer")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the packages, under their namespace."""
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tmp_path / "logitmix" / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            Path(sys.executable).with_name("lint-imports"),
            "--no-cache",
            "--no-logo",
            "--config",
            ROOT / "pyproject.toml",
        ],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
    )


def test_the_tree_keeps_the_contracts(tree: Path) -> None:
    result = lint(tree)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("file", "line", "imported"),
    [
        ("modules/planted.py", "import logitmix.trainer.config", "logitmix.trainer.config"),
        ("modules/planted.py", "from logitmix.comm import config", "logitmix.comm.config"),
        ("comm/planted.py", "from ..modules import config", "logitmix.modules.config"),
        ("common/planted.py", "from logitmix.modules import config", "logitmix.modules.config"),
        ("common/planted.py", "import logitmix.comm.config", "logitmix.comm.config"),
        ("common/files.py", "import torch", "torch"),
        ("serving/planted.py", "import torchrec", "torchrec"),
        ("serving/planted.py", "from fbgemm_gpu import quantize_comm", "fbgemm_gpu"),
        ("serving/planted.py", "from logitmix.modules import embeddings", "logitmix.modules.embeddings"),
        ("serving/planted.py", "from logitmix.modules import model", "logitmix.modules.model"),
        ("serving/planted.py", "import logitmix.modules.unheard_of", "logitmix.modules.unheard_of"),
        ("serving/planted.py", "import logitmix.trainer", "logitmix.trainer"),
        ("serving/planted.py", "import logitmix.comm", "logitmix.comm"),
        ("launch/planted.py", "import logitmix.serving", "logitmix.serving"),
        ("launch/planted.py", "import logitmix.trainer.config", "logitmix.trainer.config"),
        ("common/planted.py", "import logitmix.launch", "logitmix.launch"),
        ("serving/planted.py", "import logitmix.launch", "logitmix.launch"),
        ("trainer/parallel/planted.py", "import logitmix.trainer.run.folder", "logitmix.trainer.run.folder"),
        ("trainer/parallel/planted.py", "import logitmix.trainer.data.batches", "logitmix.trainer.data.batches"),
        ("trainer/config.py", "import logitmix.trainer.data.batches", "logitmix.trainer.data.batches"),
        ("trainer/commands/planted.py", "import logitmix.trainer.cli", "logitmix.trainer.cli"),
        ("trainer/loop.py", "import comm", "comm"),
        ("trainer/config.py", "import torch", "torch"),
    ],
)
def test_a_breach_is_seen(tree: Path, file: str, line: str, imported: str) -> None:
    (tree / "logitmix/modules/unheard_of.py").touch()
    (tree / "logitmix/modules/embeddings.py").touch()
    with (tree / "logitmix" / file).open("a") as source:
        source.write(f"\n{line}\n")
    result = lint(tree)
    assert result.returncode == 1
    planted = "logitmix." + file.removesuffix(".py").replace("/", ".")
    assert f"{planted} -> {imported} (l." in result.stdout, result.stdout


def test_a_breach_by_a_detour_is_seen(tree: Path) -> None:
    (tree / "logitmix/modules/similarity/planted.py").write_text("import torchrec\n")
    (tree / "logitmix/serving/planted.py").write_text("import logitmix.modules.similarity.planted\n")
    result = lint(tree)
    assert result.returncode == 1
    assert "logitmix.serving.planted -> logitmix.modules.similarity.planted" in result.stdout


def test_a_circle_is_seen(tree: Path) -> None:
    (tree / "logitmix/comm/planted.py").write_text("import logitmix.comm.fp8\n")
    with (tree / "logitmix/comm/fp8.py").open("a") as source:
        source.write("\n\ndef later() -> None:\n    import logitmix.comm.planted\n")
    result = lint(tree)
    assert result.returncode == 1
    assert "No cycles are allowed in logitmix.comm." in result.stdout, result.stdout


def test_a_module_without_a_floor_is_seen(tree: Path) -> None:
    (tree / "logitmix/trainer/planted.py").touch()
    result = lint(tree)
    assert result.returncode == 1
    assert "planted" in result.stdout, result.stdout


def test_inits_are_empty() -> None:
    assert [path for folder in FOLDERS for path in (ROOT / folder).rglob("__init__.py") if path.read_text()] == []


def test_a_wheel_would_hold_every_package() -> None:
    found = [path.parent for folder in FOLDERS for path in (ROOT / folder).rglob("__init__.py")]
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert sorted(settings["packages"]) == sorted(f"logitmix.{'.'.join(p.relative_to(ROOT).parts)}" for p in found)
