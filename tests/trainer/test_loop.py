from pathlib import Path

import pytest
import two_ranks
from small_data import small_config, write_dataset

from logitmix.trainer.config import Config
from logitmix.trainer.loop import train


def attempt(config: Config, run: str) -> str:
    try:
        return str(train(config, Path(run))["step"])
    except ValueError as error:
        return str(error)


@pytest.mark.timeout(120)
def test_ranks_stop_together_with_ids_in_flight(tmp_path: Path) -> None:
    """Well before the end, where the ids of the next batch are in flight: by an error, and when time is up."""
    data = write_dataset(tmp_path / "data")
    common = {"train.epochs": 1000, "comm.timeout_seconds": 100, "train.precision": "fp32"}
    diverging = small_config(data, common | {"dense.lr": 1e30})
    for said in two_ranks.run(attempt, diverging, str(tmp_path / "diverging")):
        assert said.startswith("the loss or a gradient is not finite at step")
    short = small_config(data, common | {"train.minutes": 0.02, "evaluate.every_epochs": 1000})
    first, second = two_ranks.run(attempt, short, str(tmp_path / "short"))
    assert first == second and int(first) > 0
