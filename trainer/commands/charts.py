"""Parts of an HTML page that needs no network and no script, as well-formed XML: tables, bars and charts.

Charts are drawn as SVG: they take the page's colors, light or dark, and their points say their values.
"""

import math
from collections.abc import Sequence
from html import escape

from logitmix.common.messages import shown

COLORS = 8
"""Number of colors; further groups reuse them."""
NONE = "-"
"""An empty cell of a table."""
POINTS = 300
"""Most points of a curve; with more rows, a point is the mean of several."""
Curve = Sequence[tuple[float, float]]
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 460, 250, 56, 34, 10, 26
"""Sizes of a chart in CSS pixels; the last four are the margins around the plot."""


def chart(title: str, x_label: str, curves: Sequence[tuple[int, Curve]]) -> str:
    """A figure with curves and the numbers of their colors; points that are not finite are left out."""
    finite = [(color, [point for point in curve if all(map(math.isfinite, point))]) for color, curve in curves]
    curves = [(color, thinned(curve, POINTS)) for color, curve in finite]
    points = [point for _, curve in curves for point in curve]
    caption = f"<figcaption>{markup(title)}</figcaption>"
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
    drawn.append(f'<text class="end soft" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}">{markup(x_label)}</text>')
    for number, curve in curves:
        way = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in curve)
        drawn.append(f'<polyline class="run r{number % COLORS}" points="{way}"/>')
        if len(curve) <= 40:
            drawn += [
                f'<circle class="r{number % COLORS}" cx="{x(at):.1f}" cy="{y(value):.1f}" r="3">'
                f"<title>{markup(x_label)} {at:,.6g}: {value:.4g}</title></circle>"
                for at, value in curve
            ]
    return (
        f'<figure>{caption}<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{markup(title)} over '
        f'{markup(x_label)}">{"".join(drawn)}</svg></figure>'
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


def bar(parts: Sequence[tuple[str, float, str]], longest: float) -> str:
    """A bar of parts with their names, sizes and texts; a bar of size `longest` takes the whole width."""
    spans = (
        f'<span class="part p{at % COLORS}" style="width:{100 * size / longest:.2f}%" '
        f'title="{markup(name)}: {markup(said)}"></span>'
        for at, (name, size, said) in enumerate(parts)
    )
    return f'<div class="bar">{"".join(spans)}</div>'


def key(at: int, name: str) -> str:
    """The heading of a column for a part of a bar."""
    return f'<span class="part key p{at % COLORS}"></span>{markup(name)}'


def markup(text: object) -> str:
    """A text as markup."""
    return escape(shown(text))


def swatch(number: int) -> str:
    return f'<span class="swatch r{number % COLORS}"></span>'


def section(title: str, content: str) -> str:
    return f"<section><h2>{markup(title)}</h2>{content}</section>"


def figures(charts: Sequence[str]) -> str:
    return f'<div class="charts">{"".join(charts)}</div>'


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Heads and cells are markup."""
    head = "".join(f"<th>{cell}</th>" for cell in heads)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


_LIGHT = ("#2563eb", "#c2410c", "#0f766e", "#9333ea", "#a16207", "#be185d", "#4d7c0f", "#475569")
_DARK = ("#7cb0ff", "#fb9a5b", "#4fd1bd", "#c79bff", "#e3bf45", "#ff8fc0", "#a3d65c", "#b6c2d3")


def _palette(colors: Sequence[str]) -> str:
    return "".join(f"--c{number}:{color};" for number, color in enumerate(colors))


STYLE = (
    f":root{{color-scheme:light dark;--paper:#ffffff;--ink:#1b1f26;--soft:#5b6472;--line:#dfe3e8;--mark:#fff1b8;"
    f"{_palette(_LIGHT)}}}"
    f"@media(prefers-color-scheme:dark){{:root{{--paper:#14171c;--ink:#e6e9ee;--soft:#9aa4b2;--line:#2e343d;"
    f"--mark:#4d4314;{_palette(_DARK)}}}}}"
    "body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif}"
    "main{max-width:980px;margin:0 auto;padding:24px}"
    "h1{font-size:24px;margin:0 0 12px}h2{font-size:18px;margin:36px 0 8px}p{margin:4px 0 12px;color:var(--soft)}"
    ".verdict{font-size:17px;color:var(--ink);border-left:4px solid var(--c0);padding-left:12px}"
    ".soft{color:var(--soft);font-weight:400}.wide{overflow-x:auto}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
    "th,td{text-align:left;padding:4px 16px 4px 0;border-bottom:1px solid var(--line);white-space:nowrap}"
    "th{font-weight:600}mark{background:var(--mark);color:inherit;padding:1px 4px}"
    ".swatch{display:inline-block;width:10px;height:10px;border-radius:5px;margin-right:8px;background:currentColor}"
    ".charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(320px,1fr));gap:8px 24px}"
    "figure{margin:8px 0}figcaption{font-weight:600}svg{width:100%;max-width:520px;height:auto}"
    "text{font-size:12px;fill:var(--soft)}.end{text-anchor:end}.mid{text-anchor:middle}"
    ".grid{stroke:var(--line)}.run{fill:none;stroke:currentColor;stroke-width:1.8;stroke-linejoin:round}"
    "circle{fill:currentColor}.bar{display:flex;width:220px;height:14px}.part{height:14px}"
    ".key{display:inline-block;width:10px;height:10px;margin-right:6px}"
    "details{margin-top:12px}summary{cursor:pointer}"
    + "".join(f".r{n}{{color:var(--c{n})}}.p{n}{{background:var(--c{n})}}" for n in range(COLORS))
)
