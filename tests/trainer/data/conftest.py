from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from logitmix.trainer.data.rejects import Rejects


@pytest.fixture
def rejects(tmp_path: Path) -> Iterator[Rejects]:
    made = Rejects(tmp_path / "rejects.tsv", 1.0, Console(quiet=True))
    yield made
    made.close()
