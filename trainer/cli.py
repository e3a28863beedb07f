"""The command line."""

import contextlib
import dataclasses
import faulthandler
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeVar

try:
    import tyro
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as absent:  # where only what serving needs was installed
    raise SystemExit(f"logitmix: the command line needs {absent.name}: pip install logitmix") from None

from logitmix.common.mappings import class_of_kind, nearest, require
from logitmix.common.plugins import load_plugins, references, take_imports
from logitmix.common.storage import fetched_run, naming_urls, path_of, say, shown
from logitmix.launch.processes import (
    LOST_PEER,
    STOPPED,
    USER_ERROR,
    Stopped,
    cores,
    ended_by_a_mistake,
    launched,
    note_mistake,
    remove_logs_of_no_run,
    run_ranks,
)
from logitmix.trainer.commands.sizing import AUTO, load_sized, settled
from logitmix.trainer.commands.words import json_value, parse, parts, whole_numbers
from logitmix.trainer.config import (
    BESIDE,
    KINDS,
    Config,
    DataConfig,
    EvaluateConfig,
    HistoryRule,
    flatten,
    recipe_names,
    take_start_words,
    take_table_words,
    with_settings,
    with_start,
    with_tables_by_name,
)
from logitmix.trainer.data.config import PrepareOptions
from logitmix.trainer.data.registry import NAMES
from logitmix.trainer.quiet import quietly

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from logitmix.serving.request import Options, Request
    from logitmix.serving.retriever import Retriever

USAGE = """\
usage: logitmix COMMAND ...   (logitmix COMMAND --help tells more)

  prepare NAME [--source PATH] [--out DIR]          raw files -> dataset directory
  train RECIPE [--section.field VALUE ...] [--run DIR]
                                                    alone, on N ranks of this host with --processes N, or under
                                                    torchrun or torchx with the same words
  plan RECIPE [--world-size 8] [--device cuda]      where a job's tables would be placed, and the memory of its ranks
  evaluate RUN                                      metrics of the best checkpoint over the whole corpus
  compare DATASET --minutes M                       simple and learned methods in equal time, with intervals
  report RUN [RUN ...] [--out FILE]                 curves, metrics and settings of runs as one HTML page
  export RUN --out DIR                              best checkpoint -> serving directory
  retrieve DIR --history 1,2,3 [-k 10]              the top items for a history
  serve DIR [--port 8080]                           answers over HTTP, with a page to try it out
  update-items DIR --items FILE                     new items into a serving directory, from their features
  doctor                                            what this machine has, and what is missing or does not work

  --import FILE.py | --import MODULE                with every command: a plugin (docs/extending.md)

datasets: {names}
recipes:  {recipes}"""

TRAIN_USAGE = """\
usage: logitmix train RECIPE [--section.field VALUE ...] [--run DIR]
       logitmix train --refit DIR      the run's best epochs anew, on the validation actions too, into DIR/refit

       --start.section.field VALUE     settings of a run that is trained first and gives the initial weights: the
                                       recipe's section [start], if it has one; --no-start leaves it out

logitmix train RECIPE --help lists every setting with the recipe's value
recipes: {recipes}, or the path of a TOML file"""

PLAN_USAGE = """\
usage: logitmix plan RECIPE [--world-size N] [--per-host N] [--device cuda|cpu] [--gpu-gib GIB] [--json]
                            [--section.field VALUE ...]

It places the tables as `logitmix train` with the same settings would, without starting anything, and prints what each
rank would hold; logitmix plan RECIPE --help lists every setting
recipes: {recipes}, or the path of a TOML file"""

NO_START = "--no-start"
"""Train from random weights, also where the recipe has a run that is trained first."""
BASE_MODULES = ("fsspec", "numpy", "pyarrow", "safetensors", "tomli_w", "torch")
EXTRA_MODULES = {
    "train": ("torchrec", "fbgemm_gpu", "tensorboard"),
    "serve": ("fastapi", "uvicorn", "prometheus_client"),
}
"""Modules that `pip install logitmix` brings, and those that its extras add."""

