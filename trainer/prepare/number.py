"""The rows that were read -> the actions of the dataset: chosen by --where, without exact duplicates, filtered,
numbered, and in order.

All of it is statements over tables, in a subset of SQL that sqlglot translates into that of other engines. They pass
through these tables:

    rows         what was read (tables.py)
    users_read, items_read    all ids: id, key in the order of the dataset, and whether conditions hold for it
    d_COLUMN     the different values of another column: value, key, and whether conditions hold for it
    coded        the chosen rows with keys in place of ids and values: file, line, place, user_key, item_key, time,
                 fraction, acts (false: it was shown), and a key for each column
    different    without exact duplicates
    shown, acting    what was no action, but shown, and what was one
    of_items, of_users    the actions that the filters leave; Numbered.table names the last table
    users, items the ids of these: id, key, and the index in the dataset

The order of the actions of a user is time, fraction, file, line, place.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from logitmix.trainer.data.arrow import order_of_texts
from logitmix.trainer.data.engine import Duck
from logitmix.trainer.data.where import Condition, of_time
from logitmix.trainer.prepare.config import PrepareOptions
from logitmix.trainer.prepare.tables import Job

STEPS = ("where", "duplicates", "shown", "min_item_actions", "min_user_actions")
SHOWN = "shown"
"""The feature of actions that PrepareOptions.shown makes."""
ORDER = "time, fraction, file, line, place"
KEPT_ORDER = f"user_index, {ORDER}"
BEFORE_ALL = -(2**62)
"""The time of what waits since an earlier `prepare`."""

VALUES = """
select {column} as value, row_number() over (order by {column}) - 1 as key
from (select distinct {column} from rows where {column} is not null) as different_values
"""
CODED = """
select r.file, r.line, r.place, u.key as user_key, i.key as item_key, {time} as time, r.fraction,
    {acts} as acts{keys}
