"""`logitmix train`: trains a recipe, or resumes its run."""

import os
from dataclasses import dataclass
from pathlib import Path

from logitmix.common.messages import say
from logitmix.common.storage import fetch_run, path_of
from logitmix.launch.processes import is_main
from logitmix.trainer.commands.evaluate import show_metrics
from logitmix.trainer.commands.flags import last_value, take
from logitmix.trainer.commands.options import JSONOption, ProcessesOption, ScaleOption, importing
from logitmix.trainer.commands.recipe import of_recipe
from logitmix.trainer.config import Config

USAGE = """\
usage: logitmix train RECIPE [--section.field VALUE ...] [--run DIR] [--scale N]
       logitmix train RECIPE --continue RUN --data.path DATASET    goes on from a run, on a dataset that has grown
       logitmix train --refit DIR      the run's best epochs anew, on the validation actions too, into DIR/refit

       --start.section.field VALUE     settings of a run that is trained first and gives the initial weights: the
                                       recipe's section [start], if it has one; --no-start leaves it out

logitmix train RECIPE --help lists what the recipe changes and the sections of settings; --help SECTION lists one"""


@dataclass(frozen=True)
class Arguments(JSONOption, ProcessesOption, ScaleOption, Config):
    """Train a recipe, or resume its run from the last intact checkpoint."""

    run: str = ""
    """Run directory; runs/RECIPE when left empty."""


def run(words: list[str]) -> None:
    given = words
    if words and words[0].partition("=")[0] == "--refit":
        words = _words_of_refit(words)
    words = _words_of_continued(words)
    arguments, config, sizes = of_recipe(Arguments, "train", words, USAGE)
    path = path_of(arguments.run or f"runs/{Path(words[0]).stem}")
    # As they were given, for a rank says with them how to go on.
    arguments.start_ranks("train", given)
    if is_main():
        # Before torch, which takes seconds to load.
        count = int(os.environ.get("WORLD_SIZE", 1))
        ranks = f"{count} process{'es' if count > 1 else ''}"
        say(f"training {words[0]} on {config.data.path} with {ranks}, run directory {path}")
        if sizes:
            say(sizes)
    with importing():
        from logitmix.trainer.loop import train
        from logitmix.trainer.run.folder import refit_path
        from logitmix.trainer.run.results import START_STEP
        from logitmix.trainer.run.stages import chosen_run

    results = train(config, path)
    if is_main():
        tested = refit_path(path) if config.train.refit else chosen_run(path)
        step = results.get(START_STEP, results["step"])
        show_metrics(results, f"{tested}: test, checkpoint of step {step}", arguments.json)


def _words_of_refit(words: list[str]) -> list[str]:
    """`--refit RUN …` as the words that resume the run with train.refit."""
    _, equals, path = words[0].partition("=")
    path, others = (path, words[1:]) if equals else ("".join(words[1:2]), words[2:])
    if not path or not (config := fetch_run(path) / "config.toml").is_file():
        raise ValueError(f"--refit needs a run directory, and {path!r} is none: logitmix train --refit RUN")
    if last_value(others, "--run"):
        raise ValueError(f"--run has no place beside --refit: the refit's directory is in that of the run, {path}")
    return [str(config), *others, "--train.refit", "--run", path]


def _words_of_continued(words: list[str]) -> list[str]:
    """`--continue RUN` as the settings that it stands for."""
    left, taken = take(words, "--continue".__eq__)
    if not taken:
        return words
    if not (run := taken[-1][1]):
        raise ValueError("--continue needs the run to go on from: --continue RUN")
    if last_value(left, "--warm-start"):
        raise ValueError("--continue names the run to start from, as --warm-start does; give only one")
    return [*left, "--warm-start", run, "--continues"]