PATIENCE = 365 * 24 * 3600
"""Seconds that the ranks of retrieve and serve wait for each other: for a large export to be read, or for the next
request. The end of a rank is noticed at once, and one that is stopped by its heartbeat."""

OF_THE_RUN = "(default: the run's setting)"

MAPPING = ("export", "retrieve", "serve", "update-items")
"""Commands that map an export's files: who truncates one ends them by SIGBUS, of which at least a line shall tell."""

R = TypeVar("R", bound=Config)
RunPlace = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
ExportPlace = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DIR")]


@tyro.conf.configure(tyro.conf.PositionalRequiredArgs, tyro.conf.UseAppendAction)
@dataclass(frozen=True)
class PrepareCommand(PrepareOptions):
    """Raw files in, dataset directory out."""

    name: Annotated[str, tyro.conf.arg(metavar="NAME")]
    json: bool = False
    """Print the dataset's description as JSON."""


@dataclass(frozen=True)
class TrainCommand(Config):
    """Train a recipe, or resume its run from the last intact checkpoint."""

    run: str = ""
    """Run directory; runs/RECIPE when left empty."""
    processes: int = 1
    """Processes to start on this host; torchrun and torchx start theirs themselves."""
    json: bool = False
    """Print the results as JSON."""


@dataclass(frozen=True)
class PlanCommand(Config):
    """Where the tables of a job would be placed, and the memory that each rank would need, without its machines."""

    world_size: int = 8
    """Ranks of the job."""
    per_host: int = 0
    """Ranks of each host; all, but 8 at most, when 0."""
    device: Literal["cuda", "cpu"] = "cuda"
    gpu_gib: float = 80.0
    """Memory of a GPU in GiB."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class EvaluateCommand:
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
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = 0
    """CPU threads of a rank; all cores divided among the ranks of this host when 0."""
    processes: int = 1
    """Processes to start on this host; torchrun and torchx start theirs themselves."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class CompareCommand:
    """Popularity, item-kNN, EASE, dot product, MoL and HSTU on one dataset, in equal time: a table with intervals, and
    a sentence of verdict. What an earlier call with the same --out has done is not done again. The settings of data and
    evaluate hold for all methods."""

    dataset: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATASET")]
    """Dataset directory."""
    minutes: float
    """Training time of each method, evaluation not counted."""
    methods: tuple[Literal["dot", "mol", "hstu"], ...] = ("dot", "mol", "hstu")
    """Learned methods; the simple ones are always there."""
    out: str = ""
    """Folder of the runs and of compare.json; runs/compare-DATASET when left empty."""
    threads: int = 0
    """CPU threads of a rank; all cores divided among the ranks of this host when 0."""
    processes: int = 1
    """Processes to start on this host; torchrun and torchx start theirs themselves."""
    json: bool = False
    """Print JSON."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    evaluate: EvaluateConfig = dataclasses.field(default_factory=EvaluateConfig)


@dataclass(frozen=True)
class ReportCommand:
    """Curves, metrics and settings of runs, side by side, as one HTML page that needs no network."""

    runs: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="RUN [RUN ...]")]
    """Run directories."""
    out: str = "report.html"
    """File to write."""


@dataclass(frozen=True)
class ExportCommand:
    """Write the best checkpoint of a run as a serving directory."""

    run: RunPlace
    """Run directory; its refit is taken if there is one."""
    out: Annotated[str, tyro.conf.arg(metavar="DIR")]
    """Serving directory to write."""
    checkpoint: Literal["best", "last"] = "best"
    """Which checkpoint: the best on validation, or the last."""
    overwrite: bool = False
    """Replace the serving directory that is already there."""
    item_cache: bool = True
    """Store the item tower's outputs. Otherwise store the items' rows and features, which take fewer bytes but pass
    through the tower for each request."""
    precision: Literal["fp32", "bf16", "fp16", "int8"] = "fp32"
    """How they are stored. bf16 and fp16 halve them; int8 is for the components of mol. Where fp16 cannot hold them,
    bf16 is taken."""
    faiss: bool = False
    """Also write the items' vectors as faiss indexes."""
    onnx: bool = False
    """Also write the query tower as ONNX."""
    programs: bool = False
    """Also write the towers and the cascade as programs of torch.export and AOTInductor."""
    programs_cpu: Literal["native", "avx2"] = "native"
    """What AOTInductor compiles for: this machine, or every x86-64 processor with AVX2."""
    processes: int = 1
    """Processes to start on this host; torchrun and torchx start theirs themselves."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class RetrieveCommand:
    """The top items for one request."""

    directory: ExportPlace
    """Serving directory."""
    history: str = ""
    """Raw item ids, oldest first, separated by commas, as a row of CSV: an id that has a comma itself goes into double
    quotes, '"a,b",c'."""
    timestamps: str = ""
    """Times of these items, whole numbers in the unit of the dataset's times, separated by commas. A model that uses
    recency or times takes them; other models ignore them."""
    time: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: the last timestamp)")] = None
    """When the request is made, in the same unit. For models with times."""
    user: str = "{}"
    """Features of the user, as a JSON object: {"age": "25"}."""
    events: str = "[]"
    """Features of the events, as a JSON list of objects, one for each item of the history."""
    allowed: str = ""
    """Raw item ids, written as those of --history: only these are ranked. All when left empty."""
    blocked: str = ""
    """Raw item ids, written as those of --history, that are left out."""
    histories: str = ""
    """File of requests, one JSON value per line: a list of raw item ids, or an object with history, timestamps, time,
    user, events, allowed and blocked. The answers go to the file --out."""
    out: str = ""
    """File to write with --histories: one JSON list per line, the items for each request."""
    unknown: Literal["refuse", "skip", "unknown"] = "refuse"
    """What to do with unknown ids of the history: refuse them, skip them, or use an unknown item for them."""
    k: Annotated[int, tyro.conf.arg(aliases=["-k"])] = 10
    """How many items."""
    stage1: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: 100,000)")] = None
    """K': items that the h-indexer keeps for the similarity to rank."""
    exclude_history: HistoryRule = "auto"
    """Leave items of the history out; auto: as in the run's evaluation."""
    processes: int = 1
    """Processes to start on this host, which share the items; torchrun starts its own."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class ServeCommand:
    """Answer requests over HTTP until SIGTERM or Ctrl-C. A new export written in place of the directory takes over
    without a restart. docs/serving.md describes requests and answers."""

    directory: ExportPlace
    """Serving directory."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all of this host. There is no authentication."""
    port: int = 8080
    """Port to listen on; any free one when 0."""
    threads: int = 0
    """CPU threads of the model; torch's default when 0, and all cores divided among the processes of this host."""
    processes: int = 1
    """Processes to start on this host, which share the items; torchrun starts its own."""
    wait_ms: float = 10.0
    """Milliseconds that a request waits, at most, for others to be answered with it."""
    allow_host: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A name by which clients reach the server, such as that of a reverse proxy; * for any. Addresses, localhost,
    --host and this machine's name always are."""
    allow_origin: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """An origin whose pages may ask from browsers (CORS), such as https://shop.example; * for any."""


