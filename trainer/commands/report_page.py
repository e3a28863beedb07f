"""`logitmix report`: runs as one HTML page that needs no network and no script: which is best, and what differs.

The page is well-formed XML, so that a parser can find errors in it.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from logitmix.common.files import write_whole
from logitmix.trainer.commands.charts import (
    NONE,
    POINTS,
    STYLE,
    bar,
    chart,
    figures,
    key,
    markup,
    section,
    swatch,
    table,
)
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


def write_report(paths: Sequence[Path], out: Path) -> None:
    """Writes the runs' page into the file `out`. ValueError if a path is not a run directory, or none is given."""
    if not paths:
        raise ValueError("report needs run directories: logitmix report RUN ...")
    write_whole(out, page([Run.read(path) for path in paths]))


def page(runs: Sequence[Run]) -> str:
    """The page's text."""
    groups = grouped(runs)
    parts = [
        _overview(groups),
        _results(groups),
        _by_group(groups),
        _curves(groups),
        _popularity(groups),
        _step(groups),
        _wire(groups),
        _components(groups),
        _settings(groups),
    ]
    title = "logitmix: " + ", ".join(str(run.path) for run in runs)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{markup(title)}</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _overview(groups: Sequence[Group]) -> str:
    """The verdict, and a row for each group: the metric that chooses checkpoints, and the settings that differ."""
    runs = [run for group in groups for run in group.runs]
    metric, several = runs[0].settings["evaluate.metric"], len(runs) > len(groups)
    settings, found = differing(groups), differences(groups, metric)
    datasets = dict.fromkeys(_dataset(run) for run in runs)
    best, rows = best_of(groups, metric), []
    for number, group in enumerate(groups):
        cells = [_name(groups, number)] + [markup(group.seeds)] * several
        cells.append(_figure(group, metric, number == best and len(groups) > 1))
        cells += [_difference(found[number])] * any(found)
        cells += [*(markup(_value(group.settings.get(name))) for name in settings), _state(group), _minutes(group)]
        rows.append(cells + [markup(_dataset(group.runs[0]))] * (len(datasets) > 1))
    heads = ["run"] + ["seeds"] * several + [f"test {markup(metric)}"] + ["difference to the best"] * any(found)
    heads += [f'<span title="{markup(name)}">{markup(of)}</span>' for name, of in short_names(settings).items()]
    heads += ["state", "training time"] + ["dataset"] * (len(datasets) > 1)
    notes = [*datasets] if len(datasets) == 1 else []
    if any(found):
        of_seeds = ", and of the seeds of each row" if several else "; they say nothing about other seeds"
        notes.append(
            "Intervals of differences are the middle 95 % of resamples of the users, the same ones for all rows"
            f"{of_seeds}." + " After ± stands the standard deviation over the seeds." * several
        )
    said = f'<p class="verdict">{markup(text)}</p>' if (text := verdict(groups, metric, found)) else ""
    heading = f"<h1>{'Runs' if len(runs) > 1 else 'Run'}</h1>"
    return heading + said + "".join(f"<p>{markup(note)}</p>" for note in notes) + table(heads, rows)


def _dataset(run: Run) -> str:
    data = run.dataset
    return f"{data['name']}: {data['users']:,} users, {data['items']:,} items, {data['actions']:,} actions"


def _difference(difference: Difference | None) -> str:
    if difference is None:
        return NONE
    low, high = difference.low, difference.high
    return f'{difference.mean:+.4f} <span class="soft">[{low:+.4f}, {high:+.4f}]</span>'


def _state(group: Group) -> str:
    finished = sum(bool(run.results) for run in group.runs)
    state = "finished" if finished == len(group.runs) else "not finished"
    if 0 < finished < len(group.runs):
        state = f"{finished} of {len(group.runs)} finished"
    steps = dict.fromkeys(f"{run.last_step:,}" for run in group.runs)
    return f"{state}, {', '.join(steps)} steps"


def _minutes(group: Group) -> str:
    run = group.runs[0]
    first = f", the first {run.before:,.1f} of them in {markup(start_path(run.path))}" if run.before else ""
    each = " each" if len(group.runs) > 1 else ""
    return f"{mean_of(run.minutes for run in group.runs):,.1f} min{each}{first}"


