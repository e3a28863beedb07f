"""`logitmix compare`: simple and learned methods on one dataset, in equal time."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from logitmix.common.storage import path_of
from logitmix.launch.processes import is_main
from logitmix.trainer.commands.options import JSONOption, ProcessesOption, ThreadsOption, importing
from logitmix.trainer.commands.sizing import AUTO, DOT, load_sized
from logitmix.trainer.commands.words import parse
from logitmix.trainer.config import DataConfig, EvaluateConfig, changed, flatten


@dataclass(frozen=True)
class Arguments(JSONOption, ProcessesOption, ThreadsOption):
    """Popularity, item-kNN, EASE, dot product, MoL and HSTU on one dataset, in equal time: a table with intervals, a
    sentence of verdict, and what to do next. What an earlier call with the same --out has done is not done again. The
    settings of data and evaluate hold for all methods."""

    dataset: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATASET")]
    """Dataset directory."""
    minutes: float
    """Time that each method trains, evaluations on validation included."""
    methods: tuple[Literal["dot", "mol", "hstu"], ...] = ("dot", "mol", "hstu")
    """Learned methods; the simple ones are always there."""
    seeds: int = 1
    """Runs of each learned method, each with so many minutes; intervals then count what seeds change, too."""
    features: tuple[str, ...] = ()
    """Features that the learned methods use, "all" for all."""
    out: str = ""
    """Folder of the runs and of compare.json; runs/compare-DATASET when left empty."""
    data: DataConfig = field(default_factory=DataConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)


def run(words: list[str]) -> None:
    arguments, settings = _with_settings(words)
    arguments.start_ranks("compare", words)
    with importing():
        from logitmix.trainer.commands.comparison import as_text, compare

    out = path_of(arguments.out or f"runs/compare-{Path(arguments.dataset).resolve().name}")
    methods = list(dict.fromkeys(arguments.methods))
    found = compare(
        arguments.dataset, out, arguments.minutes, methods, arguments.threads_of_rank, settings, arguments.seeds
    )
    if is_main():
        arguments.tell(found, as_text(found).removesuffix("\n"))


def _with_settings(words: list[str]) -> tuple[Arguments, dict[str, Any]]:
    """The arguments, and the settings of data and evaluate that the words give."""
    dataset = parse(Arguments, "compare", words).dataset
    # Now that the dataset is known, so are the values of what is not given.
    sized, _ = load_sized(AUTO, dataset, given=DOT)
    default = Arguments(
        dataset,
        minutes=tyro.MISSING,
        data=replace(sized.data, path=dataset),
        evaluate=replace(sized.evaluate, baselines=False),
    )
    arguments = parse(Arguments, "compare", words, default)
    before, now = (flatten(of.data, "data.") | flatten(of.evaluate, "evaluate.") for of in (default, arguments))
    of_model = {"model.features": list(arguments.features)} if arguments.features else {}
    return arguments, {name: now[name] for name in changed(before, now)} | of_model