from rows as r join users_read as u on r.user = u.id join items_read as i on r.item = i.id{joins}
where {chosen}
"""
REPEATED = """
select user_key, item_key, time, fraction, acts from coded
group by user_key, item_key, time, fraction, acts having count(*) > 1
"""
"""The moments that several actions share."""
DIFFERENT = """
select coded.* from coded anti join (
    select file, line, place from (
        select c.file, c.line, c.place, row_number() over (
            partition by c.user_key, c.item_key, c.time, c.fraction, c.acts{compared} order by c.file, c.line, c.place
        ) as nth
        from coded as c join repeated as p on c.user_key = p.user_key and c.item_key = p.item_key and c.time = p.time
            and c.fraction = p.fraction and c.acts = p.acts
    ) as numbered where nth > 1
) as again on coded.file = again.file and coded.line = again.line and coded.place = again.place
"""
"""Of rows that are equal in everything, the first one stays."""
OFTEN = "select {key} from {table} group by {key} having count(*) >= {least}"
ONLY = "select {table}.* from {table} semi join often on {table}.{key} = often.{key}"
COUNTS = "select count(distinct user_key), count(distinct item_key), count(*) from {table}"
KEPT_KEYS = "select distinct {what}_key as key from {table} order by key"


@dataclass
class Numbered:
    """The actions that are kept, and what was found on the way."""

    engine: Duck
    read_ids: dict[str, pa.Array]
    """All ids that were read, of "users" and "items"."""
    columns: dict[str, str]
    """The tables of the values of further columns, by the columns' names."""
    read: dict[str, int]
    """Users, items and actions before the filters."""
    table: str = "coded"
    """That has the actions."""
    user_ids: pa.Array = field(default_factory=lambda: pa.nulls(0, pa.string()))
    """In the order of the dataset."""
    item_ids: pa.Array = field(default_factory=lambda: pa.nulls(0, pa.string()))
    removed: dict[str, dict[str, int]] = field(default_factory=dict)
    """By filter: users, items and actions that it left out."""
    waiting: pa.Table | None = None
    """Raw ids, `user` and `item`, of what was shown and no action of the user follows yet, by user, oldest first. None
    without --shown."""
    used: dict[str, pa.Array] = field(default_factory=dict)
    """By column, the keys of its values."""

    def all_values(self, name: str) -> pa.Array:
        """The different values of a column of all actions that were read, by key."""
        return self.engine.table(f"select value from {self.columns[name]} order by key")["value"].combine_chunks()

    def values(self, name: str) -> tuple[pa.Array, np.ndarray]:
        """The different values of a column of the kept actions, in order of their keys, with null in the last place if
        some have none; and how many actions have each."""
        table = self.columns[name]
        found = self.engine.table(f"""
            select c.key as key, v.value as value, c.n as n
            from (select {table} as key, count(*) as n from {self.table} group by {table}) as c
            left join {table} as v on c.key = v.key order by c.key nulls last
        """)
        self.used[name] = found["key"].combine_chunks()
        return found["value"].combine_chunks(), found["n"].to_numpy()

    def keys(self, name: str) -> tuple[str, pa.Array]:
        """The column of the keys of a column's values, and these in the order of `values`."""
        return self.columns[name], self.used[name]

    def of_users(self, name: str) -> np.ndarray:
        """The key of each user's first action's value; -1 for none."""
        return self._of_each("user", name, "", "")

    def of_items(self, name: str, present: np.ndarray, last: bool = False) -> np.ndarray:
        """The key of the value of each item's first or last action that has one of the keys `present`, by any user; -1
        for none."""
        self.engine.put("present", pa.table({"key": pa.array(np.flatnonzero(present), pa.int64())}))
        return self._of_each(
            "item", name, f"semi join present on k.{self.columns[name]} = present.key", " desc" if last else ""
        )

    def _of_each(self, owner: str, name: str, only: str, direction: str) -> np.ndarray:
        order = ["time", "u.index", "fraction", "file", "line", "place"] if owner == "item" else ORDER.split(", ")
        ordered = ", ".join(f"{of}{direction}" for of in order)
        found = self.engine.table(f"""
            select o.index as index, found.value as value from {owner}s as o join (
                select k.{owner}_key as owner_key, k.{self.columns[name]} as value,
                    row_number() over (partition by k.{owner}_key order by {ordered}) as nth
                from {self.table} as k join users as u on k.user_key = u.key {only}
            ) as found on o.key = found.owner_key where found.nth = 1
        """)
        keys = np.full(len(self.item_ids if owner == "item" else self.user_ids), -1)
        keys[found["index"].to_numpy()] = found["value"].fill_null(-1).to_numpy()
        return keys

    @property
    def kept(self) -> str:
        """Returns the query of the kept actions, of which KEPT_ORDER is the order in the dataset."""
        keys = "".join(f", k.{table}" for table in self.columns.values())
        return f"""
            select u.index as user_index, i.index as item_index, k.time, k.fraction, k.file, k.line, k.place{keys}
            from {self.table} as k join users as u on k.user_key = u.key join items as i on k.item_key = i.key
        """


def number(engine: Duck, job: Job, numbering: Collection[str], waiting: pa.Table | None) -> Numbered:
    """Chooses, filters and numbers the rows. Actions that differ only in the columns `numbering` are duplicates.
    `waiting`, as in Numbered, was shown before the actions. ValueError if no actions are left."""
    options, actions, columns = job.options, job.actions, job.actions.columns
    names = [*filter(None, (options.user_column, options.item_column, options.timestamp_column)), *columns]
    conditions = [Condition.parse(text, "--where") for text in options.where]
    shown = [Condition.parse(text, "--shown") for text in options.shown]
    if shown and SHOWN in columns:
        raise ValueError(f"--shown makes a column {SHOWN}, and the actions have one; rename it, or leave --shown out")
    read_ids, tables, holding = dict[str, pa.Array](), dict[str, str](), dict[Condition, str]()
    for condition in (*conditions, *shown):
        condition.require_column(names)
        if condition.column == options.timestamp_column:
            holding[condition] = of_time(condition, actions.time, actions.unit, names)

    def held(name: str, values: pa.Array, table: str) -> dict[str, pa.Array]:
        """Returns whether the conditions on a column hold for its different values, as columns of the table of these
        values."""
        found = {}
        for place, condition in enumerate((*conditions, *shown)):
            if condition.column == name and condition not in holding:
                found[f"holds_{place}"], of_none = condition.holds(values, names)
                holding[condition] = f"coalesce({table}.holds_{place}, {str(of_none).lower()})"
        return found

    for what, column in (("user", options.user_column), ("item", options.item_column)):
        ids = actions.ids[what]
        read_ids[f"{what}s"], keys = _keys(ids["whole"].combine_chunks())
        more = held(column, read_ids[f"{what}s"], what[0])
        held_of_ids = {name: of.take(keys) for name, of in more.items()}
        engine.put(f"{what}s_read", pa.table({"id": ids["id"], "key": keys} | held_of_ids))
    for name, column in columns.items():
        tables[name] = table = f"d_{column[2:]}"
        engine.make(table, VALUES.format(column=column))
        if any(of.column == name for of in (*conditions, *shown)):
            values = engine.table(f"select value from {table} order by key")["value"].combine_chunks()
            engine.put(table, pa.table({"value": values, "key": np.arange(len(values))} | held(name, values, table)))
    joins = (f" left join {tables[name]} on r.{of} = {tables[name]}.value" for name, of in columns.items())
    engine.make(
        "coded",
        CODED.format(
            time=actions.time,
            acts=" and ".join(f"not ({holding[of]})" for of in shown) or "true",
            chosen=" and ".join(holding[of] for of in conditions) or "true",
            keys="".join(f", {table}.key as {table}" for table in tables.values()),
            joins="".join(joins),
        ),
    )
    (rows,) = engine.row("select count(*) from rows")
    if not engine.row("select count(*) from coded")[0]:
        raise ValueError(f"--where {' and '.join(options.where)} leaves none of the {rows:,} actions")
    read = {"users": len(read_ids["users"]), "items": len(read_ids["items"]), "actions": rows}
    engine.drop("rows")
    numbered = Numbered(engine, read_ids, tables, read)
    _filter(numbered, options, [table for name, table in tables.items() if name not in numbering])
    if options.shown:
        _add_shown(numbered, waiting)
    return numbered


