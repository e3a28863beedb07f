"""Which runs benchmarks/equal_time.py trains, and which it takes as they are."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import equal_time
from logitmix.trainer.commands.recipe import of_recipe
from logitmix.trainer.commands.train import Arguments
from logitmix.trainer.config import dump_toml


def test_a_complete_run_of_other_settings_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = list[str]()

    def train(command: str, *words: str) -> None:
        arguments, config, _ = of_recipe(Arguments, command, [*words], "")
        Path(arguments.run).mkdir()
        (Path(arguments.run) / "config.toml").write_text(dump_toml(config))
        trained.append(Path(arguments.run).name)

    def seconds(work: Callable[[], None]) -> float:
        work()
        return 10.0

    monkeypatch.setattr(equal_time, "logitmix", train)
    monkeypatch.setattr(equal_time, "cpu_seconds", seconds)
    every = ["ml-100k-8-start-0", "ml-100k-8-mol-0", "ml-100k-8-dot-0"]
    for _ in range(2):
        runs = equal_time.trained(tmp_path, "ml-100k", 8, 0)
        assert trained == every
    dataset = equal_time.DATASETS["ml-100k"]
    for name, other, said in (
        ("start", replace(dataset, settings={"train.ema": 0.5}), "train.ema"),
        ("start", replace(dataset, start=21), "train.epochs"),
        ("mol", replace(dataset, mol=9), "train.epochs"),
    ):
        monkeypatch.setitem(equal_time.DATASETS, "ml-100k", other)
        with pytest.raises(ValueError, match=f"ml-100k-8-{name}-0 was started with other settings: .*{said}"):
            equal_time.trained(tmp_path, "ml-100k", 8, 0)
    assert trained == every
    # What went on from the start goes on from the new one.
    equal_time.spent_file(runs["start"]).unlink()
    equal_time.trained(tmp_path, "ml-100k", 8, 0)
    assert trained == every * 2
