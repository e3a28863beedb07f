"""Options of `logitmix prepare`. Imports no torch."""

import os
import re
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

from logitmix.common.mappings import nearest, require
from logitmix.common.messages import require_no_secrets
from logitmix.common.storage import path_of
from logitmix.modules.kinds.text import NGRAMS
from logitmix.trainer.prepare.registry import SOURCES, Source, source_of


@dataclass(frozen=True)
class PrepareOptions:
    """Raw files in, dataset directory out."""

    name: str
    """Format of the source, such as demo, ml-1m, amazon-CATEGORY or table; `logitmix --help` lists all."""
    source: str = ""
    """File, zip or folder to read; left empty, ml-100k, ml-1m and ml-20m are downloaded beside the output,
    or into the cache if that is a URL."""
    out: str = ""
    """Dataset directory to write, a path or URL; data/NAME when left empty."""
    min_user_actions: int = 5
    """Leave out users with fewer actions, counted after the item filter."""
    min_item_actions: int = 0
    """Leave out items with fewer actions, counted over all users; 0 keeps all."""
    items: str = ""
    """File or folder with data about items. table: CSV, JSON lines or Parquet, with ids in the item column, or else the
    first; amazon-*: the metadata, one JSON object per line, plain or .gz."""
    users: str = ""
    """File or folder with data about users, with ids in the user column, or else the first (table only)."""
    schema: str = ""
    """TOML file that describes columns: [features.NAME] with owner, kind, table, use."""
    embed: str = ""
    """Columns of texts, title,description: each becomes a feature, the vectors of its texts."""
    embed_with: str = NGRAMS
    """What makes vectors of texts: ngrams (n-grams of letters and an SVD), or the encoder of a plugin."""
    max_rejects: float = 0.01
    """Share of malformed lines above which the job stops (not for demo and demo-…)."""
    seed: int = 0
    """Seed of the demo generators (only they take it)."""
    user_column: str = "user"
    """Column with the user ids (table only); in JSON and nested Parquet, a path such as user.id."""
    item_column: str = "item"
    """Column with the item ids, or with lists of them (table only)."""
    timestamp_column: str = "timestamp"
    """Column with the times (table only): numbers in any unit, or dates, which are stored as whole seconds since 1970,
    UTC where they name no zone. "" takes the order of the rows."""
    time_format: str = ""
    """How the times are written, if not as numbers or in one of the usual ways (table only), in the letters of Python's
    strptime: "%d %b %Y %H:%M:%S %z". %Z is UTC or GMT; other names of zones are ambiguous."""
    delimiter: str = ""
    """Delimiter of CSV fields (table only): one character, \\t for a tab; left empty, it is inferred from the header,
    one of , ; | and tab."""
    encoding: str = ""
    """Encoding of texts that are not UTF-8 (table only; also of --items and --users): latin-1, cp1252, utf-16."""
    columns: str = ""
    """Names of the columns of a CSV without a header (table only, --source alone), in their order, "_" for those that
    are not read: user,item,_,timestamp."""
    title_column: str = "title"
    """Column of the items or actions with the items' titles (table only)."""
    quote: bool = False
    """Fields between tabs may be in quotes, as between commas (table only); otherwise their quotes are text."""
    list_separator: str = ""
    """What separates the items where a text has those of a whole user or session, and the times and other values beside
    them (table only): "|", "," or " ", which is any white space. Columns of lists need none."""
    where: tuple[str, ...] = ()
    """Keep only actions that fulfill this condition: --where "rating >= 4", with one of = != < <= > >=. Several must
    all hold: --where "event = purchase" --where "timestamp >= 2024-01-31"."""
    shown: tuple[str, ...] = ()
    """Rows that fulfill this condition, or one of several, are no actions: --shown "event = impression". Their items
    become the list `shown` of the user's next action, which --data.negatives shown trains on."""
    keep_duplicates: bool = False
    """Keep actions that are equal to an earlier one in user, item, time and all other columns. Without times there are
    none such."""
    memory: str = ""
    """Memory to work in, such as 4GiB, beside which actions wait in files next to the output; left empty, half of the
    machine's."""
    overwrite: bool = False
    """Replace the dataset that is already at the output."""
    append: str = ""
    """Dataset, a path or URL, that the actions are to follow: --out then has both, and what was there has the numbers
    that it had. All actions are kept, also those of users with few."""

    def __post_init__(self) -> None:
        if self.append:
            for name in ("min_user_actions", "min_item_actions", "embed", "embed_with"):
                if getattr(self, name) not in (getattr(PrepareOptions, name), 0):
                    flag = f"--{name.replace('_', '-')}"
                    raise ValueError(f"--append takes no {flag}: it keeps all actions, and the features that there are")
            if not self.out:
                raise ValueError("--append needs --out: a new directory, or the same one, which then becomes the whole")
        if self.embed and not self.embedded_columns:
            raise ValueError(f"--embed is {self.embed!r:.80}; it must be names of columns, such as title,description")
        if self.embed_with != NGRAMS and not (self.embed or self.schema):
            raise ValueError("--embed-with is for the columns that --embed names; give these, or leave it out")
        for name in ("source", "out", "items", "users", "schema", "append"):
            require_no_secrets(f"--{name}", getattr(self, name))
        source = source_of(self.name)
        if source is None:
            near, known = nearest(self.name, list(SOURCES)), ", ".join(SOURCES)
            raise ValueError(f"no data format named {self.name!r}{near}; there are: {known}")
        require(self.min_user_actions >= 0, "--min-user-actions", self.min_user_actions, "0 or more")
        require(self.min_item_actions >= 0, "--min-item-actions", self.min_item_actions, "0 or more")
        require(0 <= self.max_rejects <= 1, "--max-rejects", self.max_rejects, "a share from 0 to 1")
        require(0 <= self.seed < 2**63, "--seed", self.seed, "from 0 to 2^63 - 1")
        columns = [self.user_column, self.item_column, *filter(None, [self.timestamp_column])]
        if len({*columns} - {""}) < len(columns):
            raise ValueError(
                f"--user-column {self.user_column!r}, --item-column {self.item_column!r} and --timestamp-column "
                f"{self.timestamp_column!r} must be different columns"
            )
        one = self.delimiter in ("", "\\t") or (self.delimiter.isascii() and len(self.delimiter) == 1)
        require(
            one and self.delimiter not in ('"', "\r", "\n"), "--delimiter", repr(self.delimiter), "one character: ;"
        )
        such = "the name of an encoding, such as latin-1 or utf-16"
        require(not self.encoding or _is_encoding(self.encoding), "--encoding", repr(self.encoding), such)
        require(bool(self.bytes_of_memory), "--memory", repr(self.memory), "a size such as 4GiB or 512MiB")
        self._refuse_unused(source)

    def _refuse_unused(self, source: Source) -> None:
        """ValueError for a setting that the source does not use."""
        if "source" not in source.takes and self.source:
            raise ValueError(f"{self.name} is generated and takes no --source; to read a file give its format instead")
        for setting in fields(self):
            takers = [name for name, each in SOURCES.items() if setting.name in each.takes]
            given = getattr(self, setting.name) != setting.default
            if takers and setting.name not in source.takes and given:
                flag = setting.name.replace("_", "-")
                raise ValueError(f"{self.name} takes no --{flag}; leave it out (it is for {', '.join(takers)})")

    @property
    def directory(self) -> Path:
        """The output directory; the copy of a URL's."""
        return path_of(self.out or f"data/{self.name}")

    @property
    def embedded_columns(self) -> list[str]:
        return [name.strip() for name in self.embed.split(",") if name.strip()]

    @property
    def bytes_of_memory(self) -> int:
        """0 if what is given is no size."""
        if not self.memory:
            return machine_memory() // 2
        found = re.fullmatch(r"([0-9]+\.?[0-9]*)\s*([KMGT]?)(i?)B?", self.memory.strip(), re.IGNORECASE)
        return (
            int(float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2].upper() or " "))
            if found
            else 0
        )


def machine_memory() -> int:
    """Bytes of memory that this process may take."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # ValueError: "max", no limit
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


def _is_encoding(name: str) -> bool:
    try:
        "".encode(name)
    except (LookupError, ValueError):
        return False
    return True
