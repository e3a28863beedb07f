"""docs/architecture.md and the usage name every command."""

import re
from pathlib import Path

from logitmix.trainer import cli

ROOT = Path(__file__).resolve().parents[1]


def test_every_command_is_listed() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^ +cli\.py +(.*)$", text, re.MULTILINE)
    assert tuple(line.split(", ")) == cli.COMMANDS
