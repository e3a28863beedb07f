"""The sources that `logitmix prepare` can read, by the values of NAME. Imports none of them, so that --help is fast."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from logitmix.common.plugins import Registry

FILES = ("source", "max_rejects")
"""What every source that reads files takes: generated data has no malformed lines."""

COLUMNS = ("user_column", "item_column", "timestamp_column", "time_format", "title_column")
LAYOUT = ("delimiter", "quote", "encoding", "columns", "list_separator")


@dataclass(frozen=True)
class Source:
    read: str | Callable[..., Any]
    """A function, also as "module:attribute", that prepare calls:
    read(options: PrepareOptions, rejects: Rejects, progress: Progress) -> RawDataset."""
    takes: tuple[str, ...] = FILES
    """The settings of PrepareOptions that it uses, of those that not every source does."""
    others: str = ""
    """Regular expression of further names."""


_SOURCES = "logitmix.trainer.prepare.sources"
_AMAZON = Source(f"{_SOURCES}.amazon:read", (*FILES, "items"), "amazon-[a-z0-9][a-z0-9-]*")
SOURCES = Registry[Source](
    "source",
    {
        "demo": Source(f"{_SOURCES}.demo:read", ("seed",)),
        "demo-features": Source(f"{_SOURCES}.demo_features:read", ("seed",)),
        "demo-shop": Source(f"{_SOURCES}.demo_shop:read", ("seed",)),
        **dict.fromkeys(("ml-100k", "ml-1m", "ml-20m", "ml-latest"), Source(f"{_SOURCES}.movielens:read")),
        **dict.fromkeys(("amazon-beauty", "amazon-games", "amazon-books"), _AMAZON),
        "sequences": Source(f"{_SOURCES}.sequences:read"),
        "table": Source(f"{_SOURCES}.table:read", (*FILES, "items", "users", *COLUMNS, *LAYOUT)),
    },
    needs=("read", "takes", "others"),
    instances=True,
)


def source_of(name: str) -> Source | None:
    """The source that reads data of this name; None if there is none."""
    others = (source for source in SOURCES.values() if source.others and re.fullmatch(source.others, name))
    return SOURCES.get(name) or next(others, None)
