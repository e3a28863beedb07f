"""`logitmix report`: runs as one HTML page that needs no network and no script.

The page is well-formed XML, so that a parser can find errors in it.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from logitmix.common.files import write_whole
from logitmix.common.storage import shown
from logitmix.trainer.config import COMPARED_WITH, Config, flatten
from logitmix.trainer.run.folder import read_config, read_description, refit_path, start_path
from logitmix.trainer.run.metrics import read_rows
from logitmix.trainer.run.results import beside_baselines, cold_targets, read_results

COLORS = 8
"""Number of colors; further runs reuse them."""
NONE = "-"
"""An empty cell of a table."""
POPULARITY = ("top 1 %", "next 9 %", "other 90 %")
"""Parts of the corpus."""
WIDE = "hr@200"
"""Candidates are many: what the first places say is not all."""
POINTS = 300
"""Most points of a curve; with more rows, a point is the mean of several."""
Z95 = 1.959964
"""95 % of a normal distribution lie within this many standard deviations."""


@dataclass(frozen=True)
class Run:
    """The parts of a run directory that the report shows."""

    path: Path
    config: Config
    dataset: Mapping[str, Any]
    training: Sequence[Mapping[str, float]]
    validation: Sequence[Mapping[str, float]]
    results: Mapping[str, float]
    """Empty if the run has not finished."""
    before: float
    """Minutes of the run that was trained first; 0 without one."""

    @classmethod
    def read(cls, path: Path) -> "Run":
        """Reads a run directory; ValueError if there is none."""
        config = read_config(path)
        rows, start = read_rows(path), start_path(path) / "results.json"
        return cls(
            path,
            config,
            read_description(path),
            [row for row in rows if row["kind"] == "train"],
            [row for row in rows if row["kind"] == "validation"],
            read_results(path) if (path / "results.json").exists() else {},
            read_results(start.parent)["seconds"] / 60 if config.first and start.exists() else 0.0,
        )

    def minutes_at(self, step: int) -> float:
        """Training time until a step, from the rows' seconds per step, without evaluation; that of the run that was
        trained first counts."""
        return self.before + float(np.interp(step, *self._timeline))

    @cached_property
    def _timeline(self) -> tuple[list[float], list[float]]:
        """Steps and minutes; steps after the last row are assumed to be as fast."""
        steps, minutes, seconds = [0.0], [0.0], 0.0
        for row in self.training:
            seconds = row["time/step"]
            minutes.append(minutes[-1] + (row["step"] - steps[-1]) * seconds / 60)
            steps.append(row["step"])
        beyond = 1e9
        return [*steps, steps[-1] + beyond], [*minutes, minutes[-1] + beyond * seconds / 60]


def write_report(paths: Sequence[Path], out: Path) -> None:
    """Writes the runs' page into the file `out`. ValueError if a path is not a run directory, or none is given."""
    if not paths:
        raise ValueError("report needs run directories: logitmix report RUN ...")
    runs = [Run.read(path) for path in paths]
    write_whole(out, page(runs))


def page(runs: Sequence[Run]) -> str:
    """The page's text."""
    parts = [
        _overview(runs),
        _results(runs),
        _curves(runs),
        _popularity(runs),
        _step(runs),
        _wire(runs),
        _components(runs),
        _settings(runs),
    ]
    title = "logitmix: " + ", ".join(str(run.path) for run in runs)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _overview(runs: Sequence[Run]) -> str:
    rows = []
    for number, run in enumerate(runs):
        rows_of = [*run.training, *run.validation, *([run.results] if run.results else [])]
        last = max((int(row["step"]) for row in rows_of), default=0)
        state = "finished" if run.results else "not finished"
        data = run.dataset
        size = f"{data['users']:,} users, {data['items']:,} items, {data['actions']:,} actions"
        minutes = run.before + run.results["seconds"] / 60 if run.results else run.minutes_at(last)
        first = f", the first {run.before:,.1f} of them in {start_path(run.path)}" if run.before else ""
        rows.append(
            [
                _swatch(number) + _text(run.path),
                _text(f"{data['name']}: {size}"),
                f"{state}, {last:,} steps",
                f"{minutes:,.1f} min{_text(first)}",
            ]
        )
    heading = "Runs" if len(runs) > 1 else "Run"
    return f"<h1>{heading}</h1>" + _table(["run", "dataset", "state", "training time"], rows)


