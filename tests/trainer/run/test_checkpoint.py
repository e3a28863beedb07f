import errno
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import two_ranks
from small_data import ITEMS, a_model, gather_table, move_tables, small_config
from torch import Tensor

from logitmix.modules.schema import ITEM, Feature, Schema, Table
from logitmix.trainer.config import Config, dump_toml
from logitmix.trainer.parallel.parallelize import ParallelModel
from logitmix.trainer.run import checkpoint
from logitmix.trainer.run.folder import checkpoint_paths
from logitmix.trainer.run.metrics import RunProgress
from logitmix.trainer.run.saving import Saver
from logitmix.trainer.run.tensor_files import SavedTensors

ADAM = {"comm.forward": "fp32", "comm.backward": "fp32", "train.precision": "fp32"}
ADAGRAD = ADAM | {"tables.optimizer": "rowwise_adagrad", "tables.sharding": "table_wise"}
MIXED = ADAM | {
    "model.features": ["all"],
    "tables.brand.sharding": "column_wise",
    "tables.zip.optimizer": "rowwise_adagrad",
    "tables.zip.dim": 16,
    "tables.flag.optimizer": "sgd",
    "tables.flag.dim": 16,
    "tables.zip.pooled": True,
    "tables.tags.pooled": True,
}
COLUMNS = {"tables.sharding": "column_wise", "tables.zip.sharding": "row_wise", "tables.brand.sharding": "table_wise"}
TABLES = (Table("brand", 9), Table("zip", 20), Table("flag", 2), Table("tags", 12))
SCHEMA = Schema(
    (Feature(ITEM, "item", "id", ITEM), *(Feature(table.name, "user", "id", table.name) for table in TABLES)),
    (Table(ITEM, ITEMS), *TABLES),
)
SETTINGS = {"adam": ADAM, "adagrad": ADAGRAD, "mixed": MIXED}