@dataclass(frozen=True)
class UpdateItemsCommand:
    """Add items to a serving directory, from their features alone: no training, no new export."""

    directory: ExportPlace
    """Serving directory."""
    items: Annotated[str, tyro.conf.arg(metavar="FILE")]
    """CSV, JSON lines or Parquet: a table of the items, with the features' names as columns."""
    item_column: str = "item"
    """Column with the item ids; the first column if there is none of this name."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class DoctorCommand:
    """What this machine has, and what is missing or does not work. Exit status 1 if something does not work."""

    json: bool = False
    """Print JSON."""


def main(arguments: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = COMMANDS.get(words[0]) if words else None
    if command is None:
        asked = bool(words) and words[0] in ("-h", "--help")
        usage = USAGE.format(names=", ".join(NAMES), recipes=", ".join(recipe_names()))
        print(usage, file=sys.stdout if asked else sys.stderr)
        if words and not asked:
            print(f"\nlogitmix: no command {words[0]!r}{nearest(words[0], list(COMMANDS))}", file=sys.stderr)
        raise SystemExit(0 if asked else 2)
    if words[0] in MAPPING and not faulthandler.is_enabled():
        faulthandler.enable()
    if ended_by_a_mistake():
        remove_logs_of_no_run()
        raise SystemExit(USER_ERROR)
    try:
        with quietly(), naming_urls():
            others, given = take_imports(words[1:])
            load_plugins(given)
            command(others)
    except ValueError as error:
        if note_mistake(str(error)):
            _tell_others(str(error), USER_ERROR)
            raise SystemExit(USER_ERROR) from None
        _fail(str(error), USER_ERROR)
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), 1)
    except MemoryError as error:
        _fail(_out_of_memory(error), 1)
    except RuntimeError as error:
        if "allocate memory" in str(error) or type(error).__name__ == "OutOfMemoryError":
            _fail(_out_of_memory(error), 1)
        if type(error).__name__ != "LostRank":  # whose module takes seconds to load
            _tell_others(f"{type(error).__name__}: {error}", 1)
            raise
        _end_lost(str(error))
    except ModuleNotFoundError as error:
        _fail(_what_to_install(words[0], error), 1)
    except Stopped as stop:
        if not _is_main():
            raise SystemExit(STOPPED) from None
        _fail(f"{stop}; go on with: {shlex.join(['logitmix', *words])}", STOPPED)
    except KeyboardInterrupt:
        _fail("stopped", 130)
    except Exception as error:
        _tell_others(f"{type(error).__name__}: {error}", 1)
        raise
    finally:
        remove_logs_of_no_run()


def _prepare(words: list[str]) -> None:
    command = parse(PrepareCommand, "prepare", words)
    from logitmix.trainer.data.prepare import prepare

    description = prepare(command)
    if command.json:
        print(json.dumps(description))
        return
    from logitmix.trainer.data.summary import summarize

    print(shown(summarize(description, command.directory)))


def _train(words: list[str]) -> None:
    given = words
    if words and words[0].partition("=")[0] == "--refit":
        words = _words_of_refit(words)
    if _names_no_recipe(words, "train needs a recipe first: logitmix train RECIPE [--section.field VALUE ...]"):
        print(TRAIN_USAGE.format(recipes=", ".join(recipe_names())))
        return
    command, config, sizes = _of_recipe(TrainCommand, "train", words)
    run = path_of(command.run or f"runs/{Path(words[0]).stem}")
    # As they were given, for a rank says with them how to go on.
    _start_ranks("train", given, command.processes)
    if _is_main():
        # Before torch, which takes seconds to load.
        count = int(os.environ.get("WORLD_SIZE", 1))
        ranks = f"{count} process{'es' if count > 1 else ''}"
        say(f"training {shown(words[0])} on {config.data.path} with {ranks}, run directory {shown(run)}")
        if sizes:
            say(sizes)
    from logitmix.trainer.loop import train
    from logitmix.trainer.run.folder import refit_path

    results = train(config, run)
    if _is_main():
        trained = shown(refit_path(run) if config.train.refit else run)
        _show_metrics(results, f"{trained}: test, checkpoint of step {results['step']}", command.json)


def _names_no_recipe(words: Sequence[str], otherwise: str) -> bool:
    """Whether the words ask how the command is used; ValueError with `otherwise` for a flag in the recipe's place."""
    if words and words[0].startswith("-") and words[0] not in ("-h", "--help"):
        raise ValueError(otherwise)
    return not words or words[0].startswith("-")


