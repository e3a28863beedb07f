import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from damages import SETTINGS, replace_train, steps
from small_data import a_model, small_config, write_dataset

from logitmix.trainer.loop import train
from logitmix.trainer.run.folder import read_config
from logitmix.trainer.run.saving import Saver


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three epochs with the checkpoints of the last two, or of the best and these: steps 4, 8 and 12."""
    folder = tmp_path_factory.mktemp("finished")
    config = small_config(write_dataset(folder / "data"), SETTINGS | {"train.keep": 3})
    train(config, folder / "run")
    assert [path.name for path in steps(folder / "run")] == ["step-12", "step-4", "step-8"]
    return folder / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def savers(finished: Path, run: Path) -> Iterator[Callable[..., Saver]]:
    """Makes a Saver of the run with these settings of [train]."""
    config = replace_train(read_config(finished), keep=9)
    with a_model(config) as of:
        yield lambda **settings: Saver(run, replace_train(config, **settings), *of)


@pytest.fixture(scope="module")
def another(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of other data."""
    folder = tmp_path_factory.mktemp("another")
    train(small_config(write_dataset(folder / "data", users=30, items=25), SETTINGS), folder / "run")
    return folder / "run"
