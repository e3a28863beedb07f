from pathlib import Path

import pytest
import torch
import two_ranks
from small_data import small_config, write_dataset

from logitmix.comm.process_group import process_group
from logitmix.trainer.config import Config
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.loop import _ahead, train, training_batches
from logitmix.trainer.parallelize import parallelize


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
    spoilt = small_config(data, common | {"dense.lr": 1e30})
    for said in two_ranks.run(attempt, spoilt, str(tmp_path / "spoilt")):
        assert said.startswith("the loss or a gradient is not finite at step")
    short = small_config(data, common | {"train.minutes": 0.02, "evaluate.every_epochs": 1000})
    first, second = two_ranks.run(attempt, short, str(tmp_path / "short"))
    assert first == second and int(first) > 0


def close_with_rows_in_flight(config: Config) -> bool:
    """Whether they have all arrived."""
    dataset = load_dataset(config.data.path)
    with process_group(config.train.device, 60) as ranks:
        model = parallelize(dataset.num_items, config, ranks)
        ahead = _ahead(training_batches(config, dataset, ranks), model, 0, 3)
        batch, rows = next(ahead)
        rows.leaf_VD.fill_(torch.nan)
        rows.send_rows()
        ahead.close()
        return torch.equal(rows.leaf_VD, model.gather_table()[batch.id_V])


def test_rows_in_flight_arrive_before_the_ranks_part(tmp_path: Path) -> None:
    """As where a checkpoint cannot be saved."""
    config = small_config(write_dataset(tmp_path / "data"), {"comm.forward": "fp32", "comm.parts": 2})
    assert two_ranks.run(close_with_rows_in_flight, config) == [True, True]
