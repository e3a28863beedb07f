"""Quality and CPU time from period to period: a run that goes on (`--append`, `--continue`), one that is trained anew,
and the first one as it is.

    python -m benchmarks.weeks --source ratings.dat --first 2000-12-01 > months.json
    python -m benchmarks.weeks --period weeks --every 2 > weeks.json
    python -m benchmarks.weeks --reports months.json weeks.json --plot docs/weeks.svg

`--source` has MovieLens's lines `user::item::rating::time`, plain or .gz; without it, the actions are those of the
synthetic dataset `demo`, or with `--passing` of items that come and go: 60 a week, each of a kind that users like more
or less, and taken a third as often each week. The first dataset has all actions before `--first`. Then one period comes
after the other. Before it is trained on, it is the test part of a run that has seen all before it: a user's first
action of the period is ranked among all items, given the user's earlier ones. Three runs are compared, by a user's
commands:

- anew: `prepare` of all actions so far, `train` from random weights for `--epochs`;
- continued: `prepare --append` of the period, `train --continue` of the run before for `--more` epochs, which begin
  with the users who have new actions;
- first: the run before the first period, not trained further: one step with a learning rate of nearly 0.

CPU seconds are those of the commands, with their start of some seconds each and the evaluation of the test part.
"""

import gzip
import json
import sys
import tempfile
from contextlib import chdir
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro

from benchmarks.measure import cpu_seconds, drawing, logitmix, machine
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.run.results import read_results

Actions = list[tuple[int, str, str]]
"""Time, user, item; in order."""
METRICS = ("hr@10", "hr@50")
NO_RATE = ("--tables.lr", "1e-12", "--dense.lr", "1e-12", "--train.epochs", "1e-6")


@dataclass(frozen=True)
class Options:
    first: str = "2021-03-15"
    """The day on which the first period begins."""
    recipe: str = "ml-1m-dot"
    source: str = ""
    passing: bool = False
    period: Literal["weeks", "months"] = "months"
    every: int = 1
    """Weeks or months of a period."""
    periods: int = 7
    epochs: float = 15
    """Of a run that is trained anew."""
    more: float = 1
    """Of one that goes on."""
    settings: str = "--model.encoder.max-length 50"
    """Of all runs."""
    write: str = ""
    """A CSV of the actions to write; nothing is measured."""
    plot: str = ""
    """An SVG of HR@10 and CPU seconds by period."""
    reports: tuple[str, ...] = ()
    """What this program has printed: it is plotted, and nothing is measured."""


def main(options: Options) -> None:
    if options.write:
        return _write(options.write, _actions(options))
    reports = [json.loads(Path(of).read_text()) for of in options.reports]
    if not reports:
        actions = _actions(options)
        with tempfile.TemporaryDirectory() as folder, chdir(folder):
            reports = [measured(options, actions)]
        print(json.dumps(reports[0], indent=1))
    if options.plot:
        plot(Path(options.plot), reports)


def _actions(options: Options) -> Actions:
    return _movielens(Path(options.source)) if options.source else _passing() if options.passing else _demo()


def measured(options: Options, actions: Actions) -> dict[str, Any]:
    """Writes into the current folder."""
    bounds = _bounds(options)
    periods = [
        [action for action in actions if start <= action[0] < end]
        for start, end in zip([0, *bounds], [*bounds, bounds[-1]], strict=True)
    ][:-1]
    settings = [*options.settings.split(), "--data.split", "time", "--data.no-validation", "--evaluate.no-baselines"]
    settings += ["--train.threads", "1", "--evaluate.every-epochs", f"{options.epochs}"]
    rows: list[dict[str, Any]] = []
    for number, period in enumerate(periods):
        _write(f"{number}.csv", period)
        _write(f"until-{number}.csv", [action for each in periods[: number + 1] for action in each])
        if not number:
            _cpu(_prepare(0, "appended-0"))
            continue
        share = len(period) / sum(map(len, periods[: number + 1]))
        held = [*settings, "--data.held-out", f"{share:.12f}"]
        spent: dict[str, dict[str, float]] = {}
        appended = _cpu(["prepare", "table", "--source", f"{number}.csv", "--append", f"appended-{number - 1}",
                         "--out", f"appended-{number}"])  # fmt: skip
        whole = _cpu(_prepare(number, f"whole-{number}"))
        anew = ["train", options.recipe, "--data.path", f"whole-{number}", "--run", f"anew-{number}", *held]
        spent["anew"] = {"prepare": whole, "train": _cpu([*anew, "--train.epochs", f"{options.epochs}"])}
        on = ["--data.path", f"appended-{number}", *held]
        if number == 1:
            # There is nothing to go on from.
            once = [options.recipe, "--run", "continued-1", "--train.epochs", f"{options.epochs}", *on]
            spent["continued"] = {"prepare": appended, "train": _cpu(["train", *once])}
        else:
            for name, before, epochs in (
                ("continued", number - 1, ("--train.epochs", f"{options.more}")),
                ("first", 1, NO_RATE),
            ):
                earlier = ["--continue", f"continued-{before}", "--run", f"{name}-{number}"]
                words = ["train", options.recipe, *earlier, *on, *epochs]
                spent[name] = {"prepare": appended, "train": _cpu(words)}
        row: dict[str, Any] = {"actions": len(period), "of all": round(share, 4)}
        for name, cpu in spent.items():
            results = read_results(Path(f"{name}-{number}"))
            row["users"] = int(results["users"])
            row[name] = {metric: results[metric] for metric in METRICS} | cpu
        rows.append(row)
        print(f"{number}: {row}", file=sys.stderr, flush=True)
    given = {name: of for name, of in vars(options).items() if name not in ("plot", "reports")}
    return {"machine": machine(), "options": given, "periods": rows, "mean": _mean(rows[1:])}


