"""Results for people: metrics as a table, and dictionaries that show themselves."""

import io
from collections.abc import Mapping
from html import escape
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from logitmix.common.messages import shown
from logitmix.trainer.config import COMPARED_WITH

IN_GROUPS = ("hr@10", "users")
WIDTH = 100
"""Columns of a table that does not know where it will be shown."""


class Shown(dict[str, Any]):
    """A dict that a console and a notebook show as a text for people."""

    def __init__(self, content: Mapping[str, Any], text: str) -> None:
        super().__init__(content)
        self.text = text

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.text)}</pre>"


def metrics_table(metrics: Mapping[str, float], title: str) -> Table:
    """A row for each metric, with the baselines' in columns of their own; of groups of users HR@10 and their number."""
    beside = [name for name in COMPARED_WITH if f"{name}/hr@10" in metrics]
    heads = ("model", *(COMPARED_WITH[name] for name in beside)) if beside else ("value",)
    table = Table("metric", *heads, title=Text(shown(title)))
    for name in metrics:
        first, _, last = name.rpartition("/")
        if name.partition("/")[0] not in beside and (last in IN_GROUPS or not first.startswith("groups/")):
            names = [name, *(f"{of}/{name}" for of in beside)]
            table.add_row(Text(shown(name)), *(_number(metrics[of]) if of in metrics else "" for of in names))
    return table


def shown_metrics(metrics: Mapping[str, float], title: str) -> Shown:
    """Metrics that show themselves as a table."""
    text = io.StringIO()
    Console(file=text, width=WIDTH, force_jupyter=False).print(metrics_table(metrics, title))
    return Shown(metrics, text.getvalue().rstrip("\n"))


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