def _of_recipe(kind: type[R], name: str, words: list[str]) -> tuple[R, Config, str]:
    """The command whose words are a recipe and its settings, these settings, and what `settled` says of them."""
    recipe, found = load_sized(words[0], _last_value(words, "--data.path"))
    others, first = take_start_words(words[1:])
    if NO_START in others:
        if first:
            raise ValueError(f"{NO_START} leaves out the run that --start has settings of: give only one")
        others = [word for word in others if word != NO_START]
        recipe = replace(recipe, start={})
    recipe = _with_kinds(recipe, others)
    others, by_name = take_table_words(others)
    command = parse(kind, f"{name} {words[0]}", others, kind(**vars(_parsed(recipe))))
    config = Config(**{entry.name: getattr(command, entry.name) for entry in dataclasses.fields(Config)})
    config = with_tables_by_name(with_tables_by_name(config, recipe.tables.by_name), by_name)
    config = _with_start(config, recipe.start, first, words[0]) if first else replace(config, start=recipe.start)
    return command, *settled(config, found)


def _plan(words: list[str]) -> None:
    if _names_no_recipe(words, "plan needs a recipe first: logitmix plan RECIPE --world-size 8 --device cuda"):
        print(PLAN_USAGE.format(recipes=", ".join(recipe_names())))
        return
    command, config, _ = _of_recipe(PlanCommand, "plan", words)
    from logitmix.trainer.commands.plan import plan_job
    from logitmix.trainer.parallel.plan import Devices

    require(command.gpu_gib > 0, "--gpu-gib", command.gpu_gib, "above 0")
    per_host = command.per_host or min(command.world_size, 8)
    memory = int(command.gpu_gib * 2**30) if command.device == "cuda" else None
    plan = plan_job(config, Devices(command.world_size, per_host, command.device, memory))
    print(json.dumps(dataclasses.asdict(plan)) if command.json else shown(plan.text()))


