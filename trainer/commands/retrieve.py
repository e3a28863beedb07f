"""`logitmix retrieve`: the top items for a history, or for each request of a file."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from logitmix.common.mappings import counted
from logitmix.common.messages import say, show, shown
from logitmix.launch.processes import launched
from logitmix.trainer.commands.options import ExportPlace, JSONOption, excludes_history, importing
from logitmix.trainer.commands.words import json_value, parse, parts, whole_numbers
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
    timestamps: str = ""
    """Times of these items, whole numbers in the unit of the dataset's times, separated by commas. A model that uses
    recency or times takes them; other models ignore them."""
    time: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: the last timestamp)")] = None
    """When the request is made, in the same unit. For models with times."""
    user: str = "{}"
    """Features of the user, as a JSON object: {"age": "25"}."""
    events: str = "[]"
    """Features of the events, as a JSON list of objects, one for each item of the history."""
    want: str = ""
    """Which kind of action is to come. For models with model.wanted."""
    allowed: str = ""
    """Raw item ids, written as those of --history: only these are ranked. All when left empty."""
    blocked: str = ""
    """Raw item ids, written as those of --history, that are left out."""
    where: str = ""
    """A condition on the export's filterable columns: "in_stock = 1 and (price < 50 or category in ('shoes', 'bags'))".
    Only items for which it is true are ranked."""
    limit: str = "{}"
    """Most items of a value of such columns in the answer, as a JSON object: {"category": 3}."""
    histories: str = ""
    """File of requests, one JSON value per line: a list of raw item ids, or an object as the server takes it. The other
    options are for requests that do not say. The answers go to the file --out."""
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
    request: Request = {
        "history": parts("--history", arguments.history),
        "timestamps": whole_numbers("--timestamps", arguments.timestamps),
        "user": json_value("--user", arguments.user, dict, '{"age": "25"}'),
        "events": json_value("--events", arguments.events, list, '[{"event": "view"}]'),
        "blocked": parts("--blocked", arguments.blocked),
        "where": arguments.where,
        "limit": json_value("--limit", arguments.limit, dict, '{"category": 3}'),
    }
    if arguments.allowed:
        request["allowed"] = parts("--allowed", arguments.allowed)
    if arguments.want:
        request["want"] = arguments.want
    if arguments.time is not None:
        request["time"] = arguments.time
    if arguments.histories or arguments.out:
        return _answer_file(retriever, arguments, options)
    if arguments.want:
        retriever.wanted_row(arguments.want)
    (answer,) = retriever.ask([request], asdict(options))
    if "error" in answer:
        raise ValueError(answer["error"])
    rows = answer["items"]
    for line in _unused(retriever, request):
        say(line)
    if "fallback" in answer:
        say("nothing is known of the user: these items have the most actions, and the score is their number")
    if not rows:
        say("no item is left by --where, --allowed, --blocked and the history")
    if arguments.json:
        print(json.dumps(answer))
        return
    table = Table("rank", "item", "title", "score", *(("components", "most like") if arguments.explain else ()))
    for row in rows:
        # Text, because in brackets it would be read as markup.
        texts = Text(shown(row["id"])), Text(shown(row["title"] or ""))
        table.add_row(str(row["rank"]), *texts, f"{row['score']:.4f}", *_why(row))
    Console().print(table)


def _unused(retriever: "Retriever", request: "Request") -> list[str]:
    """Lines about what the request has that its answer does not depend on."""
    lines, values = [], list[str]()
    for flag, ids in (("--allowed", request.get("allowed", [])), ("--blocked", request["blocked"])):
        unknown = [raw_id for raw_id in map(str, ids) if retriever.raw_ids.find(raw_id) is None]
        if unknown:
            lines.append(
                f"{len(unknown):,} of {counted(len(ids), 'id')} of {flag} are no items, such as {unknown[0]!r}"
            )
    if request["user"]:
        values += retriever.features.unknown("user", [request["user"]])
    if request["events"]:
        values += retriever.features.unknown("event", request["events"])
    if values:
        lines.append(f"{counted(len(values), 'value')} that training did not see, such as {values[0]}: as if missing")
    if (request["timestamps"] or "time" in request) and not retriever.takes_times:
        lines.append("--timestamps and --time are not used: the model has no recency, times or dates")
    return lines


def _why(row: "Row") -> list[Text]:
    """The cells that explain a row, if it is explained."""
    if "why" not in row:
        return []
    parts = [f"{of['query']}·{of['item']}: {of['score']:.2f}" for of in row["why"]["components"]]
    items = [f"{shown(of['title'] or of['id'])} ({of['cosine']:.2f})" for of in row["why"]["similar"]]
    return [Text("\n".join(parts)), Text("\n".join(items))]


def _answer_file(retriever: "Retriever", arguments: Arguments, options: "Options") -> None:
    """Answers all requests of a file, and says how many could not be answered."""
    from logitmix.serving.request import OPTIONS, Request
    from logitmix.serving.request_file import answer_file, line_of, read_requests

    if not (arguments.histories and arguments.out):
        raise ValueError("--histories FILE needs --out FILE, and the other way round")
    for name in Request.__annotations__:
        if name not in OPTIONS and getattr(arguments, name) != getattr(Arguments, name):
            raise ValueError(f"--{name} is for one request; beside --histories say it in the file")
    requests = read_requests(Path(arguments.histories))
    with counting("answering", len(requests)) as advance:
        problems = answer_file(retriever, requests, Path(arguments.out), asdict(options), advance)
    for number, problem in list(problems.items())[:1]:
        place = f"{arguments.histories}, line {line_of(number, Path(arguments.histories))}"
        say(f"{counted(len(problems), 'request')} cannot be answered, such as {place}: {problem}")
    show(f"{arguments.out}: {counted(len(requests) - len(problems), 'request')} answered")
