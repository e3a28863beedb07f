"""`logitmix report`: runs as one HTML page that needs no network and no script: which is best, and what differs.

report.html is its template. The page is well-formed XML, so that a parser can find errors in it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from logitmix.common.files import write_whole
from logitmix.common.messages import shown
from logitmix.trainer.commands.charts import COLORS, POINTS, chart
from logitmix.trainer.commands.groups import (
    Difference,
    Group,
    Run,
    best_of,
    differences,
    differing,
    grouped,
    mean_of,
    short_names,
    verdict,
)
from logitmix.trainer.config import COMPARED_WITH
from logitmix.trainer.run.folder import refit_path, start_path
from logitmix.trainer.run.results import beside_baselines, cold_targets

POPULARITY = ("top 1 %", "next 9 %", "other 90 %")
"""Parts of the corpus."""
WIDE = "hr@200"
"""Candidates are many: what the first places say is not all."""
SHOWN = ("hr@10", "hr@50", WIDE, "ndcg@10", "mrr")
"""Test metrics that are always seen; the others are folded where several groups are compared."""
Z95 = 1.959964
"""95 % of a normal distribution lie within this many standard deviations."""


@dataclass(frozen=True)
class Cell:
    """A text of the page with what stands beside it; or, if it has parts, a bar."""

    text: str | None = None
    soft: str = ""
    """Text that stands after the main one, in a muted color."""
    colors: Sequence[int] = ()
    """Numbers of the groups or parts whose colors stand before the text."""
    is_best: bool = False
    tip: str = ""
    """Shown when the pointer is on the text."""
    bar: Sequence[tuple[str, str, float]] = ()
    """Name, text and width, in percent of the longest bar, of each part."""


@dataclass(frozen=True)
class Table:
    """Texts and Cells; None where nothing is known."""

    heads: Sequence[object]
    rows: Sequence[Sequence[object]]


class Column(NamedTuple):
    head: object
    cells: Sequence[object]


@dataclass(frozen=True)
class Section:
    title: str
    notes: Sequence[object] = ()
    tables: Sequence[Table] = ()
    charts: Sequence[tuple[str, Markup]] = ()
    """Titles, and curves as SVG."""
    folded: "Section | None" = None
    """What is seen when its title is clicked."""


def write_report(paths: Sequence[Path], out: Path) -> None:
    """Writes the runs' page into the file `out`. ValueError if a path is not a run directory, or none is given."""
    if not paths:
        raise ValueError("report needs run directories: logitmix report RUN ...")
    write_whole(out, page([Run.read(path) for path in paths]))


def page(runs: Sequence[Run]) -> str:
    """Returns the text of the page."""
    groups = grouped(runs)
    metric = runs[0].settings["evaluate.metric"]
    to_best = differences(groups, metric)
    sections = [
        _results(groups),
        _by_group(groups, metric),
        _curves(groups, metric),
        _popularity(groups),
        _step(groups),
        _wire(groups),
        _components(groups),
        _settings(groups),
    ]
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else shown(value),
    )
    return templates.get_template("report.html").render(
        title="logitmix: " + ", ".join(str(run.path) for run in runs),
        heading="Runs" if len(runs) > 1 else "Run",
        verdict=verdict(groups, metric, to_best),
        colors=COLORS,
        names=_names(groups),
        overview=_overview(groups, metric, to_best),
        sections=[section for section in sections if section],
    )