def _results(groups: Sequence[Group]) -> str:
    """All test metrics, a row each."""
    runs = [run for group in groups for run in group.runs]
    names = [name for run in runs for name in run.results]
    elsewhere = ("recommended", "targets", "groups", "users", "corpus", "seconds", "step", "start", *COMPARED_WITH)
    names = [name for name in dict.fromkeys(names) if name.partition("/")[0] not in elsewhere]
    if not names:
        return section("Test metrics", "<p>No run has finished yet.</p>")
    baselines, rows = _baselines(groups), {}
    for name in names:
        best = best_of(groups, name) if name not in ("repeated_targets", "examples_per_second") else None
        cells = [_figure(group, name, at == best and len(groups) > 1) for at, group in enumerate(groups)]
        rows[name] = [markup(name), *cells, *(_number(name, of.get(name)) for _, of in baselines)]
    for name, label in (("users", "users"), ("corpus", "items ranked"), ("step", "step of the checkpoint")):
        counts = [", ".join(dict.fromkeys(f"{int(of):,}" for of in group.values(name))) or NONE for group in groups]
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
        note += f" The refit, which exports and evaluate take, is a run of its own: {markup(', '.join(refits))}."
    heads = ["metric", *_names(groups), *(heading for heading, _ in baselines)]
    beside = "".join(
        f"<p>{swatch(at)}{markup(run.path)}: {markup(line)}.</p>"
        for at, group in enumerate(groups)
        for run in group.runs
        for line in filter(None, (beside_baselines(run.results), cold_targets(run.results)))
    )
    folded = [name for name in rows if len(groups) > 1 and name not in SHOWN]
    shown = table(heads, [row for name, row in rows.items() if name not in folded])
    if folded:
        others = table(heads, [rows[name] for name in folded])
        shown += f"<details><summary>{len(folded)} other numbers</summary>{others}{beside}</details>"
        beside = ""
    return section("Test metrics", f"<p>{note}</p>{beside}{shown}")


def _by_group(groups: Sequence[Group]) -> str:
    """The metric that chooses checkpoints, for each group of the users."""
    metric, baselines = groups[0].runs[0].settings["evaluate.metric"], _baselines(groups)
    results = [run.results for group in groups for run in group.runs]
    rows = []
    for name in dict.fromkeys(of.rpartition("/")[0] for one in results for of in one if of.startswith("groups/")):
        users = dict.fromkeys(f"{one[f'{name}/users']:,.0f}" for one in results if f"{name}/users" in one)
        own = [_figure(group, f"{name}/{metric}", False) for group in groups]
        others = [_number(metric, of.get(f"{name}/{metric}")) for _, of in baselines]
        rows.append([markup(name.removeprefix("groups/")), ", ".join(users), *own, *others])
    if not rows:
        return ""
    heads = ["group", "users", *_names(groups), *(heading for heading, _ in baselines)]
    note = f"Test {metric}. A user with several values of a feature is in several groups; results.json has all metrics."
    return section("Groups of users", f"<p>{markup(note)}</p>{table(heads, rows)}")


def _baselines(groups: Sequence[Group]) -> list[tuple[str, Mapping[str, float]]]:
    """Heading and metrics of each baseline, without duplicates: runs of other datasets or users have figures of their
    own. Where there are several groups, a heading has the colors of those whose figures these are."""
    found: list[tuple[str, Mapping[str, float]]] = []
    for prefix, label in COMPARED_WITH.items():
        of_runs = [
            (at, {name.removeprefix(f"{prefix}/"): of for name, of in run.results.items() if name.startswith(prefix)})
            for at, group in enumerate(groups)
            for run in group.runs
        ]
        for _, of in of_runs:
            colors = dict.fromkeys(swatch(at) for at, other in of_runs if other == of and len(groups) > 1)
            heading = "".join(colors) + label
            if of and (heading, of) not in found:
                found.append((heading, of))
    return found


def _figure(group: Group, name: str, bold: bool) -> str:
    """The mean of a group's test metric: with its spread, or of one run's hit rate with its interval."""
    values = group.values(name)
    if not values:
        return NONE
    text = _number(name, group.mean(name))
    results = group.runs[0].results
    users = int(results.get(f"{name.rpartition('/')[0]}/users", results.get("users", 0)))
    if len(values) > 1:
        text += f' <span class="soft">± {_number(name, group.spread(name))}</span>'
    elif users and name.rpartition("/")[2].startswith("hr@"):
        low, high = wilson(values[0], users)
        text += f' <span class="soft">[{low:.4f}, {high:.4f}]</span>'
    return f"<strong>{text}</strong>" if bold else text