def _results(runs: Sequence[Run]) -> str:
    """Test metrics with intervals, a row each."""
    names = [name for run in runs for name in run.results]
    elsewhere = ("recommended", "targets", "users", "corpus", "seconds", "step", *COMPARED_WITH)
    names = [name for name in dict.fromkeys(names) if name.partition("/")[0] not in elsewhere]
    if not names:
        return _section("Test metrics", "<p>No run has finished yet.</p>")
    baselines, rows = _baselines(runs), []
    for name in names:
        values = [run.results.get(name) for run in runs]
        best = max((value for value in values if value is not None), default=None)
        cells = []
        for run, value in zip(runs, values, strict=True):
            text = _with_interval(name, value, int(run.results.get("users", 0)))
            mark = len(runs) > 1 and value == best and name not in ("repeated_targets", "examples_per_second")
            cells.append(f"<strong>{text}</strong>" if mark else text)
        rows.append([_text(name), *cells, *(_with_interval(name, of.get(name), 0) for _, of in baselines)])
    none = [""] * len(baselines)
    for name, label in (("users", "users"), ("corpus", "items ranked"), ("step", "step of the checkpoint")):
        counts = [f"{int(run.results[name]):,}" if name in run.results else NONE for run in runs]
        rows.append([label, *counts, *none])
    last = "" if all(run.config.data.validation for run in runs) else " (of a run without a validation part: the last)"
    note = (
        f"Of the best checkpoint on validation{last}, over the whole corpus. The intervals of hit rates are 95 % "
        "Wilson intervals over the users ranked; they say nothing about other seeds. The other metrics have none."
    ) + (" The highest value of a run is bold." if len(runs) > 1 else "")
    shown_here = {run.path for run in runs}
    others = [path for path in map(refit_path, shown_here) if path not in shown_here]
    if refits := sorted(str(path) for path in others if (path / "results.json").exists()):
        note += f" The refit, which exports and evaluate take, is a run of its own: {_text(', '.join(refits))}."
    heads = ["metric", *_names(runs), *(heading for heading, _ in baselines)]
    beside = "".join(
        f"<p>{name}{': ' * (len(runs) > 1)}{escape(line)}.</p>"
        for name, run in zip(_names(runs), runs, strict=True)
        for line in filter(None, (beside_baselines(run.results), cold_targets(run.results)))
    )
    return _section("Test metrics", f"<p>{note}</p>{beside}" + _table(heads, rows))


def _baselines(runs: Sequence[Run]) -> list[tuple[str, Mapping[str, float]]]:
    """Heading and metrics of each baseline, without duplicates: runs of other datasets, users or seeds have figures of
    their own. Where there are several runs, a heading has the colors of the runs whose figures these are."""
    found: list[tuple[str, Mapping[str, float]]] = []
    for prefix, label in COMPARED_WITH.items():
        of_runs = [
            {key.removeprefix(f"{prefix}/"): value for key, value in run.results.items() if key.startswith(prefix)}
            for run in runs
        ]
        for of in of_runs:
            colors = [_swatch(number) for number, other in enumerate(of_runs) if other == of and len(runs) > 1]
            heading = "".join(colors) + label
            if of and (heading, of) not in found:
                found.append((heading, of))
    return found


def _with_interval(name: str, value: float | None, users: int) -> str:
    if value is None:
        return NONE
    if name == "examples_per_second":
        return f"{value:,.0f}"
    if users and name.rpartition("/")[2].startswith("hr@"):
        low, high = wilson(value, users)
        return f'{value:.4f} <span class="soft">[{low:.4f}, {high:.4f}]</span>'
    return f"{value:.4f}"


def wilson(share: float, count: int) -> tuple[float, float]:
    """95 % interval of a probability, from the `share` of successes in `count` independent trials (Wilson, 1927)."""
    center = share + Z95**2 / (2 * count)
    spread = Z95 * math.sqrt(share * (1 - share) / count + Z95**2 / (4 * count**2))
    scale = 1 + Z95**2 / count
    return max(0.0, (center - spread) / scale), min(1.0, (center + spread) / scale)


Rows = Callable[[Run], Sequence[Mapping[str, float]]]


def _curves(runs: Sequence[Run]) -> str:
    metric = runs[0].config.evaluate.metric
    charts = _over_steps_and_time(runs, "training loss", lambda run: run.training, "loss")
    for name in dict.fromkeys((metric, WIDE, "mrr")):
        charts += _over_steps_and_time(runs, f"validation {name}", lambda run: run.validation, name)
    note = f"Of more than {POINTS} rows, a point is the mean of several. Time is that of training steps alone."
    if any(run.before for run in runs):
        note += " It begins with that of the run that was trained first."
    return _section("Curves", f"<p>{note}</p>{charts}")


