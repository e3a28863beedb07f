"""`logitmix report`: runs as one HTML page that needs no network and no script: which is best, and what differs.

report.html is its template. The page is well-formed XML, so that a parser can find errors in it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

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
from logitmix.trainer.run.results import beside_baselines, cold_targets

WIDE = "hr@200"
"""Candidates are many: what the first places say is not all."""
OF_OTHERS = ("hr@10", "hr@50", WIDE, "ndcg@10", "mrr")
"""Test metrics of COMPARED_WITH that are shown."""
COUNTS = ("users", "corpus", "step", "examples_per_second")
"""Results that are no metrics: nobody is best at them."""
Z95 = 1.959964
"""95 % of a normal distribution lie within this many standard deviations."""


@dataclass(frozen=True)
class Section:
    """A part of the page: notes, curves and a table. It is left out if it has neither curves nor rows."""

    title: str
    notes: Sequence[object] = ()
    heads: Sequence[object] = ()
    rows: Sequence[Sequence[object]] = ()
    """Cells; None where nothing is known."""
    charts: Sequence[tuple[str, Markup]] = ()
    """Titles, and curves as SVG."""
    is_folded: bool = False
    """Whether the page shows the section only after a click on its title."""


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
        _overview(groups, metric, to_best),
        _results(groups),
        _by_group(groups, metric),
        _curves(groups, metric),
        _popularity(groups),
        _step(groups),
        _wire(groups),
        _components(groups),
        *_settings(groups),
    ]
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else shown("-" if value is None else value),
    )
    return templates.get_template("report.html").render(
        title="logitmix: " + ", ".join(str(run.path) for run in runs),
        verdict=verdict(groups, metric, to_best),
        names=_names(groups),
        sections=[section for section in sections if section.rows or section.charts],
    )


def _overview(groups: Sequence[Group], metric: str, to_best: Sequence[Difference | None]) -> Section:
    """Returns a row for each group: the metric that chooses checkpoints, and the settings that differ."""
    best, notes = _best_of(groups, metric), []
    columns: dict[str, Sequence[object]] = {
        "run": _names(groups),
        "seeds": [group.seeds for group in groups],
        f"test {metric}": [_figure(group, metric, number == best) for number, group in enumerate(groups)],
    }
    if any(to_best):
        columns["difference to the best"] = [
            _text(f"{of.mean:+.4f}", f"[{of.low:+.4f}, {of.high:+.4f}]") if of else None for of in to_best
        ]
        notes.append(
            "Intervals of differences are the middle 95 % of resamples of the users, the same ones for all rows, and "
            "of the seeds of each row; of one seed, they say nothing about others. After ± stands the standard "
            "deviation over the seeds."
        )
    for name, short in short_names(differing(groups)).items():
        columns[short] = [group.settings.get(name) for group in groups]
    columns["state"] = [_state(group) for group in groups]
    columns["minutes"] = [f"{mean_of(run.minutes for run in group.runs):,.1f}" for group in groups]
    columns["dataset"] = [
        "{name}: {users:,} users, {items:,} items, {actions:,} actions".format(**group.runs[0].dataset)
        for group in groups
    ]
    return Section("Overview", notes, list(columns), [*zip(*columns.values(), strict=True)])


def _best_of(groups: Sequence[Group], metric: str) -> int | None:
    """Returns the index of the group with the best mean of a metric; None if there is only one group."""
    return best_of(groups, metric) if len(groups) > 1 else None


def _state(group: Group) -> str:
    finished = sum(bool(run.results) for run in group.runs)
    steps = dict.fromkeys(f"{run.last_step:,}" for run in group.runs)
    return f"{finished} of {len(group.runs)} finished, {', '.join(steps)} steps"


def _results(groups: Sequence[Group]) -> Section:
    """Returns all test metrics, a row each."""
    runs = [run for group in groups for run in group.runs]
    rows = []
    for name in dict.fromkeys(name for run in runs for name in run.results):
        first, _, rest = name.partition("/")
        label = f"{COMPARED_WITH[first]}: {rest}" if first in COMPARED_WITH else name
        elsewhere = first in ("recommended", "targets", "groups", "seconds", "start")
        if elsewhere or (first in COMPARED_WITH and rest not in OF_OTHERS):
            continue
        unranked = first in COMPARED_WITH or name in (*COUNTS, "repeated_targets")
        best = None if unranked else _best_of(groups, name)
        rows.append([label, *(_figure(group, name, number == best) for number, group in enumerate(groups))])
    notes = [
        "Of the best checkpoint on validation (of a run without a validation part: the last), over the whole corpus. "
        "The intervals of hit rates are 95 % Wilson intervals over the users ranked; they say nothing about other "
        "seeds. The other metrics have none. The highest value of a row is bold."
    ]
    notes += [
        f"{run.path}: {line}."
        for run in runs
        for line in filter(None, (beside_baselines(run.results), cold_targets(run.results)))
    ]
    return Section("Test metrics", notes, ["metric", *_names(groups)], rows)


def _by_group(groups: Sequence[Group], metric: str) -> Section:
    """Returns the metric that chooses checkpoints for each group of the users."""
    results, rows = [run.results for group in groups for run in group.runs], []
    for name in dict.fromkeys(of.rpartition("/")[0] for one in results for of in one if of.startswith("groups/")):
        users = dict.fromkeys(f"{one[f'{name}/users']:,.0f}" for one in results if f"{name}/users" in one)
        figures = [_figure(group, f"{name}/{metric}") for group in groups]
        rows.append([name.removeprefix("groups/"), ", ".join(users), *figures])
    note = f"Test {metric}. A user with several values of a feature is in several groups; results.json has all metrics."
    return Section("Groups of users", [note], ["group", "users", *_names(groups)], rows)


def _figure(group: Group, name: str, is_best: bool = False) -> Markup | None:
    """Returns the mean of a group's test metric with its spread, or one run's hit rate with its interval."""
    values = group.values(name)
    if not values:
        return None
    prefix, _, metric = name.rpartition("/")
    soft, users = "", int(group.runs[0].results.get(f"{prefix}/users" if prefix else "users", 0))
    if len(values) > 1:
        soft = f"± {_number(name, group.spread(name))}"
    elif users and metric.startswith("hr@"):
        low, high = wilson(values[0], users)
        soft = f"[{low:.4f}, {high:.4f}]"
    return _text(_number(name, group.mean(name)), soft, is_best)


def _number(name: str, value: float) -> str:
    return f"{value:,.0f}" if name in COUNTS else f"{value:.4f}"


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
        rows = [(number, run, [row for row in getattr(run, kind) if name in row]) for number, run in runs]
        over_steps = [(number, [(row["step"], row[name]) for row in of_run]) for number, _, of_run in rows]
        over_time = [
            (number, [(run.minutes_at(int(row["step"])), row[name]) for row in of_run]) for number, run, of_run in rows
        ]
        charts += [(title, chart("step", over_steps, best)), (title, chart("minutes", over_time, best))]
    note = (
        f"Of more than {POINTS} rows, a point is the mean of several. The number is that of the best row. Time is that "
        "of training steps alone, and begins with that of a run that was trained first."
    )
    return Section("Curves", [note], charts=charts)


def _popularity(groups: Sequence[Group]) -> Section:
    """Returns how popular the recommended items are, compared with the items that users took."""
    rows: list[list[object]] = []
    for group, own in zip(groups, _names(groups), strict=True):
        for name, label in (("recommended", "recommended"), ("targets", "test targets")):
            if not group.values("recommended/top_1_percent"):
                continue
            top_1, top_10 = (group.mean(f"{name}/top_{percent}_percent") for percent in (1, 10))
            coverage = f"{group.mean('recommended/coverage@10'):.1%}" if name == "recommended" else None
            rows.append([own, label, *(f"{part:.1%}" for part in (top_1, top_10 - top_1, 1 - top_10)), coverage])
    note = (
        "Items by their number of training actions: what share of each user's best 10 and of the test targets is among "
        "the most popular. Coverage is the share of the corpus that is among the best 10 of any user."
    )
    heads = ["run", "items", "top 1 %", "next 9 %", "other 90 %", "coverage"]
    return Section("Popularity of what is recommended", [note], heads, rows)


def _step(groups: Sequence[Group]) -> Section:
    """Returns the time of a step by part."""
    runs = [run for group in groups for run in group.runs]
    parts = dict.fromkeys(name for run in runs for row in run.training[:1] for name in row if name.startswith("time/"))
    parts.pop("time/step", None)
    rows = []
    for group, own in zip(groups, _names(groups), strict=True):
        means = [1000 * mean_of(_mean(run.training, name, True) for run in group.runs) for name in parts]
        rows.append([own, *(f"{each:,.1f}" for each in (*means, sum(means)))])
    note = "Milliseconds of rank 0, mean over the run without its first row. forward holds most of the loss's backward."
    heads = ["run", *(name.removeprefix("time/") for name in parts), "all"]
    return Section("Time of a step", [note], heads, rows if parts else [])


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
                _, table, direction = prefix.split("/", 2)
                rounding = f"{error:.2%}" if error else None
                rows.append([own, table, direction, f"{sent / 1000:,.1f}", f"{sent / fp32:.3f}", rounding])
    heads = ["run", "table", "direction", "kB per step", "share of FP32", "rounding (relative RMS)"]
    note = "Embeddings to the ranks that asked, gradients back; all ranks together."
    return Section("The wire", [note], heads, rows)


def _components(groups: Sequence[Group]) -> Section:
    """Returns curves of the use of MoL's components."""
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
    return Section("Use of MoL's components", [note], charts=charts)