def _number(name: str, value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:,.0f}" if name == "examples_per_second" else f"{value:.4f}"


def wilson(share: float, count: int) -> tuple[float, float]:
    """95 % interval of a probability, from the `share` of successes in `count` independent trials (Wilson, 1927)."""
    center = share + Z95**2 / (2 * count)
    spread = Z95 * math.sqrt(share * (1 - share) / count + Z95**2 / (4 * count**2))
    scale = 1 + Z95**2 / count
    return max(0.0, (center - spread) / scale), min(1.0, (center + spread) / scale)


Rows = Callable[[Run], Sequence[Mapping[str, float]]]


def _curves(groups: Sequence[Group]) -> str:
    metric = groups[0].runs[0].settings["evaluate.metric"]
    charts = _over_steps_and_time(groups, "training loss", lambda run: run.training, "loss")
    for name in dict.fromkeys((metric, WIDE, "mrr")):
        charts += _over_steps_and_time(groups, f"validation {name}", lambda run: run.validation, name)
    note = f"Of more than {POINTS} rows, a point is the mean of several. Time is that of training steps alone."
    if any(run.before for group in groups for run in group.runs):
        note += " It begins with that of the run that was trained first."
    return section("Curves", f"<p>{note}</p>{charts}")


def _over_steps_and_time(groups: Sequence[Group], title: str, rows_of: Rows, name: str) -> str:
    over_steps, over_time = [], []
    for number, group in enumerate(groups):
        for run in group.runs:
            rows = [row for row in rows_of(run) if name in row]
            over_steps.append((number, [(row["step"], row[name]) for row in rows]))
            over_time.append((number, [(run.minutes_at(int(row["step"])), row[name]) for row in rows]))
    return figures([chart(title, "step", over_steps), chart(title, "minutes", over_time)])


def _popularity(groups: Sequence[Group]) -> str:
    """How popular the recommended items are, compared with the items that users took."""
    rows = []
    for number, group in enumerate(groups):
        if not group.values("recommended/top_1_percent"):
            continue
        for name, label in (("recommended", "recommended"), ("targets", "test targets")):
            top_1, top_10 = (group.mean(f"{name}/top_{percent}_percent") for percent in (1, 10))
            parts = (top_1, top_10 - top_1, 1 - top_10)
            coverage = group.mean("recommended/coverage@10") if name == "recommended" else None
            rows.append(
                [
                    _name(groups, number),
                    label,
                    *(f"{part:.1%}" for part in parts),
                    NONE if coverage is None else f"{coverage:.1%}",
                    bar([(title, part, f"{part:.1%}") for title, part in zip(POPULARITY, parts, strict=True)], 1.0),
                ]
            )
    if not rows:
        return ""
    heads = ["run", "items", *(key(at, title) for at, title in enumerate(POPULARITY)), "coverage", ""]
    note = (
        "Items by their number of training actions: what share of each user's best 10 and of the test targets is among "
        "the most popular. Coverage is the share of the corpus that is among the best 10 of any user."
    )
    return section("Popularity of what is recommended", f"<p>{note}</p>" + table(heads, rows))


def _step(groups: Sequence[Group]) -> str:
    """The time of a step by part."""
    runs = [run for group in groups for run in group.runs]
    parts = [name for run in runs for row in run.training[:1] for name in row if name.startswith("time/")]
    parts = [name for name in dict.fromkeys(parts) if name != "time/step"]
    if not parts:
        return ""
    means = [{name: mean_of(_milliseconds(run, name) for run in group.runs) for name in parts} for group in groups]
    longest = max(sum(mean.values()) for mean in means) or 1.0
    rows = []
    for number, mean in enumerate(means):
        drawn = bar([(name.removeprefix("time/"), mean[name], f"{mean[name]:.1f} ms") for name in parts], longest)
        cells = [f"{mean[name]:,.1f}" for name in parts]
        rows.append([_name(groups, number), *cells, f"{sum(mean.values()):,.1f}", drawn])
    heads = [key(at, name.removeprefix("time/")) for at, name in enumerate(parts)]
    note = "Milliseconds of rank 0, mean over the run without its first row. forward holds most of the loss's backward."
    return section("Time of a step", f"<p>{note}</p>" + table(["run", *heads, "all", ""], rows))


def _milliseconds(run: Run, name: str) -> float:
    first = int(run.training[0]["step"]) if len(run.training) > 1 else 0
    return _mean(run.training, name, first) * 1000


