import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import two_ranks
from small_data import a_pipeline, gather_table, small_config, whole_state
from torch import Tensor

from logitmix.modules.batch import Batch
from logitmix.modules.schema import ITEM
from logitmix.trainer.config import Config
from logitmix.trainer.run.folder import checkpoint_paths
from logitmix.trainer.run.metrics import RunProgress
from logitmix.trainer.run.saving import Saver
from logitmix.trainer.step import pipeline as pipelining
from logitmix.trainer.step.pipeline import PHASES, SKIPPED_IN_A_ROW, Clock, Pipeline, Skip


def test_batches_are_made_once_each_and_one_ahead(data: Path) -> None:
    made: list[int] = []
    with a_pipeline(small_config(data), 6, RunProgress(step=2, seconds=5.0, examples=100)) as pipeline:
        batches = pipeline.batches

        def noted(step: int) -> Batch:
            made.append(step)
            return batches.at(step)

        pipeline.batches = SimpleNamespace(at=noted)
        pipeline.train_step()
        assert made[:2] == [2, 3]
        assert torch.equal(pipeline.batch.id_V, batches.at(2).id_V)
        while pipeline.step < pipeline.total:
            pipeline.train_step()
        assert made == [2, 3, 4, 5]
        progress = pipeline.progress
    assert (progress.step, progress.validation) == (6, {})
    assert progress.seconds > 5 and progress.examples == 100 + sum(batches.at(i).total_targets for i in range(2, 6))


def left_with_rows_in_flight(config: Config) -> bool:
    """Whether they have all arrived."""
    with a_pipeline(config, 3) as pipeline:
        pipeline.train_step()
        assert pipeline._next
        batch, rows = pipeline._next
        rows.rows[ITEM].fill_(torch.nan)
        pipeline.__exit__(None, None, None)
        pipeline._next = None
        return torch.equal(rows.rows[ITEM], gather_table(pipeline.model)[batch.id_V])


def test_rows_in_flight_arrive_before_the_ranks_part(data: Path) -> None:
    """As where a checkpoint cannot be saved."""
    config = small_config(data, {"comm.forward": "fp32", "comm.parts": 2})
    assert two_ranks.run(left_with_rows_in_flight, config) == [True, True]


def break_step(pipeline: Pipeline, where: str) -> None:
    """Takes the next step up to its backward, and makes this rank's loss or a gradient of it not finite."""
    pipeline.receive_rows()
    pipeline.loss()
    if where == "loss":
        pipeline.losses["loss"] = pipeline.losses["loss"] * torch.nan
    elif where == "rows":
        pipeline.rows[ITEM].register_hook(lambda gradient: gradient * torch.inf)
    pipeline.backward()
    if where == "dense":
        next(pipeline.model.tower.parameters()).grad.view(-1)[0] = torch.nan


def saved(pipeline: Pipeline, config: Config, run: Path) -> dict[str, bytes]:
    """A new checkpoint's tensors, of all ranks."""
    (run / "dataset.json").touch()
    Saver(run, config, pipeline.model, pipeline.optimizer).save(pipeline.progress)
    return {part.name: part.read_bytes() for part in checkpoint_paths(run)[-1].glob("part-*")}


def a_broken_step(config: Config, where: str, breaks: int, run: Path) -> tuple[bool, list[Skip], int, list[Tensor]]:
    """Of a pipeline whose second step is broken on rank `breaks`: whether the whole state was as before, in memory and
    in a checkpoint, what the progress says, and the table at the end."""
    with a_pipeline(config, 4) as pipeline:
        pipeline.train_step()
        before, saved_before = whole_state(pipeline), saved(pipeline, config, run)
        assert len(saved_before) == pipeline.model.ranks.world_size
        break_step(pipeline, where if pipeline.model.ranks.rank == breaks else "nowhere")
        pipeline.check_gradients()
        skips = [*pipeline.skips]
        pipeline.apply_gradients()
        unchanged = (
            all(map(torch.equal, whole_state(pipeline), before)) and saved(pipeline, config, run) == saved_before
        )
        for _ in range(2):
            pipeline.train_step()
        assert not pipeline.skips and not all(map(torch.equal, whole_state(pipeline), before))
        return unchanged, skips, pipeline.progress.skipped, [gather_table(pipeline.model)]