def _settings(groups: Sequence[Group]) -> list[Section]:
    """Returns the settings that are not in the overview: those that differ within the groups, and those that are the
    same everywhere."""
    runs = [run for group in groups for run in group.runs]
    values = {
        name: [", ".join(dict.fromkeys(str(run.settings.get(name, "-")) for run in group.runs)) for group in groups]
        for name in dict.fromkeys(name for run in runs for name in run.settings)
    }
    above, same = differing(groups), [name for name in values if len({*values[name]}) == 1]
    others = [[name, *of] for name, of in values.items() if name not in above and name not in same]
    if len(runs) > len(groups):
        others.append(["run directories", *(", ".join(str(run.path) for run in group.runs) for group in groups)])
    return [
        Section("Configuration", (), ["setting", *_names(groups)], others),
        Section(
            "Settings of all", (), ["setting", "value"], [[name, values[name][0]] for name in same], is_folded=True
        ),
    ]


def _mean(rows: Sequence[Mapping[str, float]], name: str, without_first: bool = False) -> float:
    """Returns the mean over the steps: a row counts for the steps since the previous row. 0 if no row has the metric.
    `without_first` leaves the first row out, unless it is the only one."""
    since = int(rows[0]["step"]) if without_first and len(rows) > 1 else 0
    known = [row for row in rows if name in row and row["step"] > since]
    weights = [after["step"] - before["step"] for before, after in pairwise([{"step": since}, *known])]
    total = sum(weights)
    return sum(row[name] * weight for row, weight in zip(known, weights, strict=True)) / total if total else 0.0


def _text(text: str, soft: str = "", is_best: bool = False) -> Markup:
    """Returns a cell: a text, bold if it is the best, and what stands after it in a muted color."""
    return Markup('<span class="{}">{}</span> <span class="soft">{}</span>').format("best" * is_best, text, soft)


def _names(groups: Sequence[Group]) -> list[Markup]:
    """Returns each group's color, the path of its first run, and how many more runs it has."""
    swatch = Markup('<span class="swatch" style="background:var(--c{})"></span>{}{}')
    return [
        swatch.format(number % COLORS, shown(group.runs[0].path), f" + {len(group.runs) - 1}" * (len(group.runs) > 1))
        for number, group in enumerate(groups)
    ]