def _overview(groups: Sequence[Group], metric: str, to_best: Sequence[Difference | None]) -> Section:
    """Returns a row for each group: the metric that chooses checkpoints, and the settings that differ."""
    several, best = any(len(group.runs) > 1 for group in groups), best_of(groups, metric)
    datasets = dict.fromkeys(_dataset(run) for group in groups for run in group.runs)
    notes, columns = [*datasets] if len(datasets) == 1 else [], [Column("run", _names(groups))]
    if several:
        columns.append(Column("seeds", [group.seeds for group in groups]))
    figures = [_figure(group, metric, number == best and len(groups) > 1) for number, group in enumerate(groups)]
    columns.append(Column(f"test {metric}", figures))
    if any(to_best):
        cells = [Cell(f"{of.mean:+.4f}", f"[{of.low:+.4f}, {of.high:+.4f}]") if of else None for of in to_best]
        columns.append(Column("difference to the best", cells))
        of_seeds = ", and of the seeds of each row" if several else "; they say nothing about other seeds"
        notes.append(
            "Intervals of differences are the middle 95 % of resamples of the users, the same ones for all rows"
            f"{of_seeds}." + " After ± stands the standard deviation over the seeds." * several
        )
    for name, short in short_names(differing(groups)).items():
        columns.append(Column(Cell(short, tip=name), [group.settings.get(name) for group in groups]))
    columns += [Column("state", list(map(_state, groups))), Column("training time", list(map(_minutes, groups)))]
    if len(datasets) > 1:
        columns.append(Column("dataset", [_dataset(group.runs[0]) for group in groups]))
    heads, cells_of_columns = zip(*columns, strict=True)
    return Section("", notes, [Table(heads, [*zip(*cells_of_columns, strict=True)])])


def _dataset(run: Run) -> str:
    data = run.dataset
    return f"{data['name']}: {data['users']:,} users, {data['items']:,} items, {data['actions']:,} actions"


def _state(group: Group) -> str:
    finished = sum(bool(run.results) for run in group.runs)
    state = "finished" if finished == len(group.runs) else "not finished"
    if 0 < finished < len(group.runs):
        state = f"{finished} of {len(group.runs)} finished"
    steps = dict.fromkeys(f"{run.last_step:,}" for run in group.runs)
    return f"{state}, {', '.join(steps)} steps"


def _minutes(group: Group) -> str:
    run = group.runs[0]
    first = f", the first {run.before:,.1f} of them in {start_path(run.path)}" if run.before else ""
    each = " each" if len(group.runs) > 1 else ""
    return f"{mean_of(run.minutes for run in group.runs):,.1f} min{each}{first}"


def _results(groups: Sequence[Group]) -> Section:
    """Returns all test metrics, a row each."""
    runs = [run for group in groups for run in group.runs]
    elsewhere = ("recommended", "targets", "groups", "users", "corpus", "seconds", "step", "start", *COMPARED_WITH)
    names = dict.fromkeys(name for run in runs for name in run.results if name.partition("/")[0] not in elsewhere)
    if not names:
        return Section("Test metrics", ["No run has finished yet."])
    baselines, rows = _baselines(groups), dict[str, list[object]]()
    for name in names:
        best = best_of(groups, name) if name not in ("repeated_targets", "examples_per_second") else None
        own = [_figure(group, name, at == best and len(groups) > 1) for at, group in enumerate(groups)]
        rows[name] = [name, *own, *(_number(name, of.get(name)) for _, of in baselines)]
    for name, label in (("users", "users"), ("corpus", "items ranked"), ("step", "step of the checkpoint")):
        counts = [", ".join(dict.fromkeys(f"{int(of):,}" for of in group.values(name))) or None for group in groups]
        rows[name] = [label, *counts, *[""] * len(baselines)]
    validated = all(run.settings["data.validation"] for run in runs)
    last = "" if validated else " (of a run without a validation part: the last)"
    note = (
        f"Of the best checkpoint on validation{last}, over the whole corpus. The intervals of hit rates are 95 % "
        "Wilson intervals over the users ranked; they say nothing about other seeds. The other metrics have none."
    ) + (" The highest value of a row is bold." if len(groups) > 1 else "")
    shown_here = {run.path for run in runs}
    unseen = [path for path in map(refit_path, shown_here) if path not in shown_here]
    if refits := sorted(str(path) for path in unseen if (path / "results.json").exists()):
        note += f" The refit, which exports and evaluate take, is a run of its own: {', '.join(refits)}."
    heads = ["metric", *_names(groups), *(heading for heading, _ in baselines)]
    beside = [
        Cell(f"{run.path}: {line}.", colors=[at])
        for at, group in enumerate(groups)
        for run in group.runs
        for line in filter(None, (beside_baselines(run.results), cold_targets(run.results)))
    ]
    folded = [row for name, row in rows.items() if len(groups) > 1 and name not in SHOWN]
    table = Table(heads, [row for row in rows.values() if row not in folded])
    if not folded:
        return Section("Test metrics", [note, *beside], [table])
    others = Section(f"{len(folded)} other numbers", beside, [Table(heads, folded)])
    return Section("Test metrics", [note], [table], folded=others)