@pytest.mark.parametrize(("where", "clip"), [("loss", 0.0), ("rows", 1.0), ("dense", 1.0)])
def test_what_is_not_finite_skips_the_step(data: Path, tmp_path: Path, where: str, clip: float) -> None:
    config = small_config(data, {"train.log_every": 1, "train.clip": clip, "comm.parts": 2, "train.ema": 0.9})
    unchanged, skips, skipped, _ = a_broken_step(config, where, 0, tmp_path)
    # The tower's gradient is a sum over the ranks.
    assert unchanged and (skips, skipped) == ([Skip(2, -1 if where == "dense" else 0)], 1)


@pytest.mark.parametrize("where", ["loss", "rows"])
def test_all_ranks_skip_what_is_not_finite_on_one(data: Path, tmp_path: Path, where: str) -> None:
    """Without agreement, the other rank would send gradients that nobody takes."""
    config = small_config(data, {"comm.parts": 2, "comm.timeout_seconds": 20})
    (first, *others), (second, *same) = (
        (table, unchanged, skips, skipped)
        for unchanged, skips, skipped, table in two_ranks.run(a_broken_step, config, where, 1, tmp_path)
    )
    assert others == same == [True, [Skip(2, 1)], 1]
    assert all(map(torch.equal, first, second))


def test_a_loss_that_stays_not_finite_ends_the_run(data: Path) -> None:
    with a_pipeline(small_config(data), 12) as pipeline:
        for broken in range(2 * (SKIPPED_IN_A_ROW - 1)):
            if broken == SKIPPED_IN_A_ROW - 1:
                # One in between begins a new row.
                pipeline.train_step()
            break_step(pipeline, "loss")
            pipeline.check_gradients()
            pipeline.apply_gradients()
        break_step(pipeline, "loss")
        with pytest.raises(ValueError, match=r"^the loss or a gradient is not finite at step 10, nor in the 4 before"):
            pipeline.check_gradients()


def test_learning_rates_follow_the_schedule(data: Path) -> None:
    settings = {"train.schedule": "cosine", "train.warmup_steps": 2, "dense.lr": 1.0, "tables.lr": 0.5}
    settings |= {"tables.optimizer": "sgd", "dense.optimizer": "sgd"}
    with a_pipeline(small_config(data, settings), 4) as pipeline:
        rates = []
        for _ in range(4):
            pipeline.train_step()
            rates.append(pipeline.learning_rates)
            assert [group["lr"] for group in pipeline.optimizer.param_groups] == [rates[-1]["dense"]]
            assert pipeline.model.table_optimizers.fused[0].param_groups[0]["lr"] == rates[-1]["tables"]
    assert [rate["dense"] for rate in rates] == pytest.approx([0.5, 1.0, 1.0, 0.5])
    assert [rate["tables"] for rate in rates] == pytest.approx([0.25, 0.5, 0.5, 0.25])


def test_the_time_of_a_run_is_that_of_the_slowest_rank(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose minutes are used up is so when it goes on, from a checkpoint with rank 0's progress."""
    with a_pipeline(small_config(data), 4) as pipeline:
        pipeline.minutes = 1.0
        pipeline.train_step()
        assert not pipeline.out_of_time() and pipeline.progress.seconds < 50
        monkeypatch.setattr(pipelining, "largest", lambda own, ranks: own + 60_000)
        assert pipeline.out_of_time() and pipeline.progress.seconds >= 60
        monkeypatch.undo()
        assert pipeline.out_of_time()


def test_the_clock_counts_phases_and_the_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.count(0.0, 0.25).__next__
    monkeypatch.setattr(pipelining, "time", SimpleNamespace(perf_counter=now))
    clock = Clock(torch.device("cpu"), elapsed=200.0, in_steps=100.0)
    for _ in range(2):
        with clock("forward"):
            sum(range(20_000))
    seconds = clock.pop()
    assert set(seconds) == set(PHASES)
    assert (seconds["forward"], seconds["backward"]) == (0.5, 0)
    assert clock.in_steps == 100.5 and clock.elapsed == 201.25  # what is done between the phases counts, too
    assert set(clock.pop().values()) == {0.0}