def _over_steps_and_time(runs: Sequence[Run], title: str, rows_of: Rows, name: str) -> str:
    over_steps, over_time = [], []
    for run in runs:
        rows = [row for row in rows_of(run) if name in row]
        over_steps.append([(row["step"], row[name]) for row in rows])
        over_time.append([(run.minutes_at(int(row["step"])), row[name]) for row in rows])
    return _charts([chart(title, "step", over_steps), chart(title, "minutes", over_time)])


def _popularity(runs: Sequence[Run]) -> str:
    """How popular the recommended items are, compared with the items that users took."""
    rows = []
    for number, run in enumerate(runs):
        if "recommended/top_1_percent" not in run.results:
            continue
        for name, label in (("recommended", "recommended"), ("targets", "test targets")):
            top_1, top_10 = (run.results[f"{name}/top_{percent}_percent"] for percent in (1, 10))
            parts = (top_1, top_10 - top_1, 1 - top_10)
            coverage = run.results["recommended/coverage@10"] if name == "recommended" else None
            rows.append(
                [
                    _swatch(number) + _text(run.path),
                    label,
                    *(f"{part:.1%}" for part in parts),
                    NONE if coverage is None else f"{coverage:.1%}",
                    _bar([(title, part, f"{part:.1%}") for title, part in zip(POPULARITY, parts, strict=True)], 1.0),
                ]
            )
    if not rows:
        return ""
    heads = ["run", "items", *(_key(at, title) for at, title in enumerate(POPULARITY)), "coverage", ""]
    note = (
        "Items by their number of training actions: what share of each user's best 10 and of the test targets is among "
        "the most popular. Coverage is the share of the corpus that is among the best 10 of any user."
    )
    return _section("Popularity of what is recommended", f"<p>{note}</p>" + _table(heads, rows))


def _step(runs: Sequence[Run]) -> str:
    """The time of a step by part."""
    parts = [name for run in runs for row in run.training[:1] for name in row if name.startswith("time/")]
    parts = [name for name in dict.fromkeys(parts) if name != "time/step"]
    first = [int(run.training[0]["step"]) if len(run.training) > 1 else 0 for run in runs]
    means = [
        {name: _mean(run.training, name, since) * 1000 for name in parts}
        for run, since in zip(runs, first, strict=True)
    ]
    if not parts:
        return ""
    longest = max(sum(mean.values()) for mean in means) or 1.0
    rows = []
    for number, (run, mean) in enumerate(zip(runs, means, strict=True)):
        bar = _bar([(name.removeprefix("time/"), mean[name], f"{mean[name]:.1f} ms") for name in parts], longest)
        cells = [f"{mean[name]:,.1f}" for name in parts]
        rows.append(
            [
                _swatch(number) + _text(run.path),
                *cells,
                f"{sum(mean.values()):,.1f}",
                bar,
            ]
        )
    heads = [_key(at, name.removeprefix("time/")) for at, name in enumerate(parts)]
    note = "Milliseconds of rank 0, mean over the run without its first row. forward holds most of the loss's backward."
    return _section("Time of a step", f"<p>{note}</p>" + _table(["run", *heads, "all", ""], rows))


def _bar(parts: Sequence[tuple[str, float, str]], longest: float) -> str:
    """A bar of parts with their names, sizes and texts; a bar of size `longest` takes the whole width."""
    spans = (
        f'<span class="part p{at % COLORS}" style="width:{100 * size / longest:.2f}%" '
        f'title="{_text(name)}: {_text(text)}"></span>'
        for at, (name, size, text) in enumerate(parts)
    )
    return f'<div class="bar">{"".join(spans)}</div>'


def _key(at: int, name: str) -> str:
    """The heading of a column for a part of a bar."""
    return f'<span class="part key p{at % COLORS}"></span>{_text(name)}'


