"""docs/architecture.md names every file of the packages, and none that is not there."""

import re
from pathlib import Path

from logitmix.trainer import cli

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("common", "comm", "launch", "modules", "serving", "trainer")
KINDS = (".py", ".c", ".toml")


def test_every_file_is_listed() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("\nImports run one way")[0]
    listed = set(re.findall(r"[\w-]+\.(?:py|c|toml)\b", text))
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.suffix in KINDS]
    names = {path.name for path in files if path.name != "__init__.py"}
    assert names - listed == set()
    benchmarks = {path.name for path in (ROOT / "benchmarks").glob("*.py")}
    assert listed - names - benchmarks == set()


def test_every_command_is_listed() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^ +cli\.py +(.*)$", text, re.MULTILINE)
    assert set(line.split(", ")) == set(cli.COMMANDS)
    for command in cli.COMMANDS:
        assert re.search(rf"^  {command} ", cli.USAGE, re.MULTILINE)