def step(model: ParallelModel, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """One update of table and tower by gradients that follow from the seed, the same for any number of ranks."""
    generator = torch.Generator().manual_seed(seed)
    ids = {name: torch.randperm(of.rows, generator=generator)[:15].sort().values for name, of in model.plan.items()}
    gradients = {name: torch.randn(len(ids[name]), of.dim, generator=generator) for name, of in model.plan.items()}
    model.table_optimizers.begin_step(1.0)
    # Every rank looks up the same rows: the owners average what the ranks send.
    move_tables(model, ids, gradients)
    for parameter in model.tower.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def snapshot(model: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = {name: value.clone() for name, value in model.tower.state_dict().items()}
    return state | {f"table {name}": gather_table(model, name) for name in model.plan}


def train_and_save(run: Path, config: Config, steps: int) -> dict[str, Tensor]:
    """State two steps after the checkpoint of `steps`."""
    with a_model(config, SCHEMA) as (model, optimizer):
        for seed in range(steps):
            step(model, optimizer, seed)
        Saver(run, config, model, optimizer).save(RunProgress(steps, 1.5, 100, {"hr@10": 0.1}))
        for seed in range(steps, steps + 2):
            step(model, optimizer, seed)
        return snapshot(model, optimizer)


def resume(run: Path, config: Config) -> dict[str, Tensor]:
    with a_model(config, SCHEMA) as (model, optimizer):
        done = checkpoint.restore(run, config, model, optimizer)
        for seed in range(done.step, done.step + 2):
            step(model, optimizer, seed)
        return snapshot(model, optimizer)


def whole(run: Path) -> dict[str, Tensor]:
    """All tensors of a run's checkpoint."""
    (path,) = (run / "checkpoints").iterdir()
    tensors, found = SavedTensors(path.glob("*.safetensors")), {}
    for name, pieces in tensors.pieces.items():
        ends = [[a + n for a, n in zip(piece.place, piece.values.shape, strict=True)] for piece in pieces]
        found[name] = torch.full([max(of) for of in zip(*ends, strict=True)], torch.nan)
        tensors.read(name, [0] * found[name].ndim, found[name])
    return found


Jobs = list[tuple[Path | None, Config, Path]]


def save_all(jobs: Jobs) -> None:
    """Saves as it was loaded what another run has saved, or what three steps give."""
    for source, config, out in jobs:
        with a_model(config, SCHEMA) as (model, optimizer):
            if source:
                assert checkpoint.restore(source, config, model, optimizer).step == 3
            else:
                for seed in range(3):
                    step(model, optimizer, seed)
            Saver(out, config, model, optimizer).save(RunProgress(3))


def assert_same_content(run: Path, other: Path) -> None:
    first, second = whole(run), whole(other)
    assert first.keys() == second.keys()
    for name, values in first.items():
        assert torch.equal(values, second[name]), name


def save_and_resume(
    jobs: list[tuple[Path, Config]], others: list[tuple[Path, Config]], again: Jobs
) -> tuple[list[dict[str, Tensor]], list[str]]:
    for run, config in jobs:
        train_and_save(run, config, 3)
    save_all(again)
    return [resume(run, config) for run, config in jobs + others], fail_on_the_second_rank(*jobs[0])


def fail_on_the_second_rank(run: Path, config: Config) -> list[str]:
    """What a rank says where the second one has a full disk, a broken one, and one that breaks in the background."""
    said = []
    with a_model(config, SCHEMA) as (model, optimizer):
        for code, step, in_background in ((errno.ENOSPC, 16, False), (errno.EIO, 16, False), (errno.EIO, 20, True)):
            now = replace(config, train=replace(config.train, save_in_background=in_background))
            broken = broken_writes(model.ranks.rank == 1, code)
            with broken, pytest.raises(OSError) as caught, Saver(run, now, model, optimizer) as saver:
                saver.save(RunProgress(step), wait=False)
                while saver._pending:
                    saver.poll()
            said.append(str(caught.value))
    return said


@contextmanager
def broken_writes(fails: bool, code: int, wait: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Writes fail on one rank; on the others they wait."""
    write = os.write

    def broken(descriptor: int, content: memoryview) -> int:
        if fails:
            raise OSError(code, os.strerror(code))
        wait()
        return write(descriptor, content)

    os.write = broken  # type: ignore[assignment]
    try:
        yield
    finally:
        os.write = write


def new_run(folder: Path, name: str, config: Config) -> Path:
    run = folder / name
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.toml").write_text(dump_toml(config))
    (run / "dataset.json").write_text(
        json.dumps({"name": "small", "users": 3, "items": ITEMS, "actions": 9, "schema": SCHEMA.to_mapping()})
    )
    return run


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-6, atol=1e-7)


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path, data: Path) -> None:
    configs = {name: small_config(data, settings) for name, settings in SETTINGS.items()}
    alone = {name: new_run(tmp_path, f"alone-{name}", config) for name, config in configs.items()}
    paired = {name: new_run(tmp_path, f"paired-{name}", config) for name, config in configs.items()}
    expected = {name: train_and_save(alone[name], config, 3) for name, config in configs.items()}
    jobs = [(paired[name], configs[name]) for name in configs]
    others = [(alone[name], configs[name]) for name in configs]
    again: Jobs = [(alone[name], of, new_run(tmp_path, f"again-{name}", of)) for name, of in configs.items()]
    columns = small_config(data, MIXED | COLUMNS)
    again += [
        (alone["mixed"], columns, new_run(tmp_path, "columns", columns)),
        (tmp_path / "columns", configs["mixed"], new_run(tmp_path, "rows", configs["mixed"])),
    ]
    first, second = two_ranks.run(save_and_resume, jobs, others, again)
    for source, _, out in again:
        assert source and len(whole(out)) > 40
        assert_same_content(source, out)
    for resumed, _ in (first, second):
        for name, actual in zip([*configs, *configs], resumed, strict=True):
            assert_equal(actual, expected[name])
    # A save that fails on one rank fails on all, and nothing of it stays.
    (full, broken, later), of_second = first[1], second[1]
    out = paired["adam"] / "checkpoints" / "step-16"
    assert full.startswith(f"no room for {out}: it needs ") and of_second[0].startswith(full.partition(" and ")[0])
    assert broken == of_second[1] == f"{out} could not be written (Input/output error); nothing of it was kept"
    # In the background too, in a later step.
    assert later == of_second[2] == broken.replace("step-16", "step-20")
    assert [path.name for path in out.parent.iterdir()] == ["step-3"]
    for name, config in configs.items():
        assert_equal(resume(alone[name], config), expected[name])
        assert_equal(resume(paired[name], config), expected[name])


def test_what_is_written_in_the_background_is_the_step_that_was_saved(tmp_path: Path, data: Path) -> None:
    config = small_config(data, ADAM | {"train.save_in_background": True})
    run, may_write = new_run(tmp_path, "run", config), threading.Event()
    waiting = broken_writes(False, 0, lambda: may_write.wait(60))
    with a_model(config, SCHEMA) as (model, optimizer), waiting:
        with Saver(run, config, model, optimizer) as saver:
            step(model, optimizer, 0)
            saver.save(RunProgress(1), wait=False)
            saved = snapshot(model, optimizer)
            step(model, optimizer, 1)
            saver.poll()
            assert checkpoint_paths(run) == []
            may_write.set()
            while saver._pending:
                saver.poll()
            assert [path.name for path in checkpoint_paths(run)] == ["step-1"]
        saved_model = checkpoint.load_saved(run)
        assert_equal(saved_model.tower.state_dict(), {name: saved[name] for name in saved_model.tower.state_dict()})
        assert torch.equal(saved_model.read_rows(ITEM, 0, ITEMS), saved[f"table {ITEM}"])
        # What is not committed when the block ends, by an error perhaps, is removed.
        may_write.clear()
        with pytest.raises(KeyError), Saver(run, config, model, optimizer) as saver:
            saver.save(RunProgress(2), wait=False)
            may_write.set()
            raise KeyError
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-1"]


@pytest.fixture
def run(tmp_path: Path, data: Path) -> Path:
    config = small_config(data, ADAM)
    run = new_run(tmp_path, "run", config)
    train_and_save(run, config, 3)
    return run


def test_offline_loading_needs_no_process_group(run: Path, data: Path) -> None:
    model = checkpoint.load_saved(run)
    assert not torch.distributed.is_initialized()
    assert (model.step, model.config) == (3, small_config(data, ADAM))
    with a_model(model.config, SCHEMA) as (sharded, optimizer):
        checkpoint.restore(run, model.config, sharded, optimizer)
        assert torch.equal(model.read_rows(ITEM, 0, ITEMS), gather_table(sharded))
        assert_equal(model.tower.state_dict(), sharded.tower.state_dict())


def test_the_newest_and_the_best_are_kept(tmp_path: Path, data: Path) -> None:
    config = small_config(data, ADAM)
    run = new_run(tmp_path, "run", config)
    with a_model(config, SCHEMA) as (model, optimizer):
        for number, rate in [(1, 0.1), (2, 0.4), (3, 0.4), (4, 0.2), (5, 0.3), (6, None)]:
            metrics = {} if rate is None else {"hr@10": rate}
            Saver(run, config, model, optimizer).save(RunProgress(number, 0.0, 0, metrics))
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-2", "step-5", "step-6"]
    assert checkpoint.load_saved(run).step == 2
    assert checkpoint.load_saved(run, "last").step == 6


def test_what_is_no_run_is_told_in_one_line(tmp_path: Path, data: Path) -> None:
    with pytest.raises(ValueError, match="is not a run directory"):
        checkpoint.load_saved(tmp_path)
    run = new_run(tmp_path, "run", small_config(data))
    with pytest.raises(ValueError, match="no complete checkpoint yet; train it first"):
        checkpoint.load_saved(run)
