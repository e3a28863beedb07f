"""`logitmix retrieve`: the top items for a history, or for each request of a file."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from logitmix.common.mappings import counted
from logitmix.common.messages import say, show, shown
from logitmix.launch.processes import launched
from logitmix.trainer.commands.options import ExportPlace, JSONOption, excludes_history, importing
from logitmix.trainer.commands.words import json_value, parse, parts
from logitmix.trainer.config import HistoryRule
from logitmix.trainer.progress import counting

if TYPE_CHECKING:
    from logitmix.serving.request import Options, Request
    from logitmix.serving.retriever import Retriever, Row


@dataclass(frozen=True)
class Arguments(JSONOption):
    """The top items for one request."""

    directory: ExportPlace
    """Serving directory."""
    history: str = ""
    """Raw item ids, oldest first, separated by commas, as a row of CSV: an id that has a comma itself goes into double
    quotes, '"a,b",c'."""
    request: str = "{}"
    """What more there is to the request, as a JSON object that the server takes: {"user": {"age": "25"}, "timestamps":
    [978301968, 978302109], "where": "price < 50", "blocked": ["1193"]}."""
    histories: str = ""
    """File of requests, one JSON value per line: a list of raw item ids, or an object as --request. The options below
    are for requests that do not say. The answers go to the file --out."""
    out: str = ""
    """File to write with --histories: one JSON object per line, the answer to each request, with its items or its
    error."""
    unknown: Literal["refuse", "skip", "unknown"] = "refuse"
    """What to do with unknown ids of the history: refuse them, skip them, or use an unknown item for them."""
    k: Annotated[int, tyro.conf.arg(aliases=["-k"])] = 10
    """How many items."""
    stage1: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: 1 %, from 10,000)")] = None
    """K': items that the h-indexer keeps for the similarity to rank."""
    exclude_history: HistoryRule = "auto"
    """Leave items of the history out; auto: as in the run's evaluation."""
    boost_new: float = 0.0
    """Added to the scores of new items: those for which the filterable column new is not 0."""
    explain: bool = False
    """Say why each item is there: the components' products that make up its score, and the most similar items of the
    history."""


def run(words: list[str]) -> None:
    arguments = parse(Arguments, "retrieve", words)
    if launched():
        raise ValueError("retrieve is no job for torchrun; recommend answers for many users on several processes")
    with importing():
        from logitmix.serving.retriever import Retriever

    show_items(Retriever.load(arguments.directory), arguments)


def show_items(retriever: "Retriever", arguments: Arguments) -> None:
    """Answers the request or the file of requests, and prints the items or the number of answers."""
    from logitmix.serving.request import Options

    exclude = excludes_history(arguments.exclude_history)
    options = Options(
        arguments.k,
        arguments.unknown,
        exclude,
        arguments.stage1,
        arguments.explain,
        boost_new=arguments.boost_new,
    )
    given = json_value("--request", arguments.request, dict, '{"user": {"age": "25"}}')
    if arguments.histories or arguments.out:
        return _answer_file(retriever, arguments, options, given)
    request: Request = {"history": parts("--history", arguments.history), **given}  # type: ignore[typeddict-item]
    (answer,) = retriever.ask([request], asdict(options))
    if "error" in answer:
        raise ValueError(answer["error"])
    rows = answer["items"]
    if "fallback" in answer:
        say("nothing is known of the user: these items have the most actions, and the score is their number")
    if not rows:
        say("no item is left by the request's conditions and the history")
    if arguments.json:
        print(json.dumps(answer))
        return
    table = Table("rank", "item", "title", "score", *(("components", "most like") if arguments.explain else ()))
    for row in rows:
        # Text, because in brackets it would be read as markup.
        texts = Text(shown(row["id"])), Text(shown(row["title"] or ""))
        table.add_row(str(row["rank"]), *texts, f"{row['score']:.4f}", *_why(row))
    Console().print(table)


def _why(row: "Row") -> list[Text]:
    """The cells that explain a row, if it is explained."""
    if "why" not in row:
        return []
    parts = [f"{of['query']}·{of['item']}: {of['score']:.2f}" for of in row["why"]["components"]]
    items = [f"{shown(of['title'] or of['id'])} ({of['cosine']:.2f})" for of in row["why"]["similar"]]
    return [Text("\n".join(parts)), Text("\n".join(items))]


def _answer_file(retriever: "Retriever", arguments: Arguments, options: "Options", given: dict[str, Any]) -> None:
    """Answers all requests of a file, and says how many could not be answered."""
    from logitmix.serving.request_file import answer_file, line_of, read_requests

    if not (arguments.histories and arguments.out):
        raise ValueError("--histories FILE needs --out FILE, and the other way round")
    if arguments.history or given:
        raise ValueError("--history and --request are for one request; beside --histories say it in the file")
    requests = read_requests(Path(arguments.histories))
    with counting("answering", len(requests)) as advance:
        problems = answer_file(retriever, requests, Path(arguments.out), asdict(options), advance)
    for number, problem in list(problems.items())[:1]:
        place = f"{arguments.histories}, line {line_of(number, Path(arguments.histories))}"
        say(f"{counted(len(problems), 'request')} cannot be answered, such as {place}: {problem}")
    show(f"{arguments.out}: {counted(len(requests) - len(problems), 'request')} answered")