def _parsed(config: Config) -> Config:
    """What tyro parses: it would make flags of its own for the names in these dictionaries."""
    return replace(config, start={}, tables=replace(config.tables, by_name={}))


def _with_start(config: Config, start: Mapping[str, Any], words: list[str], recipe: str) -> Config:
    """The configuration with the recipe's section [start] and these words, which came after --start."""
    if config.warm_start:
        raise ValueError("--start has settings of a run that is trained first, in place of --warm-start: give only one")
    try:
        first = _with_kinds(with_settings(config.inherited(), flatten(start)), words)
        others, by_name = take_table_words(words)
        given = parse(Config, f"train {recipe}", others, _parsed(first))
        given = with_tables_by_name(with_tables_by_name(given, first.tables.by_name), by_name)
    except ValueError as error:
        raise ValueError(f"--start: {error}") from None
    return with_start(config, given)


def _words_of_refit(words: list[str]) -> list[str]:
    """`--refit RUN …` as the words that resume the run with train.refit."""
    _, equals, run = words[0].partition("=")
    run, others = (run, words[1:]) if equals else ("".join(words[1:2]), words[2:])
    if not run or not (config := fetched_run(run) / "config.toml").is_file():
        raise ValueError(f"--refit needs a run directory, and {run!r} is none: logitmix train --refit RUN")
    if _last_value(others, "--run"):
        raise ValueError(f"--run has no place beside --refit: the refit's directory is in that of the run, {run}")
    return [str(config), *others, "--train.refit", "--run", run]


def _with_kinds(config: Config, words: list[str]) -> Config:
    """The recipe with the kinds that the words choose: which settings exist depends on them."""
    kinds: dict[str, Any] = {}
    for name, classes in KINDS.items():
        prefix = f"--{name.removesuffix('kind')}"
        flags = [word.removeprefix(prefix).partition("=") for word in words if word.startswith(prefix)]
        settings = [flag.removeprefix("no-").replace("-", "_") for flag, _, _ in flags]
        kinds[name] = _last_value(words, f"--{name}") or flatten(config)[name]
        class_of_kind(classes, kinds[name], settings, prefix.strip("-."))
    return with_settings(config, kinds)


def _last_value(words: Sequence[str], flag: str) -> str:
    """A flag's value in the words, before they are parsed: the last one counts, as for the parser. Empty if there is
    none."""
    found = ""
    for word, following in pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        if name == flag:
            found = value if equals else following
    return found


