"""The sources that `logitmix prepare` can read, one line each. Imports none of them, so that --help is fast.

`sources/MODULE.py` has one function that prepare calls:

    read(options: PrepareOptions, rejects: Rejects, progress: Progress) -> RawDataset
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    module: str
    names: tuple[str, ...]
    """Values of NAME of `logitmix prepare`."""
    takes: tuple[str, ...] = ("source",)
    """The file settings that it takes."""
    others: str = ""
    """Regular expression of further names."""


SOURCES = (
    Source("demo", ("demo", "demo-low-rank"), ()),
    Source("demo_features", ("demo-features",), ()),
    Source("movielens", ("ml-100k", "ml-1m", "ml-20m", "ml-latest")),
    Source(
        "amazon", ("amazon-beauty", "amazon-games", "amazon-books"), ("source", "items"), "amazon-[a-z0-9][a-z0-9-]*"
    ),
    Source("sequences", ("sequences",)),
    Source("table", ("table",), ("source", "items", "users")),
)

NAMES = tuple(name for source in SOURCES for name in source.names)


def source_of(name: str) -> Source | None:
    """The source that reads data of this name; None if there is none."""
    return next((source for source in SOURCES if name in source.names or _matches(source, name)), None)


def _matches(source: Source, name: str) -> bool:
    return bool(source.others) and re.fullmatch(source.others, name) is not None
