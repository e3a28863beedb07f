"""Every rank starts the same collectives in the same order, from one thread.

gloo does not mind: it tells apart what NCCL, whose kernels wait for each other on the device, would wait for for ever.
"""

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import two_ranks
from small_data import small_config, write_dataset

from logitmix.comm import exchange
from logitmix.trainer.config import Config
from logitmix.trainer.evaluation.evaluate import evaluate_run
from logitmix.trainer.export.export import export
from logitmix.trainer.loop import train

METHODS = [
    name
    for name in dir(dist.ProcessGroup)
    if not name.startswith("__")
    and name.strip("_").startswith(("all", "barrier", "broadcast", "gather", "reduce", "scatter"))
]
"""Of torch's process groups, all that every rank takes part in."""
SETTINGS = {
    "train.epochs": 2,
    "train.save_in_background": True,
    "train.ema": 0.9,
    "tables.sharding": "row_wise",
    "model.features": ["all"],
    "evaluate.users": 8,
}
Seen = tuple[str, str, str, int]
"""What was being done, the group, the collective, and a number for the thread that started it."""


def recorded(config: Config, folder: Path) -> list[Seen]:
    """The collectives of this rank in a run's training, evaluation and export."""
    seen: list[Seen] = []
    threads: dict[int, int] = {}
    doing = ""

    def note(group: dist.ProcessGroup, name: str) -> None:
        thread = threads.setdefault(threading.get_ident(), len(threads))
        seen.append((doing, group.group_name, name, thread))

    def noting(method: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def noted(group: dist.ProcessGroup, *arguments: Any, **options: Any) -> Any:
            note(group, name)
            return method(group, *arguments, **options)

        return noted

    def exchanged(*arguments: Any) -> Any:
        # On gloo it consists of sends, for which ranks have an order each.
        note(arguments[-1], "exchange")
        return all_to_all(*arguments)

    all_to_all = exchange._all_to_all
    with pytest.MonkeyPatch.context() as patch:
        for name in METHODS:
            patch.setattr(dist.ProcessGroup, name, noting(getattr(dist.ProcessGroup, name), name))
        patch.setattr(exchange, "_all_to_all", exchanged)
        doing = "train"
        train(config, folder / "run")
        doing = "evaluate"
        evaluate_run(folder / "run", "test", "cpu", 1)
        doing = "export"
        export(folder / "run", folder / "export")
    return seen


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_ranks_start_the_same_collectives_in_one_order_and_thread(world_size: int, tmp_path: Path) -> None:
    config = small_config(write_dataset(tmp_path / "data", features=True), SETTINGS)
    first, *others = two_ranks.run(recorded, config, tmp_path, world_size=world_size)
    for of_rank in others:
        different = next((pair for pair in zip(first, of_rank, strict=False) if pair[0] != pair[1]), None)
        assert different is None and len(of_rank) == len(first), different
    started = {(doing, name) for doing, _, name, _ in first}
    assert {
        ("train", "exchange"),
        ("train", "allreduce"),
        ("evaluate", "allreduce"),
        ("export", "broadcast"),
    } <= started
    by_group: dict[str, set[int]] = {}
    for _, group, _, thread in first:
        by_group.setdefault(group, set()).add(thread)
    assert all(len(threads) == 1 for threads in by_group.values()), by_group
    # The tower's gradients have a group of their own, in which nothing else runs.
    summed = [group for group in by_group if {name for _, of, name, _ in first if of == group} == {"allreduce"}]
    assert len(summed) == 1
