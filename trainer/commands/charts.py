"""Curves as SVG for the report's page, which gives them its colors, light or dark."""

import io
import re
from collections.abc import Callable, Sequence

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

COLORS = 8
"""Number of colors of the page; further groups reuse them."""
POINTS = 300
"""Most points of a curve; with more rows, a point is the mean of several."""
SOFT, LINE, GROUP = "#facade", "#decade", "#c0ffe"
"""Colors that the SVG has where the page's variables --soft, --line and, before a digit, --c0 to --c7 are to be."""
Curve = Sequence[tuple[float, float]]
STYLE = {
    "axes.edgecolor": LINE,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": SOFT,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "grid.color": LINE,
    "lines.linewidth": 1.4,
    "lines.markersize": 2,
    "svg.fonttype": "none",
    "svg.hashsalt": "logitmix",
    "xtick.color": SOFT,
    "ytick.color": SOFT,
}


def chart(
    x_label: str, curves: Sequence[tuple[int, Curve]], best: Callable[..., tuple[float, float, int]] | None
) -> Markup:
    """Draws curves, each with the number of its group.

    Args:
        x_label: What the points' first numbers are.
        curves: Points that are not finite are left out.
        best: `min` or `max`: the point of all curves that has its value written beside it; None for no such point.

    Returns:
        An SVG element; empty if there is no point.
    """
    # Integers of a file may be too large for numpy's.
    floats = [(group, [(float(x), float(value)) for x, value in curve]) for group, curve in curves]
    finite = [(group, [point for point in curve if np.isfinite(point).all()]) for group, curve in floats]
    points = [(value, x, group) for group, curve in finite for x, value in curve]
    if not points:
        return Markup()
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.6, 2.5))
        axes = figure.subplots()
        axes.set_xlabel(x_label)
        for group, curve in finite:
            axes.plot(*thinned(curve).T, marker="o", color=f"{GROUP}{group % COLORS}", clip_on=False)
        if best:
            value, x, group = best(points)
            beside = "bottom" if best is max else "top"
            axes.text(x, value, f"{value:.4g}", color=f"{GROUP}{group % COLORS}", ha="center", va=beside)
        figure.savefig(svg := io.StringIO(), format="svg", transparent=True)
    # Without what only a file of its own needs.
    text = re.sub(r"<metadata>.*</metadata>\n", "", svg.getvalue().partition("<svg")[2], flags=re.DOTALL)
    text = re.sub(f"{GROUP}(\\d)", r"var(--c\1)", text)
    return Markup("<svg" + text.replace(SOFT, "var(--soft)").replace(LINE, "var(--line)"))


def thinned(curve: Curve) -> np.ndarray:
    """Returns the points, or means of neighbors if there are more than POINTS."""
    points = np.array(curve).reshape(-1, 2)
    return points if len(points) <= POINTS else np.stack([part.mean(0) for part in np.array_split(points, POINTS)])