def _evaluate(words: list[str]) -> None:
    command = parse(EvaluateCommand, "evaluate", words)
    _start_ranks("evaluate", words, command.processes)
    _let_threads_sleep()
    from logitmix.trainer.evaluation.evaluate import evaluate_run
    from logitmix.trainer.run.results import cold_targets
    from logitmix.trainer.run.stages import final_run

    run, threads = fetched_run(command.run), _threads(command.threads)
    results = evaluate_run(run, command.split, command.exclude_history, command.users, command.device, threads)
    if _is_main():
        ranked = shown(final_run(run) if command.split == "test" else run)
        title = f"{ranked}: {command.split}, checkpoint of step {results['step']}"
        _show_metrics(results, title, command.json)
        if line := cold_targets(results):
            print(f"{command.split}: {line}", file=sys.stderr)


def _compare(words: list[str]) -> None:
    command, settings = _of_comparison(words)
    _start_ranks("compare", words, command.processes)
    _let_threads_sleep()
    from logitmix.trainer.commands.compare import as_text, compare

    out = path_of(command.out or f"runs/compare-{Path(command.dataset).resolve().name}")
    methods = list(dict.fromkeys(command.methods))
    found = compare(command.dataset, out, command.minutes, methods, _threads(command.threads), settings)
    if _is_main():
        print(json.dumps(found) if command.json else shown(as_text(found)), end="\n" if command.json else "")


def _of_comparison(words: list[str]) -> tuple[CompareCommand, dict[str, Any]]:
    """The command, and the settings of data and evaluate that its words give."""
    dataset = parse(CompareCommand, "compare", words).dataset
    # Now that the dataset is known, so are the values of what is not given.
    sized, _ = load_sized(AUTO, dataset)
    default = CompareCommand(
        dataset,
        minutes=tyro.MISSING,
        data=replace(sized.data, path=dataset),
        evaluate=replace(sized.evaluate, baselines=False),
    )
    command = parse(CompareCommand, "compare", words, default)
    before, now = (flatten(of.data, "data.") | flatten(of.evaluate, "evaluate.") for of in (default, command))
    return command, {name: value for name, value in now.items() if before[name] != value}


def _report(words: list[str]) -> None:
    command = parse(ReportCommand, "report", words)
    from logitmix.trainer.commands.report import write_report

    write_report([fetched_run(run) for run in command.runs], Path(command.out))
    print(shown(command.out))


def _export(words: list[str]) -> None:
    command = parse(ExportCommand, "export", words)
    _start_ranks("export", words, command.processes)
    _let_threads_sleep()
    from logitmix.trainer.export.export import EXTRAS, Extra, export

    extras: list[Extra] = [name for name in EXTRAS if getattr(command, name, False)]
    if command.programs_cpu == "avx2":
        require(command.programs, "--programs-cpu", "avx2", "native without --programs")
        extras[extras.index("programs")] = "programs_avx2"
    manifest = export(
        fetched_run(command.run),
        path_of(command.out),
        command.overwrite,
        command.checkpoint,
        command.item_cache,
        command.precision,
        extras,
    )
    if not _is_main():
        return
    if command.json:
        print(json.dumps(manifest))
    else:
        print(f"{shown(command.out)}: {manifest['num_items']:,} items, step {manifest['step']} of {shown(command.run)}")
        if manifest["precision"] != command.precision:
            print(f"{command.precision} cannot hold the items' sides: they are stored in {manifest['precision']}")


def _retrieve(words: list[str]) -> None:
    command = parse(RetrieveCommand, "retrieve", words)
    _start_ranks("retrieve", words, command.processes)
    _let_threads_sleep()
    from logitmix.serving.retriever import Retriever

    with _items_group("retrieve") as group:
        retriever = Retriever.load(command.directory, group=group)
        if _is_main():
            _show_items(retriever, command)
            retriever.release()
        else:
            retriever.follow()


