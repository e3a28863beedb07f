"""Schema of a dataset and of a model: features, and the embedding tables of the sparse ones. Imports no torch."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any, Literal

from logitmix.common.mappings import nearest

from .kinds.base import Kind
from .kinds.date import TICKS
from .kinds.registry import KINDS, kind_named

Owner = Literal["item", "user", "event"]
"""What a feature has one value for: an item, a user, or one action of a user (an event)."""

ITEM = "item"
"""Name of the item id, the one required feature, and of its table."""
ALL = "all"
"""Instead of features' names: all that have a column in the dataset."""
RECENCY = "recency"
"""Name of a feature that every dataset has without a column, and of its table: the time since the user's previous
action. `modules.features.recency_rows` gives the rows from timestamps."""
RECENCY_VALUES = ("", *(str(bits) for bits in range(65)))
"""Vocabulary of that table: number of bits of the time, 0 to 64; unknown for a user's first action."""

USER = "user"
"""Name of another one, and of its table: the user's id. Row u + 1 is user u; row 0 is that of all users whom training
does not see."""

WANTED = "wanted_"
"""The beginning of the name of a feature of the next action."""


def require_kind(name: str, kind: str, kinds: Sequence[str]) -> None:
    """Raises ValueError if the kind of action that is wanted is none of those that training saw."""
    if kind not in kinds:
        there = ", ".join(map(repr, kinds[:10])) + (", …" if len(kinds) > 10 else "")
        raise ValueError(f"{name} is {kind!r:.40}; it must be one of {there}")


@dataclass(frozen=True)
class Table:
    """A table of embeddings."""

    name: str
    rows: int
    """Known values and the unknown one."""
    dim: int = 0
    """Width of its rows; 0 takes the model's."""
    values: int = 0
    """In a model where rows pass from value to value (tables.NAME.capacity): the values with the unknown one, and
    `rows` are fewer. 0: each value has its row."""

    def __post_init__(self) -> None:
        _require_name("table", self.name)
        if self.rows < 1:
            raise ValueError(f"table {self.name} has {self.rows} rows; it needs at least one, for unknown values")

    @property
    def ids(self) -> int:
        """Number of ids: of known values and the unknown one."""
        return self.values or self.rows

    @property
    def unknown(self) -> int:
        """The row of values that are missing or not in the vocabulary: 0, except for item ids the last row, because
        items are numbered from 0."""
        return self.rows - 1 if self.name == ITEM else 0


@dataclass(frozen=True)
class Feature:
    name: str
    owner: Owner
    kind: str
    """One of modules/kinds/registry.py."""
    table: str = ""
    """The table of a sparse feature; several features may share one."""
    width: int = 1
    """Numbers in a vector."""
    mean: float = 0.0
    """Mean of a number or of all numbers in a vector, over the dataset; missing values are stored as the mean. Of a
    date, what stands for a missing one."""
    deviation: float = 1.0
    """Standard deviation over the same numbers: (value - mean) / deviation normalizes."""
    columns: dict[str, str] = field(default_factory=dict, hash=False)
    """The source's columns of what is parallel to the values of a bag, such as its weights, by the kind's names."""
    unit: str = ""
    """Of dates, the unit of the actions' times: s, ms, us or ns."""
    encoder: str = ""
    """Of texts, what makes their vectors, and its version: modules/kinds/text.py."""
    version: str = ""

    def __post_init__(self) -> None:
        _require_name("feature", self.name)
        try:
            form = self.form
        except ValueError as error:
            raise ValueError(f"feature {self.name}: its {error}") from None
        if form.missing is not None:
            object.__setattr__(self, "mean", form.missing)
        numbers, date = f"mean {self.mean} and deviation {self.deviation}", f"of {self.owner}s with unit {self.unit!r}"
        finite = isfinite(self.mean) and 0 < self.deviation < inf
        texts = f"encoder {self.encoder!r} and version {self.version!r}"
        wrong = (
            (form.sparse and not self.table, "names no table; a sparse feature needs one"),
            (not form.sparse and self.table, "names a table; only kinds of ids have one"),
            (self.width < 1 or (self.width > 1 and not form.wide), f"has width {self.width}; only vectors are wide"),
            (form.sparse and (self.mean, self.deviation) != (0.0, 1.0), f"has {numbers}; only numbers do"),
            (not finite, f"has {numbers}; they must be finite, and the deviation above 0"),
            (
                form.dated and (self.owner != "item" or self.unit not in TICKS),
                f"is {date}; only items have dates, in the unit of the actions' times, one of {', '.join(TICKS)}",
            ),
            (form.of_texts != bool(self.encoder and self.version), f"has {texts}; texts alone have both"),
        )
        if problem := next((said for found, said in wrong if found), ""):
            raise ValueError(f"feature {self.name} of kind {self.kind} {problem}")

    @property
    def form(self) -> Kind:
        """What its values are, and what differs by kind."""
        return kind_named(self.kind)

    @property
    def sparse(self) -> bool:
        return self.form.sparse


