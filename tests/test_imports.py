"""The architecture's rules on imports, and that the linter which holds them sees a breach of each."""

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("comm", "common", "launch", "modules", "serving", "trainer")


def tree(folder: Path) -> Path:
    """A copy of the packages, under their namespace."""
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / "logitmix" / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    words = ["--no-cache", "--no-logo", "--config", ROOT / "pyproject.toml"]
    return subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), *words],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
    )


BREACHES = [
    ("modules/planted_0.py", "import logitmix.trainer.config", "logitmix.trainer.config"),
    ("modules/planted_1.py", "from logitmix.comm import config", "logitmix.comm.config"),
    ("comm/planted_2.py", "from ..modules import config", "logitmix.modules.config"),
    ("common/planted_3.py", "from logitmix.modules import config", "logitmix.modules.config"),
    ("common/planted_4.py", "import logitmix.comm.config", "logitmix.comm.config"),
    ("common/files.py", "import torch", "torch"),
    ("serving/planted_5.py", "import torchrec", "torchrec"),
    ("serving/planted_6.py", "from fbgemm_gpu import quantize_comm", "fbgemm_gpu"),
    ("serving/planted_7.py", "from logitmix.modules import embeddings", "logitmix.modules.embeddings"),
    ("serving/planted_10.py", "import logitmix.trainer", "logitmix.trainer"),
    ("launch/planted_12.py", "import logitmix.serving", "logitmix.serving"),
    ("launch/planted_13.py", "import logitmix.trainer.config", "logitmix.trainer.config"),
    ("common/planted_14.py", "import logitmix.launch", "logitmix.launch"),
    ("serving/planted_15.py", "import logitmix.launch", "logitmix.launch"),
    ("trainer/parallel/planted_16.py", "import logitmix.trainer.run.folder", "logitmix.trainer.run.folder"),
    ("trainer/parallel/planted_17.py", "import logitmix.trainer.data.batches", "logitmix.trainer.data.batches"),
    ("trainer/config.py", "import logitmix.trainer.data.batches", "logitmix.trainer.data.batches"),
    ("trainer/commands/planted_18.py", "import logitmix.trainer.cli", "logitmix.trainer.cli"),
    ("trainer/loop.py", "import comm", "comm"),
    ("trainer/config.py", "import torch", "torch"),
]
"""A file, the line that it gets, and what that imports."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the linter says of a tree with all breaches."""
    root = tree(tmp_path_factory.mktemp("tree"))
    (root / "logitmix/modules/embeddings.py").touch()
    (root / "logitmix/trainer/no_floor.py").touch()
    (root / "logitmix/modules/similarity/detour.py").write_text("import torchrec\n")
    (root / "logitmix/serving/detoured.py").write_text("import logitmix.modules.similarity.detour\n")
    (root / "logitmix/comm/circle.py").write_text("import logitmix.comm.fp8\n")
    later = "\n\ndef later() -> None:\n    import logitmix.comm.circle"
    for file, line in (*((file, line) for file, line, _ in BREACHES), ("comm/fp8.py", later)):
        with (root / "logitmix" / file).open("a") as source:
            source.write(f"\n{line}\n")
    result = lint(root)
    assert result.returncode == 1
    return result.stdout


@pytest.mark.parametrize(("file", "line", "imported"), BREACHES)
def test_a_breach_is_seen(seen: str, file: str, line: str, imported: str) -> None:
    planted = "logitmix." + file.removesuffix(".py").replace("/", ".")
    assert f"{planted} -> {imported} (l." in seen


@pytest.mark.parametrize(
    "said",
    [
        "logitmix.serving.detoured -> logitmix.modules.similarity.detour",
        "No cycles are allowed in logitmix.comm.",
        "no_floor",
    ],
)
def test_a_breach_by_a_detour_a_circle_and_a_module_without_a_floor_are_seen(seen: str, said: str) -> None:
    assert said in seen


TAKE_THE_WHOLE = ("api.py", "cli.py", "commands", "config.py", "loop.py", "run")
"""What of trainer may take a run's whole configuration: the others take their own sections, or values."""


def test_a_room_takes_its_sections_and_not_the_whole_configuration() -> None:
    found = []
    for path in (ROOT / "trainer").rglob("*.py"):
        if path.relative_to(ROOT / "trainer").parts[0] not in TAKE_THE_WHOLE:
            nodes = list(ast.walk(ast.parse(path.read_text())))
            names = [
                alias.name for node in nodes if isinstance(node, ast.ImportFrom | ast.Import) for alias in node.names
            ]
            if {"Config", "config", "logitmix.trainer.config"} & {*names}:
                found.append(path)
    assert found == []


def test_inits_are_empty() -> None:
    assert [path for folder in FOLDERS for path in (ROOT / folder).rglob("__init__.py") if path.read_text()] == []


def test_a_wheel_would_hold_every_package_and_page() -> None:
    found = [path.parent for folder in FOLDERS for path in (ROOT / folder).rglob("__init__.py")]
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert sorted(settings["packages"]) == sorted(f"logitmix.{'.'.join(p.relative_to(ROOT).parts)}" for p in found)
    pages = [path.name for path in (ROOT / "serving").iterdir() if path.suffix in (".css", ".html", ".js")]
    packed = settings["package-data"]["logitmix.serving"]
    assert pages and all(any(fnmatch(page, pattern) for pattern in packed) for page in pages)