def _mean(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """From the second period on: metrics over all users that were ranked, CPU seconds a period."""
    users = np.array([row["users"] for row in rows])
    means: dict[str, dict[str, float]] = {}
    for name in ("anew", "continued", "first"):
        of = {key: np.array([row[name][key] for row in rows]) for key in rows[0][name]}
        means[name] = {
            key: round(float((values * users).sum() / users.sum() if key in METRICS else values.mean()), 4)
            for key, values in of.items()
        }
    return means | {"users": {"all": int(users.sum())}}


def _prepare(number: int, out: str) -> list[str]:
    return ["prepare", "table", "--source", f"until-{number}.csv", "--min-user-actions", "0", "--out", out]


def _cpu(words: list[str]) -> float:
    """CPU seconds of a command."""
    return round(cpu_seconds(partial(logitmix, *words)), 1)


def _movielens(path: Path) -> Actions:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    fields = (line.split("::") for line in text.decode("latin-1").splitlines())
    return sorted((int(time), user, item) for user, item, _, time in fields)


def _demo() -> Actions:
    with tempfile.TemporaryDirectory() as folder:
        _cpu(["prepare", "demo", "--out", f"{folder}/demo"])
        dataset = load_dataset(f"{folder}/demo")
    users = np.repeat(np.arange(dataset.num_users), np.diff(dataset.offsets))
    found = zip(dataset.timestamps_flat.tolist(), users.tolist(), dataset.items_flat.tolist(), strict=True)
    return sorted((time, f"u{user}", f"i{item}") for time, user, item in found)


def _passing() -> Actions:
    """Of 24 weeks until 2021-03-15 and 7 after it."""
    chance, found = np.random.default_rng(0), []
    begin, week, kinds = int(datetime(2021, 3, 15, tzinfo=UTC).timestamp()), 7 * 86_400, 12
    kind_X = chance.integers(0, kinds, 60 * 32)
    liked_UK = np.exp(2 * chance.standard_normal((800, kinds)))
    appeal_X = chance.exponential(size=len(kind_X))
    for number in range(1, 32):
        # The items of this week and of those before it.
        item_N = np.arange(max(0, number - 6) * 60, number * 60)
        weight_N = appeal_X[item_N] * 3.0 ** (item_N // 60 - number)
        for user in range(len(liked_UK)):
            chance_N = weight_N * liked_UK[user, kind_X[item_N]]
            items = chance.choice(item_N, 5, False, chance_N / chance_N.sum())
            times = begin + week * (number - 25) + np.sort(chance.integers(0, week, 5))
            found += [(int(time), f"u{user}", f"i{item}") for time, item in zip(times, items, strict=True)]
    return sorted(found)


def _bounds(options: Options) -> list[int]:
    """Where the periods begin, and where the last one ends."""
    first = datetime.fromisoformat(options.first).replace(tzinfo=UTC)
    starts = []
    for number in range(0, (options.periods + 1) * options.every, options.every):
        months = first.month - 1 + number
        by_month = first.replace(year=first.year + months // 12, month=months % 12 + 1)
        starts.append(by_month if options.period == "months" else first + timedelta(weeks=number))
    return [int(of.timestamp()) for of in starts]


def _write(name: str, actions: Actions) -> None:
    lines = (f"{user},{item},{time}\n" for time, user, item in actions)
    Path(name).write_text("user,item,timestamp\n" + "".join(lines))


def plot(path: Path, reports: list[dict[str, Any]]) -> None:
    with drawing(path, len(reports), 2, figsize=(9, 3 * len(reports)), squeeze=False) as (_, panels):
        for report, (left, right) in zip(reports, panels, strict=True):
            rows, given = report["periods"], report["options"]
            numbers = range(1, len(rows) + 1)
            for name, style in (("anew", "o-"), ("continued", "s-"), ("first", "^:")):
                at = [number for number, row in zip(numbers, rows, strict=True) if name in row]
                of = [row[name] for row in rows if name in row]
                left.plot(at, [each["hr@10"] for each in of], style, label=name, markersize=4)
                if name != "first":
                    right.plot(at, [each["prepare"] + each["train"] for each in of], style, label=name, markersize=4)
            of_period = f"{given['every']} {given['period']}" if given["every"] > 1 else given["period"].rstrip("s")
            of_data = "MovieLens-1M" if given["source"] else "passing items" if given.get("passing") else "demo"
            left.set(xlabel=f"period ({of_period})", title=f"{of_data}: HR@10 on the period")
            right.set(xlabel=f"period ({of_period})", title="CPU seconds of prepare and train")
            for panel, bottom in ((left, None), (right, 0)):
                panel.margins(y=0.25)
                panel.set_ylim(bottom=bottom)
                panel.grid(alpha=0.3)
                panel.legend(loc="upper center", ncols=3)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