@dataclass(frozen=True)
class Schema:
    features: tuple[Feature, ...]
    """Includes the item id."""
    tables: tuple[Table, ...]
    users: int = field(default=0, compare=False)
    """Of the dataset, where it is known: number of its users."""

    def __post_init__(self) -> None:
        for what, entries in (("feature", self.features), ("table", self.tables)):
            names = [entry.name for entry in entries]
            if twice := next((name for name in names if names.count(name) > 1), ""):
                raise ValueError(f"two {what}s are named {twice}; rename one of them")
        if ITEM_FEATURE not in self.features:
            raise ValueError(f"the schema has no feature {ITEM} of owner item, kind id and table {ITEM}: the item id")
        known, used = {table.name for table in self.tables}, {of.table: of.name for of in self.features if of.table}
        for table in used.keys() - known:
            raise ValueError(f"feature {used[table]} names table {table}, which is not there")
        for table in known - used.keys():
            raise ValueError(f"no feature uses table {table}; leave it out")
        if len(units := sorted({feature.unit for feature in self.features if feature.form.dated})) > 1:
            raise ValueError(f"dates have the units {' and '.join(units)}; the actions' times have one")

    def plugins(self) -> dict[str, str]:
        """Names and versions of the plugins that the kinds of its features come from."""
        used = [KINDS.plugins.get(feature.kind) for feature in self.features]
        return {plugin.name: plugin.version for plugin in used if plugin}

    @classmethod
    def of_ids(cls, items: int) -> "Schema":
        """Returns a schema with the item ids alone."""
        return cls((ITEM_FEATURE,), (Table(ITEM, items + 1),))

    def to_mapping(self) -> dict[str, list[dict[str, Any]]]:
        """Returns the schema for JSON and TOML, without fields at their defaults; `common.mappings.from_mapping(Schema,
        …)` reads it."""
        return {"features": [_fields(f) for f in self.features], "tables": [_fields(t) for t in self.tables]}

    def only(self, names: Sequence[str]) -> "Schema":
        """Returns the item id, the features with these names ("all" for all of this schema), and their tables.
        "recency" and, where the number of users is known, "user" need not be in the schema: they are added when they
        are named.

        ValueError for a name that is not there.
        """
        offered = self._with(RECENCY_FEATURE, len(RECENCY_VALUES))
        if self.users:
            offered = offered._with(USER_FEATURE, self.users + 1)
        known = [feature.name for feature in offered.features]
        for name in names:
            if name not in (*known, ALL):
                raise ValueError(
                    f"model.features names {name}, which the dataset does not have{nearest(name, known)}; "
                    f"it has {', '.join(name for name in known if name != ITEM) or 'item ids alone'}"
                )
        wanted = {ITEM, *names} | ({feature.name for feature in self.features} if ALL in names else set())
        kept = tuple(feature for feature in offered.features if feature.name in wanted)
        used = {feature.table for feature in kept}
        return Schema(kept, tuple(table for table in offered.tables if table.name in used))

    def wanting(self, name: str, whole: "Schema") -> "Schema":
        """Returns the schema with what the next action's value of a feature of the actions is, `whole` being the
        dataset's schema: a feature and a table of as many rows. ValueError if there is no such id, or if its name is
        taken."""
        feature = next((of for of in whole.of("event") if of.name == name), None)
        if feature is None or feature.kind != "id":
            ids = ", ".join(of.name for of in whole.of("event") if of.kind == "id") or "none"
            raise ValueError(f"model.wanted is {name}, which is no id of the actions; there are: {ids}")
        own = WANTED + name
        if own in {of.name for of in whole.features} | {of.name for of in whole.tables}:
            raise ValueError(f"model.wanted is {name}, but the dataset has a feature or table {own}; rename that")
        return self._with(Feature(own, "event", "id", own), whole.table(feature.table).rows)

    def _with(self, feature: Feature, rows: int) -> "Schema":
        """Returns the schema with a feature and its table, unless a feature or table of the schema has its name."""
        if feature.name in {of.name for of in self.features} | {table.name for table in self.tables}:
            return self
        return Schema((*self.features, feature), (*self.tables, Table(feature.table, rows)))

    @property
    def num_items(self) -> int:
        return self.table(ITEM).rows - 1

    @property
    def unit(self) -> str:
        """The unit of the times that dates of items are compared with; "" without dates."""
        return next((feature.unit for feature in self.features if feature.form.dated), "")

    @property
    def item_valued(self) -> list[str]:
        """Names of the features whose values are items: they use the item id's table, which exports do not hold."""
        return [feature.name for feature in self.features if feature.table == ITEM and feature.name != ITEM]

    def dims(self, dim: int) -> dict[str, int]:
        """Returns the width of each table's rows in a model of width `dim`."""
        return {table.name: table.dim or dim for table in self.tables}

    def of(self, owner: Owner) -> tuple[Feature, ...]:
        """Returns the features of an owner, in order, without the item id."""
        return tuple(feature for feature in self.features if feature.owner == owner and feature.name != ITEM)

    def weighs(self, table: str) -> bool:
        """Returns whether rows of a table may count differently in the sum of a bag."""
        return any(feature.table == table and feature.form.parallel for feature in self.features)

    def table(self, name: str) -> Table:
        """Returns the table of this name, which must exist."""
        return next(table for table in self.tables if table.name == name)


def _require_name(what: str, name: str) -> None:
    # These become names of files, columns, modules and settings.
    if not name.isidentifier():
        raise ValueError(f"{what} {name!r}: a name has letters, digits and underscores, and starts with no digit")


def _fields(entry: Feature | Table) -> dict[str, Any]:
    values = {of: getattr(entry, of.name) for of in dataclasses.fields(entry)}
    return {of.name: value for of, value in values.items() if value not in (of.default, {})}


ITEM_FEATURE = Feature(ITEM, "item", "id", ITEM)
RECENCY_FEATURE = Feature(RECENCY, "event", "id", RECENCY)
USER_FEATURE = Feature(USER, "user", "id", USER)