def _filter(numbered: Numbered, options: PrepareOptions, compared: Sequence[str]) -> None:
    """Removes duplicates, which are equal in the keys `compared` too, and what is too rare, and numbers the rest."""
    engine, counts = numbered.engine, [numbered.read]

    def count() -> None:
        """Counts what is left, which the table before may have had already."""
        (rows,) = engine.row(f"select count(*) from {numbered.table}")
        same = rows == counts[-1]["actions"]
        found = counts[-1].values() if same else engine.row(COUNTS.format(table=numbered.table))
        counts.append(dict(zip(("users", "items", "actions"), found, strict=True)))

    def keep(name: str, query: str) -> None:
        engine.make(name, query)
        engine.drop(numbered.table)
        numbered.table = name

    count()
    if not options.keep_duplicates:
        engine.make("repeated", REPEATED)
        if engine.row("select count(*) from repeated")[0]:
            keep("different", DIFFERENT.format(compared="".join(f", c.{of}" for of in compared)))
    count()
    if options.shown:
        engine.make("shown", f"select * from {numbered.table} where not acts")
        keep("acting", f"select * from {numbered.table} where acts")
    count()
    for owner, least in (("item", options.min_item_actions), ("user", max(options.min_user_actions, 1))):
        if least > 1:
            engine.make("often", OFTEN.format(key=f"{owner}_key", table=numbered.table, least=least))
            if engine.row("select count(*) from often")[0] < counts[-1][f"{owner}s"]:
                keep(f"of_{owner}s", ONLY.format(table=numbered.table, key=f"{owner}_key"))
        count()
    if not counts[-1]["actions"]:
        before, repeated = counts[3], counts[1]["actions"] - counts[2]["actions"]
        raise ValueError(
            f"no user has {options.min_user_actions} or more actions (there were {before['users']:,} users with "
            f"{before['actions']:,} actions, without {repeated:,} exact duplicates); lower --min-user-actions or "
            "--min-item-actions"
        )
    for owner in ("user", "item"):
        keys = engine.table(KEPT_KEYS.format(what=owner, table=numbered.table))["key"].combine_chunks()
        ids = numbered.read_ids[f"{owner}s"].take(keys)
        # Ids of digits alone are ordered as numbers, once the others are left out.
        order = pa.array(order_of_texts(ids))
        engine.put(f"{owner}s", pa.table({"key": keys.take(order), "index": np.arange(len(order))}))
        setattr(numbered, f"{owner}_ids", ids.take(order))
    numbered.removed = {
        name: {of: was[of] - now[of] for of in was}
        for name, was, now in zip(STEPS, counts[:-1], counts[1:], strict=True)
    }


def _keys(whole: pa.Array) -> tuple[pa.Array, pa.Array]:
    """The different ids in the order of the dataset, and the place of each of `whole` among them."""
    distinct = whole.unique()
    distinct = distinct.take(pa.array(order_of_texts(distinct)))
    return distinct, pc.index_in(whole, value_set=distinct).cast(pa.int32())


