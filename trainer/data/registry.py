"""The sources that `logitmix prepare` can read, one line each. Imports none of them, so that --help is fast.

`sources/MODULE.py` has one function that prepare calls:

    read(options: PrepareOptions, rejects: Rejects, progress: Progress) -> RawDataset
"""

import re
from dataclasses import dataclass

FILES = ("source", "max_rejects")
"""What every source that reads files takes: generated data has no malformed lines."""

COLUMNS = ("user_column", "item_column", "timestamp_column", "time_format", "title_column")
LAYOUT = ("delimiter", "quote", "columns", "list_separator")


@dataclass(frozen=True)
class Source:
    module: str
    names: tuple[str, ...]
    """Values of NAME of `logitmix prepare`."""
    takes: tuple[str, ...] = FILES
    """The settings of PrepareOptions that it uses, of those that not every source does."""
    others: str = ""
    """Regular expression of further names."""


SOURCES = (
    Source("demo", ("demo", "demo-low-rank"), ("seed",)),
    Source("demo_features", ("demo-features",), ("seed",)),
    Source("movielens", ("ml-100k", "ml-1m", "ml-20m", "ml-latest")),
    Source("amazon", ("amazon-beauty", "amazon-games", "amazon-books"), (*FILES, "items"), "amazon-[a-z0-9][a-z0-9-]*"),
    Source("sequences", ("sequences",)),
    Source("table", ("table",), (*FILES, "items", "users", *COLUMNS, *LAYOUT)),
)

NAMES = tuple(name for source in SOURCES for name in source.names)


def source_of(name: str) -> Source | None:
    """The source that reads data of this name; None if there is none."""
    return next((source for source in SOURCES if name in source.names or _matches(source, name)), None)


def _matches(source: Source, name: str) -> bool:
    return bool(source.others) and re.fullmatch(source.others, name) is not None