def _by_group(groups: Sequence[Group], metric: str) -> Section | None:
    """Returns the metric that chooses checkpoints for each group of the users; None if there are no groups."""
    baselines, results = _baselines(groups), [run.results for group in groups for run in group.runs]
    rows = []
    for name in dict.fromkeys(of.rpartition("/")[0] for one in results for of in one if of.startswith("groups/")):
        users = dict.fromkeys(f"{one[f'{name}/users']:,.0f}" for one in results if f"{name}/users" in one)
        own = [_figure(group, f"{name}/{metric}", False) for group in groups]
        others = [_number(metric, of.get(f"{name}/{metric}")) for _, of in baselines]
        rows.append([name.removeprefix("groups/"), ", ".join(users), *own, *others])
    if not rows:
        return None
    heads = ["group", "users", *_names(groups), *(heading for heading, _ in baselines)]
    note = f"Test {metric}. A user with several values of a feature is in several groups; results.json has all metrics."
    return Section("Groups of users", [note], [Table(heads, rows)])


def _baselines(groups: Sequence[Group]) -> list[tuple[Cell, dict[str, float]]]:
    """Returns the heading and the metrics of each baseline. Runs of other datasets or users have figures of their own,
    in a column whose heading names the runs and has the colors of their groups."""
    columns = []
    for prefix, label in COMPARED_WITH.items():
        metrics_of_runs = [
            (
                number,
                str(run.path),
                {name.partition("/")[2]: run.results[name] for name in run.results if name.startswith(f"{prefix}/")},
            )
            for number, group in enumerate(groups)
            for run in group.runs
        ]
        distinct = list[dict[str, float]]()
        for *_, metrics in metrics_of_runs:
            distinct += [metrics] if metrics and metrics not in distinct else []
        for metrics in distinct:
            numbers, paths = zip(
                *((number, path) for number, path, other in metrics_of_runs if other == metrics), strict=True
            )
            whose = f" of {', '.join(paths)}" if len(distinct) > 1 else ""
            columns.append((Cell(label + whose, colors=[*dict.fromkeys(numbers)] if len(groups) > 1 else []), metrics))
    return columns


def _figure(group: Group, name: str, is_best: bool) -> Cell | None:
    """Returns the mean of a group's test metric with its spread, or one run's hit rate with its interval."""
    values = group.values(name)
    if not values:
        return None
    soft, results = "", group.runs[0].results
    users = int(results.get(f"{name.rpartition('/')[0]}/users", results.get("users", 0)))
    if len(values) > 1:
        soft = f"± {_number(name, group.spread(name))}"
    elif users and name.rpartition("/")[2].startswith("hr@"):
        low, high = wilson(values[0], users)
        soft = f"[{low:.4f}, {high:.4f}]"
    return Cell(_number(name, group.mean(name)), soft, is_best=is_best)


def _number(name: str, value: float | None) -> str | None:
    if value is None:
        return None
    return f"{value:,.0f}" if name == "examples_per_second" else f"{value:.4f}"


def wilson(share: float, count: int) -> tuple[float, float]:
    """Returns the 95 % interval of a probability, from the `share` of successes in `count` independent trials (Wilson,
    1927)."""
    center = share + Z95**2 / (2 * count)
    spread = Z95 * math.sqrt(share * (1 - share) / count + Z95**2 / (4 * count**2))
    scale = 1 + Z95**2 / count
    return max(0.0, (center - spread) / scale), min(1.0, (center + spread) / scale)


