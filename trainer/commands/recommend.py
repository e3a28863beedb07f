"""`logitmix recommend`: the top items for all users of a dataset, or for all items."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from logitmix.launch.processes import is_main
from logitmix.trainer.commands.options import (
    ExportPlace,
    JSONOption,
    ProcessesOption,
    ThreadsOption,
    excludes_history,
    importing,
    ranks_of,
)
from logitmix.trainer.commands.words import json_value, parse
from logitmix.trainer.config import HistoryRule


@dataclass(frozen=True)
class Arguments(JSONOption, ProcessesOption, ThreadsOption):
    """The top items for every user of a dataset, after all their actions. Where this was stopped before its end, the
    same command goes on."""

    place: ExportPlace
    """Serving directory, whose model ranks the items."""
    out: Annotated[str, tyro.conf.arg(metavar="FILE")]
    """File to write, .parquet or .csv: user, rank, item, score."""
    data_path: Annotated[str, tyro.conf.arg(name="data.path", metavar="DIR")] = ""
    """Dataset directory with the users' histories."""
    users: str = ""
    """File with the raw id of a user in each line: only these."""
    similar_items: bool = False
    """Instead of users, every item: the top items after a history of this item alone. The first column is
    similar_to."""
    items: str = ""
    """Table of the items that may be recommended (CSV, JSON lines or Parquet), such as what is in stock; all when left
    empty."""
    where: str = ""
    """Condition on the columns of the table --items or, without such a table, on the export's filterable columns:
    "in_stock = 1 and (price < 50 or category in ('shoes', 'bags'))"."""
    limit: str = "{}"
    """Most items of a value of the export's filterable columns for each user, as a JSON object: {"category": 3}."""
    boost_new: float = 0.0
    """Added to the scores of new items: those for which the filterable column new is not 0."""
    want: str = ""
    """Which kind of action is to come. For models with model.wanted."""
    k: Annotated[int, tyro.conf.arg(aliases=["-k"])] = 100
    """How many items."""
    stage1: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: a tenth)")] = None
    """K': items that the h-indexer keeps for the similarity to rank. By default a tenth of the export's, but at least
    5 k and 500, and no more than `serve` keeps; with --limit as many as that."""
    exclude_history: HistoryRule = "auto"
    """Leave items of the history out; auto: as in the run's evaluation."""


def run(words: list[str]) -> None:
    arguments = parse(Arguments, "recommend", words)
    with importing():
        from logitmix.serving.request import Options
        from logitmix.trainer.export.recommend import Asked, recommend

    exclude = excludes_history(arguments.exclude_history)
    options = Options(arguments.k, exclude_history=exclude, stage1=arguments.stage1, boost_new=arguments.boost_new)
    asked = Asked(
        Path(arguments.out),
        arguments.data_path,
        options,
        arguments.users,
        arguments.similar_items,
        arguments.items,
        arguments.where,
        json_value("--limit", arguments.limit, dict, '{"category": 3}'),
        arguments.want,
    )
    arguments.start_ranks("recommend", words)
    with ranks_of("recommend") as ranks:
        counts = recommend(arguments.place, asked, ranks, arguments.threads_of_rank)
    if is_main():
        of = "items" if asked.similar_items else "users"
        arguments.tell(counts, f"{asked.out}: {counts['rows']:,} rows for {counts[of]:,} {of}")