def _wire(runs: Sequence[Run]) -> str:
    """Bytes by table and direction."""
    rows = []
    for number, run in enumerate(runs):
        names = [name for row in run.training[-1:] for name in row if name.endswith("/fp32_bytes_per_step")]
        for name in names:
            prefix = name.removesuffix("/fp32_bytes_per_step")
            sent, fp32 = (_mean(run.training, f"{prefix}/{kind}") for kind in ("bytes_per_step", "fp32_bytes_per_step"))
            if sent and fp32:
                _, table, direction = prefix.split("/", 2)
                error = _mean(run.training, f"{prefix}/relative_rms_error")
                rows.append(
                    [
                        _swatch(number) + _text(run.path),
                        _text(table),
                        _text(direction),
                        f"{sent / 1000:,.1f}",
                        f"{sent / fp32:.3f}",
                        f"{error:.2%}" if error else NONE,
                    ]
                )
    if not rows:
        return _section("The wire", "<p>Nothing was sent: one rank, or no rows of metrics yet.</p>")
    heads = ["run", "table", "direction", "kB per step", "share of FP32", "rounding (relative RMS)"]
    return _section(
        "The wire",
        "<p>Embeddings to the ranks that asked, gradients back; all ranks together.</p>" + _table(heads, rows),
    )


def _components(runs: Sequence[Run]) -> str:
    """Use of MoL's components."""
    shown = [
        chart(
            f"gates: {name.replace('_', ' ')}",
            "step",
            [[(row["step"], row[key]) for row in run.training if key in row] for run in runs],
        )
        for name in ("entropy", "most_used", "least_used")
        for key in (f"gates/{name}",)
        if any(key in row for run in runs for row in run.training)
    ]
    if not shown:
        return ""
    note = (
        "Gates of some positions with their targets. Entropy 1 is even use of all components; most and least used are "
        "shares of a component."
    )
    return _section("Use of MoL's components", f"<p>{note}</p>" + _charts(shown))


def _settings(runs: Sequence[Run]) -> str:
    flat = [flatten(run.config) for run in runs]
    names = list(dict.fromkeys(name for settings in flat for name in settings))
    values = {name: [_value(settings.get(name)) for settings in flat] for name in names}
    differ = [name for name in names if len(set(values[name])) > 1]
    heads = ["setting", *_names(runs)]
    tables = ""
    if len(runs) > 1:
        rows = [[_text(name), *(f"<mark>{_text(value)}</mark>" for value in values[name])] for name in differ]
        tables = _table(heads, rows) if rows else "<p>All settings are the same.</p>"
    same = [[_text(name), *map(_text, values[name])] for name in names if name not in differ]
    label = "settings that are the same" if len(runs) > 1 else "settings"
    tables += f"<details><summary>{len(same)} {label}</summary>{_table(heads, same)}</details>"
    return _section("Configuration", tables)


def _value(value: Any) -> str:
    return NONE if value is None else str(value)


Curve = Sequence[tuple[float, float]]
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 460, 250, 56, 34, 10, 26
"""Sizes of a chart in CSS pixels; the last four are the margins around the plot."""


def chart(title: str, x_label: str, curves: Sequence[Curve]) -> str:
    """A figure with a curve for each run, in their order; points that are not finite are left out."""
    curves = [thinned([point for point in curve if all(map(math.isfinite, point))], POINTS) for curve in curves]
    points = [point for curve in curves for point in curve]
    caption = f"<figcaption>{_text(title)}</figcaption>"
    if not points:
        return f'<figure>{caption}<p class="soft">nothing yet</p></figure>'
    x_ticks, y_ticks = (ticks(min(values), max(values)) for values in zip(*points, strict=True))

    def x(value: float) -> float:
        return LEFT + (value - x_ticks[0]) / (x_ticks[-1] - x_ticks[0]) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (HEIGHT - BOTTOM - TOP)

    drawn = [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
        f'<text class="end" x="{LEFT - 6}" y="{y(tick) + 4:.1f}">{tick:,.6g}</text>'
        for tick in y_ticks
    ]
    drawn += [f'<text class="mid" x="{x(tick):.1f}" y="{HEIGHT - BOTTOM + 16}">{tick:,.6g}</text>' for tick in x_ticks]
    drawn.append(f'<text class="end soft" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}">{_text(x_label)}</text>')
    for number, curve in enumerate(curves):
        way = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in curve)
        drawn.append(f'<polyline class="run r{number % COLORS}" points="{way}"/>')
        if len(curve) <= 40:
            drawn += [
                f'<circle class="r{number % COLORS}" cx="{x(at):.1f}" cy="{y(value):.1f}" r="3">'
                f"<title>{_text(x_label)} {at:,.6g}: {value:.4g}</title></circle>"
                for at, value in curve
            ]
    return (
        f'<figure>{caption}<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{_text(title)} over '
        f'{_text(x_label)}">{"".join(drawn)}</svg></figure>'
    )