def _curves(groups: Sequence[Group], metric: str) -> Section:
    """Returns the training loss and metrics on validation, over steps and over time."""
    runs, charts = [(number, run) for number, group in enumerate(groups) for run in group.runs], []
    validation = [(f"validation {name}", "validation", name, max) for name in dict.fromkeys((metric, WIDE, "mrr"))]
    for title, kind, name, best in (("training loss", "training", "loss", min), *validation):
        points = [
            (
                number,
                [
                    (run.minutes_at(int(row["step"])), row["step"], row[name])
                    for row in getattr(run, kind)
                    if name in row
                ],
            )
            for number, run in runs
        ]
        over_steps = [(number, [(step, value) for _, step, value in curve]) for number, curve in points]
        over_time = [(number, [(minutes, value) for minutes, _, value in curve]) for number, curve in points]
        charts += [(title, chart("step", over_steps, best)), (title, chart("minutes", over_time, best))]
    note = (
        f"Of more than {POINTS} rows, a point is the mean of several. The number is that of the best row. Time is that "
        "of training steps alone."
    )
    if any(run.before for _, run in runs):
        note += " It begins with that of the run that was trained first."
    return Section("Curves", [note], charts=charts)


def _popularity(groups: Sequence[Group]) -> Section | None:
    """Returns how popular the recommended items are, compared with the items that users took."""
    rows: list[list[object]] = []
    for group, own in zip(groups, _names(groups), strict=True):
        if not group.values("recommended/top_1_percent"):
            continue
        for name, label in (("recommended", "recommended"), ("targets", "test targets")):
            top_1, top_10 = (group.mean(f"{name}/top_{percent}_percent") for percent in (1, 10))
            parts = (top_1, top_10 - top_1, 1 - top_10)
            texts = [f"{part:.1%}" for part in parts]
            coverage = f"{group.mean('recommended/coverage@10'):.1%}" if name == "recommended" else None
            widths = [100 * part for part in parts]
            rows.append([own, label, *texts, coverage, Cell(bar=[*zip(POPULARITY, texts, widths, strict=True)])])
    if not rows:
        return None
    heads = ["run", "items", *(Cell(part, colors=[at]) for at, part in enumerate(POPULARITY)), "coverage", ""]
    note = (
        "Items by their number of training actions: what share of each user's best 10 and of the test targets is among "
        "the most popular. Coverage is the share of the corpus that is among the best 10 of any user."
    )
    return Section("Popularity of what is recommended", [note], [Table(heads, rows)])


def _step(groups: Sequence[Group]) -> Section | None:
    """Returns the time of a step by part."""
    runs = [run for group in groups for run in group.runs]
    parts = dict.fromkeys(name for run in runs for row in run.training[:1] for name in row if name.startswith("time/"))
    parts.pop("time/step", None)
    if not parts:
        return None
    means = [
        {name: 1000 * mean_of(_mean(run.training, name, True) for run in group.runs) for name in parts}
        for group in groups
    ]
    longest = max(sum(mean.values()) for mean in means) or 1.0
    labels = [name.removeprefix("time/") for name in parts]
    rows = [
        [
            name,
            *(f"{of:,.1f}" for of in mean.values()),
            f"{sum(mean.values()):,.1f}",
            Cell(
                bar=[
                    (label, f"{of:.1f} ms", 100 * of / longest) for label, of in zip(labels, mean.values(), strict=True)
                ]
            ),
        ]
        for name, mean in zip(_names(groups), means, strict=True)
    ]
    heads = ["run", *(Cell(label, colors=[at]) for at, label in enumerate(labels)), "all", ""]
    note = "Milliseconds of rank 0, mean over the run without its first row. forward holds most of the loss's backward."
    return Section("Time of a step", [note], [Table(heads, rows)])


