"""Small files, prepared by `api.prepare`, and what came of them: the dataset, and what was said."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from logitmix.trainer import api
from logitmix.trainer.data.dataset import Dataset, load_dataset
from logitmix.trainer.prepare.rejects import Rejects


@dataclass
class Prepared:
    """A dataset that `prepare` has written."""

    path: Path
    description: dict[str, Any]
    """The content of its dataset.json."""
    said: str
    """All that was said, in one line: on standard error, and the summary."""

    @property
    def dataset(self) -> Dataset:
        return load_dataset(self.path)

    @property
    def features(self) -> dict[str, str]:
        """Kinds by names, without the item id."""
        return {of["name"]: of["kind"] for of in self.description["schema"]["features"] if of["name"] != "item"}

    @property
    def actions(self) -> dict[str, list[tuple[str, int]]]:
        """The items and times of each user, oldest first, in terms of the source."""
        dataset = self.dataset
        ids, users = dataset.raw_ids(), dataset.raw_user_ids(range(dataset.num_users))  # type: ignore[arg-type]
        bounds = zip(dataset.offsets[:-1].tolist(), dataset.offsets[1:].tolist(), strict=True)
        return {
            user: [(ids[dataset.items_flat[at]], int(dataset.timestamps_flat[at])) for at in range(*of)]
            for user, of in zip(users, bounds, strict=True)
        }


@pytest.fixture
def prepared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Prepared]:
    """Writes a file of actions, given as text or bytes, and prepares it as a table that keeps all users."""
    count = 0

    def prepared(content: str | bytes, name: str = "clicks.csv", **options: Any) -> Prepared:
        nonlocal count
        count += 1
        source, out = tmp_path / str(count) / name, tmp_path / str(count) / "out"
        source.parent.mkdir()
        source.write_bytes(content.encode() if isinstance(content, str) else content)
        capsys.readouterr()
        found = api.prepare("table", source=source, out=out, **{"min_user_actions": 0} | options)
        return Prepared(out, found, " ".join(f"{capsys.readouterr().err} {found!r}".split()))

    return prepared


@pytest.fixture
def rejects(tmp_path: Path) -> Iterator[Rejects]:
    made = Rejects(tmp_path / "rejects.tsv", 1.0, Console(quiet=True))
    yield made
    made.close()
