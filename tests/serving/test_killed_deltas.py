"""`export --delta-from` and `fold`, killed before their operations on files: what is there is the old or the new."""

import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from folders import files_in
from killed import ended, killing_itself
from small_data import small_config, write_dataset

from logitmix.trainer.export.delta import export_delta, fold
from logitmix.trainer.export.export import export
from logitmix.trainer.loop import train


class Deltas(NamedTuple):
    run: Path
    folder: Path
    """An earlier export `base`, and an empty folder `deltas`."""

    def export(self) -> None:
        export_delta(self.run, self.folder / "base", self.folder / "deltas" / "1")

    def fold(self) -> None:
        fold(self.folder / "base", self.folder / "deltas", self.folder / "base", overwrite=True)


def visible(folder: Path) -> dict[str, bytes]:
    return {name: of for name, of in files_in(folder).items() if not any(part[0] == "." for part in Path(name).parts)}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Deltas:
    """A run with an export of its first epoch."""
    folder = tmp_path_factory.mktemp("begun")
    config = small_config(write_dataset(folder / "data"))
    (folder / "made" / "deltas").mkdir(parents=True)
    train(replace(config, train=replace(config.train, stop_after_epochs=1)), folder / "run")
    export(folder / "run", folder / "made" / "base", which="last")
    train(config, folder / "run")
    return Deltas(folder / "run", folder / "made")


def kill_each(begun: Deltas, folder: Path, step: int, name: str) -> list[str]:
    """What was there after the kills; the same command, given again, ends as if there had been none."""
    new = Deltas(begun.run, shutil.copytree(begun.folder, folder / "new"))
    getattr(new, name)()
    old, wanted, found = files_in(begun.folder), files_in(new.folder), []
    for count in range(0, 1000, step):
        killed = Deltas(begun.run, shutil.copytree(begun.folder, folder / f"killed-{count}"))
        code = ended(killing_itself, getattr(killed, name), count, killed.folder)
        there = visible(killed.folder)
        # Between two renames, the export has no name.
        kinds = {"old": old, "new": wanted, "none": {of: old[of] for of in old if not of.startswith("base/")}}
        found.append(next(kind for kind, of in kinds.items() if there == of))
        if code == 0:
            break
        assert code == -signal.SIGKILL
        try:
            getattr(killed, name)()
        except ValueError as error:
            # There is nothing left to do.
            assert found[-1] == "new" and re.search("exists already|no delta in .* is to be applied", str(error))
        assert files_in(killed.folder) == wanted
    return found


@pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_delta_is_there_or_not(begun: Deltas, tmp_path: Path, step: int) -> None:
    found = kill_each(begun, tmp_path, step, "export")
    assert found[0] == "old" and found[-1] == "new" and "none" not in found and found.count("old") > 2


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_fold_leaves_the_old_or_the_new_export(begun: Deltas, tmp_path: Path, step: int) -> None:
    made = Deltas(begun.run, shutil.copytree(begun.folder, tmp_path / "made"))
    made.export()
    found = kill_each(made, tmp_path, step, "fold")
    assert found[0] == "old" and found[-1] == "new" and found.count("old") > 2
    assert step > 1 or "none" in found
