"""Which runs benchmarks/equal_time.py trains, and which it takes as they are."""

import json
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


def test_a_table_is_kept_with_what_it_was_measured_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data/half").mkdir(parents=True)
    (tmp_path / "data/half/dataset.json").touch()
    monkeypatch.setattr(equal_time, "trained", lambda *of: {})
    monkeypatch.setattr(equal_time, "table_rows", lambda found: [("mol", "3", "4", "0.1", "0.2", "0.3")])
    monkeypatch.setattr(equal_time, "machine", lambda: "cores, commit abc")
    equal_time.main(equal_time.Options("", "half", seeds=2, out=str(tmp_path), results=str(tmp_path)))
    assert json.loads((tmp_path / "equal-time-half-64.json").read_text()) == {
        "measured": "MovieLens-1M, half, times, D = 64, 2 seeds, 1 thread; cores, commit abc",
        "rows": [{"": "mol", "CPU s": "3", "epochs": "4", "hr@10": "0.1", "hr@50": "0.2", "hr@200": "0.3"}],
    }
