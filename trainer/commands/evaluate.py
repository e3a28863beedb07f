"""`logitmix evaluate`: metrics of a run's best checkpoint over the whole corpus."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro
from rich.console import Console

from logitmix.common.messages import say
from logitmix.common.storage import fetch_run
from logitmix.launch.processes import is_main
from logitmix.trainer.commands.options import (
    OF_THE_RUN,
    JSONOption,
    ProcessesOption,
    RunPlace,
    ThreadsOption,
    importing,
)
from logitmix.trainer.commands.tables import metrics_table
from logitmix.trainer.commands.words import parse
from logitmix.trainer.config import HistoryRule


@dataclass(frozen=True)
class Arguments(JSONOption, ProcessesOption, ThreadsOption):
    """Rank the whole corpus for every user with the best checkpoint of a run."""

    run: RunPlace
    """Run directory."""
    split: Literal["test", "validation"] = "test"
    """The held-out part; on test, the run's refit is ranked if there is one."""
    exclude_history: Annotated[
        HistoryRule | None, tyro.conf.arg(metavar="{auto,yes,no}", help_behavior_hint=OF_THE_RUN)
    ] = None
    """Leave a user's history out of the ranking."""
    users: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint=OF_THE_RUN)] = None
    """Number of users ranked, a fixed sample; 0 ranks all."""
    groups: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="[NAME ...]", help_behavior_hint=OF_THE_RUN)] = None
    """Metrics of groups of users, too: by new_user, history_length, item_actions, or features."""
    want: Annotated[str | None, tyro.conf.arg(metavar="KIND", help_behavior_hint=OF_THE_RUN)] = None
    """For models with model.wanted: the kind of action that every query asks for, instead of the target's own."""
    device: Literal["auto", "cpu", "cuda"] = "auto"


def run(words: list[str]) -> None:
    arguments = parse(Arguments, "evaluate", words)
    arguments.start_ranks("evaluate", words)
    with importing():
        from logitmix.trainer.evaluation.evaluate import evaluate_run
        from logitmix.trainer.run.results import cold_targets
        from logitmix.trainer.run.stages import chosen_run, final_run

    path, split = fetch_run(arguments.run), arguments.split
    results = evaluate_run(
        path,
        split,
        arguments.device,
        arguments.threads_of_rank,
        exclude_history=arguments.exclude_history,
        users=arguments.users,
        groups=arguments.groups,
        want=arguments.want,
    )
    if is_main():
        ranked = final_run(path) if split == "test" else chosen_run(path)
        show_metrics(results, f"{ranked}: {split}, checkpoint of step {results['step']}", arguments.json)
        if line := cold_targets(results):
            say(f"{split}: {line}")


def show_metrics(metrics: Mapping[str, float], title: str, as_json: bool) -> None:
    """Prints metrics as JSON, or as a table."""
    if as_json:
        print(json.dumps(metrics))
        return
    Console().print(metrics_table(metrics, title))