def ticks(low: float, high: float) -> list[float]:
    """4 to 8 round numbers at equal distances around [low, high]."""
    size = max(abs(low), abs(high))
    if size < 1e-300:
        low, high = 0.0, 1.0
    elif high - low < 1e-9 * size:
        low, high = low - size / 2, high + size / 2
    rough = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    return [step * number for number in range(math.floor(low / step), math.ceil(high / step) + 1)]


def thinned(curve: Curve, most: int) -> Curve:
    """The points, or means of neighbors if there are more than the limit."""
    together = -(-len(curve) // most)
    if together <= 1:
        return curve
    groups = [curve[start : start + together] for start in range(0, len(curve), together)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


def _mean(rows: Iterable[Mapping[str, float]], name: str, since: int = 0) -> float:
    """Mean over the steps after `since`: a row counts for the steps since the previous row. 0 if no row has the
    metric."""
    known = [row for row in rows if name in row and row["step"] > since]
    weights = [after["step"] - before["step"] for before, after in pairwise([{"step": since}, *known])]
    total = sum(weights)
    return sum(row[name] * weight for row, weight in zip(known, weights, strict=True)) / total if total else 0.0


def _names(runs: Sequence[Run]) -> list[str]:
    return [_swatch(number) + _text(run.path) for number, run in enumerate(runs)]


def _text(text: object) -> str:
    """A text as markup."""
    return escape(shown(text))


def _swatch(number: int) -> str:
    return f'<span class="swatch r{number % COLORS}"></span>'


def _section(title: str, content: str) -> str:
    return f"<section><h2>{_text(title)}</h2>{content}</section>"


def _charts(figures: Sequence[str]) -> str:
    return f'<div class="charts">{"".join(figures)}</div>'


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Heads and cells are markup."""
    head = "".join(f"<th>{cell}</th>" for cell in heads)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


_LIGHT = ("#2563eb", "#c2410c", "#0f766e", "#9333ea", "#a16207", "#be185d", "#4d7c0f", "#475569")
_DARK = ("#7cb0ff", "#fb9a5b", "#4fd1bd", "#c79bff", "#e3bf45", "#ff8fc0", "#a3d65c", "#b6c2d3")


def _palette(colors: Sequence[str]) -> str:
    return "".join(f"--c{number}:{color};" for number, color in enumerate(colors))


_STYLE = (
    f":root{{color-scheme:light dark;--paper:#ffffff;--ink:#1b1f26;--soft:#5b6472;--line:#dfe3e8;--mark:#fff1b8;"
    f"{_palette(_LIGHT)}}}"
    f"@media(prefers-color-scheme:dark){{:root{{--paper:#14171c;--ink:#e6e9ee;--soft:#9aa4b2;--line:#2e343d;"
    f"--mark:#4d4314;{_palette(_DARK)}}}}}"
    "body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif}"
    "main{max-width:980px;margin:0 auto;padding:24px}"
    "h1{font-size:24px;margin:0 0 12px}h2{font-size:18px;margin:36px 0 8px}p{margin:4px 0 12px;color:var(--soft)}"
    ".soft{color:var(--soft);font-weight:400}.wide{overflow-x:auto}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
    "th,td{text-align:left;padding:4px 16px 4px 0;border-bottom:1px solid var(--line);white-space:nowrap}"
    "th{font-weight:600}mark{background:var(--mark);color:inherit;padding:1px 4px}"
    ".swatch{display:inline-block;width:10px;height:10px;border-radius:5px;margin-right:8px;background:currentColor}"
    ".charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(320px,1fr));gap:8px 24px}"
    "figure{margin:8px 0}figcaption{font-weight:600}svg{width:100%;height:auto}"
    "text{font-size:12px;fill:var(--soft)}.end{text-anchor:end}.mid{text-anchor:middle}"
    ".grid{stroke:var(--line)}.run{fill:none;stroke:currentColor;stroke-width:1.8;stroke-linejoin:round}"
    "circle{fill:currentColor}.bar{display:flex;width:220px;height:14px}.part{height:14px}"
    ".key{display:inline-block;width:10px;height:10px;margin-right:6px}"
    "details{margin-top:12px}summary{cursor:pointer}"
    + "".join(f".r{n}{{color:var(--c{n})}}.p{n}{{background:var(--c{n})}}" for n in range(COLORS))
)