def _show_items(retriever: "Retriever", command: RetrieveCommand) -> None:
    from logitmix.serving.request import Options

    exclude = None if command.exclude_history == "auto" else command.exclude_history == "yes"
    options = Options(command.k, command.unknown, exclude, command.stage1)
    request: Request = {
        "history": parts("--history", command.history),
        "timestamps": whole_numbers("--timestamps", command.timestamps),
        "user": json_value("--user", command.user, dict),
        "events": json_value("--events", command.events, list),
        "blocked": parts("--blocked", command.blocked),
    }
    if command.allowed:
        request["allowed"] = parts("--allowed", command.allowed)
    if command.time is not None:
        request["time"] = command.time
    if command.histories or command.out:
        count = _answer_file(retriever, command, options)
        print(f"{shown(command.out)}: {count:,} requests answered")
        return
    (rows,) = retriever.answer([request], options)
    if command.json:
        print(json.dumps(rows))
        return
    table = Table("rank", "item", "title", "score")
    for row in rows:
        # Text, because in brackets it would be read as markup.
        table.add_row(str(row["rank"]), Text(shown(row["id"])), Text(shown(row["title"] or "")), f"{row['score']:.4f}")
    Console().print(table)


def _answer_file(retriever: "Retriever", command: RetrieveCommand, options: "Options") -> int:
    """Answers all requests of a file; returns their number."""
    from logitmix.serving.request_file import answer_file, read_requests

    if not (command.histories and command.out):
        raise ValueError("--histories FILE needs --out FILE, and the other way round")
    for name in ("history", "timestamps", "time", "allowed", "blocked"):
        if getattr(command, name) not in ("", None):
            raise ValueError(f"--{name} is for one request; beside --histories say it in the file")
    if (command.user, command.events) != ("{}", "[]"):
        raise ValueError("--user and --events are for one request; beside --histories say it in the file")
    requests = read_requests(Path(command.histories))
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("answering", total=len(requests))
        answer_file(retriever, requests, Path(command.out), options, lambda count: bar.advance(task, count))
    return len(requests)


def _serve(words: list[str]) -> None:
    command = parse(ServeCommand, "serve", words)
    _start_ranks("serve", words, command.processes)
    _let_threads_sleep()
    from logitmix.serving.server import Allowed, serve

    allowed, directory = Allowed(command.allow_host, command.allow_origin), path_of(command.directory)
    with _items_group("serve") as group:
        serve(directory, command.host, command.port, command.threads, command.wait_ms, group, allowed)


def _update_items(words: list[str]) -> None:
    command = parse(UpdateItemsCommand, "update-items", words)
    _let_threads_sleep()
    from logitmix.trainer.export.update import update_items

    counts = update_items(path_of(command.directory), command.items, command.item_column, Console(stderr=True))
    if command.json:
        print(json.dumps(counts))
    else:
        print(
            f"{shown(command.directory)}: {counts['added']:,} items added, {counts['known']:,} were there already, "
            f"{counts['num_items']:,} now"
        )


def _doctor(words: list[str]) -> None:
    command = parse(DoctorCommand, "doctor", words)
    from logitmix.trainer.commands import doctor

    if launched():
        doctor.meet()
        return
    findings = []
    for finding in doctor.examine():
        findings.append(finding)
        if not command.json:
            remedy = f" ({finding.remedy})" if finding.remedy else ""
            print(f"{finding.state:<6}  {finding.subject:<11}  {finding.said}{remedy}", flush=True)
    broken = [finding.subject for finding in findings if finding.state == "broken"]
    if command.json:
        print(json.dumps({"broken": broken, "findings": [dataclasses.asdict(finding) for finding in findings]}))
    if broken:
        raise SystemExit(1)


def _start_ranks(command: str, words: list[str], count: int) -> None:
    """Starts the ranks that `words` ask for, and ends with their exit status; does nothing within a rank, or for one
    rank."""
    require(count >= 1, "--processes", count, "at least 1")
    if launched():
        world_size = os.environ.get("WORLD_SIZE", "")
        if count > 1 and world_size != str(count):
            raise ValueError(f"--processes is {count}, but a launcher has started {world_size} ranks; leave it out")
    elif count > 1:
        threads = _threads_of_each(count) if command in ("retrieve", "serve") else 1
        plugins = [word for plugin in references() for word in ("--import", plugin)]
        raise SystemExit(run_ranks([command, *words, *plugins], count, threads, is_server=command == "serve"))