def _add_shown(numbered: Numbered, waiting: pa.Table | None) -> None:
    """Gives the kept actions the column SHOWN: the items that were shown since the action before and up to its time; of
    actions at one time, they belong to the first. What no action follows waits."""
    engine = numbered.engine
    users, items = numbered.read_ids["users"], numbered.read_ids["items"]
    own = "user_key, item_key, time, fraction, file, line, place, acts"
    sources = [f"select {own} from {numbered.table}", f"select {own} from shown"]
    nobodys = None
    if waiting is not None and len(waiting):
        user, item = (waiting[name].combine_chunks().cast(pa.string()) for name in ("user", "item"))
        items = pa.concat_arrays([items, item.filter(pc.invert(pc.is_in(item, value_set=items))).unique()])
        user_key, item_key = pc.index_in(user, value_set=users), pc.index_in(item, value_set=items)
        nobodys = waiting.filter(user_key.is_null())
        places = np.arange(len(waiting))
        engine.put("waited", pa.table({"user_key": user_key, "item_key": item_key, "place": places}))
        sources.append(f"""
            select user_key, item_key, {BEFORE_ALL} as time, 0 as fraction, 0 as file, 0 as line, place, false as acts
            from waited where user_key is not null
        """)
    # What is shown at the time of an action comes before it: false is before true.
    engine.make(
        "followed",
        f"""
        select *, min(case when acts then nth end) over (
            partition by user_key order by nth rows between current row and unbounded following) as next
        from (
            select *, row_number() over (partition by user_key order by time, acts, fraction, file, line, place) as nth
            from ({" union all ".join(sources)}) as both_kinds
        ) as in_time
        """,
    )
    shown = engine.table("""
        select f.item_key as item_key, a.file as file, a.line as line, a.place as place
        from followed as f join followed as a on f.user_key = a.user_key and f.next = a.nth
        where not f.acts order by a.file, a.line, a.place, f.nth
    """)
    left = engine.table(
        "select user_key, item_key from followed where next is null and not acts order by user_key, nth"
    )
    engine.drop("followed", "shown")
    table = pa.table(
        {"user": users.take(left["user_key"].combine_chunks()), "item": items.take(left["item_key"].combine_chunks())}
    )
    if nobodys is not None and len(nobodys):
        table = pa.concat_tables([nobodys.cast(table.schema), table])
    numbered.waiting = by_user(table)
    lists = _lists(shown, items)
    distinct = lists["value"].combine_chunks()
    texts = pa.array([repr(of) for of in distinct.to_pylist()], pa.string()).dictionary_encode()
    first = np.unique(texts.indices.to_numpy(), return_index=True)[1]
    engine.put("d_shown", pa.table({"value": distinct.take(pa.array(first)), "key": np.arange(len(first))}))
    engine.put("shown_before", lists.drop(["value"]).append_column("d_shown", texts.indices.cast(pa.int64())))
    engine.make(
        "kept",
        f"select k.*, b.d_shown from {numbered.table} as k left join shown_before as b"
        " on k.file = b.file and k.line = b.line and k.place = b.place",
    )
    engine.drop(numbered.table)
    numbered.table, numbered.columns[SHOWN] = "kept", "d_shown"


def _lists(shown: pa.Table, item_ids: pa.Array) -> pa.Table:
    """One row for each action, with the list of the items that were shown before it."""
    places = np.stack([shown[name].to_numpy() for name in ("file", "line", "place")])
    starts = (
        np.flatnonzero(np.append(True, (places[:, 1:] != places[:, :-1]).any(0))) if len(shown) else np.empty(0, int)
    )
    values = item_ids.take(shown["item_key"].combine_chunks())
    lists = pa.ListArray.from_arrays(pa.array(np.append(starts, len(shown)), pa.int32()), values)
    return shown.select(["file", "line", "place"]).take(pa.array(starts)).append_column("value", lists)


def by_user(waiting: pa.Table) -> pa.Table:
    """In order of users; the rows of each stay in theirs."""
    users = waiting["user"].combine_chunks().dictionary_encode()
    rank = pc.rank(users.dictionary).to_numpy()
    return waiting.take(pa.array(np.argsort(rank[users.indices.to_numpy()], kind="stable"))).combine_chunks()