def _wire(groups: Sequence[Group]) -> str:
    """Bytes by table and direction."""
    rows = []
    for number, group in enumerate(groups):
        names = [name for run in group.runs for row in run.training[-1:] for name in row]
        for name in dict.fromkeys(name for name in names if name.endswith("/fp32_bytes_per_step")):
            prefix = name.removesuffix("/fp32_bytes_per_step")
            sent, fp32, error = (
                mean_of(_mean(run.training, f"{prefix}/{kind}") for run in group.runs)
                for kind in ("bytes_per_step", "fp32_bytes_per_step", "relative_rms_error")
            )
            if sent and fp32:
                _, of_table, direction = prefix.split("/", 2)
                rows.append(
                    [
                        _name(groups, number),
                        markup(of_table),
                        markup(direction),
                        f"{sent / 1000:,.1f}",
                        f"{sent / fp32:.3f}",
                        f"{error:.2%}" if error else NONE,
                    ]
                )
    if not rows:
        return section("The wire", "<p>Nothing was sent: one rank, or no rows of metrics yet.</p>")
    heads = ["run", "table", "direction", "kB per step", "share of FP32", "rounding (relative RMS)"]
    return section(
        "The wire",
        "<p>Embeddings to the ranks that asked, gradients back; all ranks together.</p>" + table(heads, rows),
    )


def _components(groups: Sequence[Group]) -> str:
    """Use of MoL's components."""
    runs = [(at, run) for at, group in enumerate(groups) for run in group.runs]
    shown = [
        chart(
            f"gates: {name.replace('_', ' ')}",
            "step",
            [(at, [(row["step"], row[metric]) for row in run.training if metric in row]) for at, run in runs],
        )
        for name in ("entropy", "most_used", "least_used")
        for metric in (f"gates/{name}",)
        if any(metric in row for _, run in runs for row in run.training)
    ]
    if not shown:
        return ""
    note = (
        "Gates of some positions with their targets. Entropy 1 is even use of all components; most and least used are "
        "shares of a component."
    )
    return section("Use of MoL's components", f"<p>{note}</p>" + figures(shown))


def _settings(groups: Sequence[Group]) -> str:
    """What is not in the first table: the settings that differ within the groups, and those that are all the same."""
    flat = [[run.settings for run in group.runs] for group in groups]
    names = dict.fromkeys(name for group in flat for settings in group for name in settings)
    values = {
        name: [", ".join(dict.fromkeys(_value(of.get(name)) for of in group)) for group in flat] for name in names
    }
    above, same = differing(groups), [name for name in names if len({*values[name]}) == 1]
    others = [name for name in names if name not in above and name not in same]
    heads = ["setting", *_names(groups)]
    rows = [[markup(name), *map(markup, values[name])] for name in others]
    tables = table(heads, rows) if rows else ""
    if len(groups) > 1 and not (above or others):
        tables = "<p>All settings are the same.</p>"
    label = "settings that are the same" if len(groups) > 1 else "settings"
    rows = [[markup(name), markup(values[name][0])] for name in same]
    tables += f"<details><summary>{len(same)} {label}</summary>{table(['setting', 'value'], rows)}</details>"
    paths = [[_name(groups, at), markup(", ".join(str(run.path) for run in of.runs))] for at, of in enumerate(groups)]
    if any(len(group.runs) > 1 for group in groups):
        tables += table(["runs", "run directories"], paths)
    return section("Configuration", tables)


def _value(value: Any) -> str:
    return NONE if value is None else str(value)


def _mean(rows: Iterable[Mapping[str, float]], name: str, since: int = 0) -> float:
    """Mean over the steps after `since`: a row counts for the steps since the previous row. 0 if no row has the
    metric."""
    known = [row for row in rows if name in row and row["step"] > since]
    weights = [after["step"] - before["step"] for before, after in pairwise([{"step": since}, *known])]
    total = sum(weights)
    return sum(row[name] * weight for row, weight in zip(known, weights, strict=True)) / total if total else 0.0


def _names(groups: Sequence[Group]) -> list[str]:
    return [_name(groups, number) for number in range(len(groups))]


def _name(groups: Sequence[Group], number: int) -> str:
    """A group's color, the path of its first run, and how many more it has."""
    runs = groups[number].runs
    return swatch(number) + markup(runs[0].path) + (f" + {len(runs) - 1}" if len(runs) > 1 else "")