def _threads_of_each(count: int) -> int:
    """Of processes that divide the cores of this host."""
    return max(1, cores() // count)


def _threads(given: int) -> int:
    """Of this rank: as given, or where that is 0, its share of this host's cores."""
    return given or _threads_of_each(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


@contextlib.contextmanager
def _items_group(command: str) -> "Iterator[ProcessGroup | None]":
    """The group of the ranks that share an export's items; None where no launcher has started this process."""
    if not launched():
        yield None
        return
    from logitmix.comm.process_group import process_group
    from logitmix.trainer.run.agreement import facts_of

    with process_group("cpu", PATIENCE, facts_of(command, None, None), _end_lost) as ranks:
        yield ranks.group


COMMANDS: Mapping[str, Callable[[list[str]], None]] = {
    "prepare": _prepare,
    "train": _train,
    "plan": _plan,
    "evaluate": _evaluate,
    "compare": _compare,
    "report": _report,
    "export": _export,
    "retrieve": _retrieve,
    "serve": _serve,
    "update-items": _update_items,
    "doctor": _doctor,
}


def _show_metrics(metrics: Mapping[str, float], title: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps(metrics))
        return
    beside = [name for name in BESIDE if f"{name}/hr@10" in metrics]
    heads = ("model", *(BESIDE[name] for name in beside)) if beside else ("value",)
    table = Table("metric", *heads, title=Text(shown(title)))
    for name in metrics:
        if name.partition("/")[0] not in beside:
            names = [name, *(f"{of}/{name}" for of in beside)]
            table.add_row(Text(shown(name)), *(_number(metrics[of]) if of in metrics else "" for of in names))
    Console().print(table)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


def _out_of_memory(error: Exception) -> str:
    wanted = re.search(r"allocate (\d+) bytes|allocate ([\d.]+ \S*B)", str(error))
    size = f" for {int(wanted[1]) / 2**30:,.1f} GiB" if wanted and wanted[1] else f" for {wanted[2]}" if wanted else ""
    return (
        f"there is not enough memory{size}; lower what takes it: train.batch_size, model.loss.negatives, "
        "model.encoder.max_length, model.dim, evaluate.batch_size"
    )


def _let_threads_sleep() -> None:
    """Call before torch is loaded. OpenMP's threads spin while they wait for work, which made ranking take three times
    as long on shared cores."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _what_to_install(command: str, error: ModuleNotFoundError) -> str:
    """The missing modules and the command that installs them; a missing module of logitmix is our own bug."""
    module = (error.name or "").partition(".")[0]
    if module in ("", "logitmix"):
        raise error
    if module in BASE_MODULES:
        return f"{command} needs {module}: pip install logitmix"
    extra = "serve" if command == "serve" else "train"
    others = [name for name in EXTRA_MODULES[extra] if name != module and find_spec(name) is None]
    return f"{command} needs {', '.join([module, *others])}: pip install 'logitmix[{extra}]'"


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _fail(message: str, status: int) -> NoReturn:
    message = " ".join(message.splitlines())
    say(f"logitmix: {message}")
    _tell_others(message, status)
    raise SystemExit(status)


def _end_lost(line: str) -> NoReturn:
    """Ends the process without destructors, which may wait for the lost rank."""
    say(f"logitmix: {line}")
    os._exit(LOST_PEER)


def _tell_others(message: str, status: int) -> None:
    """Tells ranks on other hosts of a failure before they have met, for they would wait in vain."""
    if launched() and status in (1, USER_ERROR):
        with contextlib.suppress(ImportError):
            from logitmix.comm.process_group import tell_failure

            tell_failure(message, status == USER_ERROR)


if __name__ == "__main__":
    main()
