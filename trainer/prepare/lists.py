"""Rows with a list of items -> rows with one item each.

A row has the items of one user or session: in a column of lists, or in a text with a separator. Lists of the same
length beside it (times, kinds of action) have one value for each item; all else is repeated for each.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from logitmix.trainer.data.engine import Duck
from logitmix.trainer.prepare.rejects import Rejects
from logitmix.trainer.prepare.scan import Raw, literal

_SAMPLE = 10_000
SEPARATORS = ("|", ",", ";", " ")
"""Those that a note proposes."""


class Lists:
    """The rows of all files of a source, and what is to be said of them."""

    def __init__(self, item: str, separator: str, rejects: Rejects) -> None:
        """`item`: the column with the lists."""
        self.item, self.separator, self.rejects = item, separator, rejects
        self.rows = self.actions = self.empty = 0
        """Rows with lists of items, their items, and rows without any."""
        self.first_empty = ""
        self.parallel: dict[str, bool] = {}
        """Whether the lists of another column have a value for each item."""
        self.repeated: dict[str, None] = {}
        """Columns with one value for all items of a row."""
        self.looked = False

    def explode(self, raw: Raw) -> Raw:
        """Returns the rows of a file with one item each. A row is malformed if a parallel list has another length than
        its list of items."""
        user, item = raw.keys[:2]
        kinds = dict(zip(raw.columns, raw.types(*raw.columns), strict=True))
        texts = {name for name, of in kinds.items() if self.separator and of.id == "varchar" and name != user}
        if item not in texts and kinds[item].id != "list":
            return self._propose(raw)
        raw, duck = raw.stored("lists"), raw.duck
        lists = {name: f"{of}_list" for name, of in raw.columns.items() if name in texts or kinds[name].id == "list"}
        split_texts = ", ".join(
            f"{split(of, self.separator) if name in texts else of} as {lists[name]}"
            for name, of in raw.columns.items()
            if name in lists
        )
        duck.make("lists", f"select *, {split_texts} from lists")
        items = lists[item]
        for name, of in lists.items():
            if name not in self.parallel and name != item:
                self.parallel[name] = (name in raw.keys and name not in texts) or _is_parallel(duck, of, items)
        parallel = {name: of for name, of in lists.items() if name == item or self.parallel[name]}
        self.repeated |= dict.fromkeys(name for name in raw.others if name not in parallel)
        wrong = "".join(
            f" when len({of}) <> coalesce(len({items}), 0) then concat({literal(name)}, ' has ', len({of}), "
            f"' values for ', coalesce(len({items}), 0), ' items')"
            for name, of in parallel.items()
        )
        duck.make(
            "lists",
            f"select * replace (case when problem is not null then problem{wrong} end as problem) from lists",
        )
        self._count(duck, raw.label, items)
        made = ", ".join(
            f"{f'unnest({parallel[name]})' if name in parallel else of} as {of}" for name, of in raw.columns.items()
        )
        duck.make(
            "exploded",
            f"""select line, problem, written, generate_subscripts({items}, 1)::integer - 1 as place, {made} from lists
            where problem is null union all by name
            select line, problem, coalesce(written, {raw.columns[user]}::varchar) as written, 0 as place from lists
            where problem is not null""",
        )
        one_time = len(raw.keys) > 2 and raw.keys[2] not in parallel
        return replace(raw, relation="exploded", one_time=one_time)

    def say(self) -> None:
        """What became of the lists, in a line each."""
        if self.separator and self.actions == self.rows:
            self.rejects.say(
                f"no text of {self.item} has {self.separator!r} in it (--list-separator): each is one item"
            )
            return
        if not self.rows:
            return
        parallel = [self.item, *(name for name, holds in self.parallel.items() if holds)]
        self.rejects.say(
            f"{self.rows:,} rows have lists: read as {self.actions:,} actions, each with its own {', '.join(parallel)}"
        )
        if self.empty:
            self.rejects.say(f"{self.empty:,} more rows have empty lists, such as {self.first_empty}")

    def numbers_of_rows(self, duck: Duck, columns: Mapping[str, str]) -> list[str]:
        """Those of the actions' columns that have their own value in most rows of lists, such as the number of a
        session: repeated for each item they look like something that actions have in common."""
        if self.actions == self.rows:
            return []
        texts = "count(distinct case when typeof({0}) in ('VARCHAR', 'BIGINT') then {0} end)"
        of = {name: texts.format(columns[name]) for name in self.repeated if name in columns}
        return [name for name, count in of.items() if 2 * duck.row(f"select {count} from rows")[0] > self.rows]

    def _count(self, duck: Duck, label: str, items: str) -> None:
        rows, actions, empty, first = duck.row(
            f"""select count(*) filter (len({items}) > 0), coalesce(sum(len({items})), 0),
                count(*) filter (coalesce(len({items}), 0) = 0), min(line) filter (coalesce(len({items}), 0) = 0)
            from lists where problem is null"""
        )
        self.first_empty = self.first_empty or (f"{label}:{first}" if empty else "")
        self.rejects.lines += empty
        self.rows, self.actions, self.empty = self.rows + rows, self.actions + actions, self.empty + empty

    def _propose(self, raw: Raw) -> Raw:
        """Says so where the first texts look like lists: each its own, of parts that come again. Returns the rows, as
        they can be read."""
        if self.looked:
            return raw
        item = raw.columns[raw.keys[1]]
        query = f"select {item}::varchar from {raw.relation} where {item} is not null limit {_SAMPLE}"
        texts = [text for (text,) in raw.duck.db.execute(query).fetchall()]
        self.looked = self.looked or bool(texts)
        if 2 * len(set(texts)) <= len(texts):
            return raw
        for separator in SEPARATORS:
            parts = [part.strip() for text in texts for part in text.strip().split(separator.strip() or None)]
            if len(parts) >= 3 * len(texts) and 2 * len(set(parts)) <= len(parts):
                self.rejects.say(
                    f"{raw.label}: {self.item} looks like lists ({texts[0][:40]!r}); if a row has several items, split "
                    f'them with --list-separator "{separator}"'
                )
                break
        return raw


def _is_parallel(duck: Duck, values: str, items: str) -> bool:
    """Returns whether most lists have as many values as there are items; a single item has one of everything."""
    same = f"count(*) filter (len({values}) = len({items})"
    counts = duck.row(
        f"""select count(*) filter (len({items}) > 1), {same} and len({items}) > 1),
            count(*) filter (len({items}) > 0), {same} and len({items}) > 0)
        from lists where {values} is not null"""
    )
    there, same = counts[:2] if counts[0] else counts[2:]
    return bool(2 * same > there)


def split(text: str, separator: str) -> str:
    """Returns the expression of the parts of a text without blanks and quotes around them, and without brackets around
    all; null for an empty text. At " ", any white space is between parts."""
    whole = f"trim(regexp_replace({text}, '(?s)^\\s*[\\[(](.*)[\\])]\\s*$', '\\1'), ' \t\n\r')"
    if not separator.strip():
        parts = f"string_split_regex(nullif({whole}, ''), '\\s+')"
    else:
        ended = f"regexp_replace(nullif({whole}, ''), {literal(re.escape(separator) + '$')}, '')"
        parts = f"string_split({ended}, {literal(separator)})"
    unquoted = "trim(part, ' \t\n\r')"
    for quote in ("''", '"'):
        unquoted = f"regexp_replace({unquoted}, '(?s)^{quote}(.*){quote}$', '\\1')"
    return f"[{unquoted} for part in {parts}]"