def _wire(groups: Sequence[Group]) -> Section:
    """Returns the bytes that are sent, by table and direction."""
    rows, end = [], "/fp32_bytes_per_step"
    for group, own in zip(groups, _names(groups), strict=True):
        names = dict.fromkeys(name for run in group.runs for row in run.training[-1:] for name in row)
        for prefix in (name.removesuffix(end) for name in names if name.endswith(end)):
            sent, fp32, error = (
                mean_of(_mean(run.training, f"{prefix}/{kind}") for run in group.runs)
                for kind in ("bytes_per_step", "fp32_bytes_per_step", "relative_rms_error")
            )
            if sent and fp32:
                place = prefix.split("/", 2)[1:]
                rows.append(
                    [own, *place, f"{sent / 1000:,.1f}", f"{sent / fp32:.3f}", f"{error:.2%}" if error else None]
                )
    if not rows:
        return Section("The wire", ["Nothing was sent: one rank, or no rows of metrics yet."])
    heads = ["run", "table", "direction", "kB per step", "share of FP32", "rounding (relative RMS)"]
    note = "Embeddings to the ranks that asked, gradients back; all ranks together."
    return Section("The wire", [note], [Table(heads, rows)])


def _components(groups: Sequence[Group]) -> Section | None:
    """Returns curves of the use of MoL's components; None if no run has any."""
    charts = []
    for name in ("entropy", "most_used", "least_used"):
        curves = [
            (at, [(row["step"], row[f"gates/{name}"]) for row in run.training if f"gates/{name}" in row])
            for at, group in enumerate(groups)
            for run in group.runs
        ]
        if any(points for _, points in curves):
            charts.append((f"gates: {name.replace('_', ' ')}", chart("step", curves, None)))
    note = (
        "Gates of some positions with their targets. Entropy 1 is even use of all components; most and least used are "
        "shares of a component."
    )
    return Section("Use of MoL's components", [note], charts=charts) if charts else None


def _settings(groups: Sequence[Group]) -> Section:
    """Returns the settings that are not in the first table: those that differ within the groups, and those that are
    the same everywhere."""
    flat = [[run.settings for run in group.runs] for group in groups]
    names = dict.fromkeys(name for group in flat for settings in group for name in settings)
    values = {
        name: [
            ", ".join(dict.fromkeys("-" if of.get(name) is None else str(of[name]) for of in group)) for group in flat
        ]
        for name in names
    }
    above, same = differing(groups), [name for name in names if len({*values[name]}) == 1]
    others, tables = [name for name in names if name not in above and name not in same], []
    if others:
        tables.append(Table(["setting", *_names(groups)], [[name, *values[name]] for name in others]))
    if any(len(group.runs) > 1 for group in groups):
        paths = [", ".join(str(run.path) for run in group.runs) for group in groups]
        tables.append(Table(["runs", "run directories"], [*zip(_names(groups), paths, strict=True)]))
    notes = ["All settings are the same."] if len(groups) > 1 and not (above or others) else []
    label = "settings that are the same" if len(groups) > 1 else "settings"
    table = Table(["setting", "value"], [[name, values[name][0]] for name in same])
    return Section("Configuration", notes, tables, folded=Section(f"{len(same)} {label}", tables=[table]))


def _mean(rows: Sequence[Mapping[str, float]], name: str, without_first: bool = False) -> float:
    """Returns the mean over the steps: a row counts for the steps since the previous row. 0 if no row has the metric.
    `without_first` leaves the first row out, unless it is the only one."""
    since = int(rows[0]["step"]) if without_first and len(rows) > 1 else 0
    known = [row for row in rows if name in row and row["step"] > since]
    weights = [after["step"] - before["step"] for before, after in pairwise([{"step": since}, *known])]
    total = sum(weights)
    return sum(row[name] * weight for row, weight in zip(known, weights, strict=True)) / total if total else 0.0


def _names(groups: Sequence[Group]) -> list[Cell]:
    """Returns each group's color, the path of its first run, and how many more runs it has."""
    firsts = [(str(group.runs[0].path), len(group.runs) - 1) for group in groups]
    return [Cell(path + f" + {more}" * bool(more), colors=[at]) for at, (path, more) in enumerate(firsts)]
