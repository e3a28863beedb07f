"""Times as files write them -> whole numbers in one unit, and the fractions that they leave out.

Numbers keep their unit; dates become seconds since 1970, UTC where they name no zone. `unit_of_counts` tells the unit
of numbers from their magnitude: those between 1980 and 2100 in seconds, milliseconds, microseconds or nanoseconds.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from time import strptime, time

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from logitmix.trainer.data.arrow import as_numpy, is_text
from logitmix.trainer.data.description import LATEST, UNIT_NAMES, UNITS
from logitmix.trainer.data.engine import Duck, scratch

WINDOW = (315_532_800, 4_102_444_800)
"""1980 to 2100, in seconds since 1970."""
COMMON = 0.9
"""Share of the times that must be in the window of a unit: counters and other integers are spread more widely. The rest
may be the open ends of a database, such as 9999-12-31."""
DIGITS = {8: "%Y%m%d", 10: "%Y%m%d%H", 12: "%Y%m%d%H%M", 14: "%Y%m%d%H%M%S"}
"""Forms of dates written as numbers, by how many digits they have."""

TIME_TYPES = ("date", "timestamp", "timestamp_s", "timestamp_ms", "timestamp_ns", "timestamp with time zone")
INTEGER_TYPES = (
    "tinyint", "smallint", "integer", "bigint", "utinyint", "usmallint", "uinteger", "ubigint", "hugeint", "uhugeint"
)  # fmt: skip
"""DuckDB's types."""

_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_MONTH = rf"(?i:{'|'.join(_MONTHS)})[a-z]*\.?"
_HOUR, _MINUTE = "(?:[01][0-9]|2[0-3])", "[0-5][0-9]"
_ISO = rf"[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}([T ]{_HOUR}:{_MINUTE}:{_MINUTE}(\.[0-9]{{1,6}})?Z?)?"
"""What DuckDB reads as a timestamp, and many times faster than the next form, which has all of it."""
_WRITTEN = (
    r"^(?:[A-Za-z]{3,9},? )?(?:(?P<y1>[0-9]{4})[-/.](?P<m1>[0-9]{1,2})[-/.](?P<d1>[0-9]{1,2})"
    r"|(?P<y2>[0-9]{4})(?P<m2>[0-9]{2})(?P<d2>[0-9]{2})"
    rf"|(?P<d4>[0-9]{{1,2}})[-/. ](?P<name1>{_MONTH})[-/. ](?P<y4>[0-9]{{4}})"
    rf"|(?P<name2>{_MONTH}) (?P<d5>[0-9]{{1,2}}),? (?P<y5>[0-9]{{4}})"
    r"|(?P<a>[0-9]{1,2})(?P<mark>[-/.])(?P<b>[0-9]{1,2})[-/.](?P<y3>[0-9]{4}))"
    r"(?:(?:T|,? )(?P<hour>[0-9]{1,2})"
    r"(?::?(?P<minute>[0-9]{2})(?::?(?P<second>[0-9]{2})(?:[.,](?P<fraction>[0-9]+))?)?)?"
    r"(?:[ \x{a0}\x{202f}]?(?P<half>[AaPp][Mm]))?"
    r"(?: ?(?P<zone>Z|UTC|GMT|(?P<sign>[+-])(?P<zh>[0-9]{2}):?(?P<zm>[0-9]{2})?))?)?$"
)
"""All dates that are read: year first; compact; with the English name of the month, as 01-Jan-1995, Sun, 1 Jan 1995 or
January 1, 1995; or day and month before the year."""
_GROUPS = re.findall(r"\?P<(\w+)>", _WRITTEN)

READ_TEXTS = rf"""
with shaped as (
    select text, regexp_full_match(text, '-?[0-9]{{1,19}}(\.[0-9]*)?') as is_number,
        regexp_full_match(text, '-?[0-9]+(\.[0-9]*)?[eE]\+?[0-9]{{1,2}}') as is_power,
        case when regexp_full_match(text, '{_ISO}') then epoch_us(try_cast(text as timestamp)) end as iso
    from texts
), parts as (
    -- Digits alone are a number, even those of 20240131.
    select *, case when iso is null and not is_number and not is_power then
        regexp_extract(text, '{_WRITTEN}', {_GROUPS}) end as p
    from shaped
), fields as (
    select *, try_cast(concat(p.y1, p.y2, p.y3, p.y4, p.y5) as int) as year, try_cast(p.a as int) as one,
        try_cast(p.b as int) as two, try_cast(concat(p.d1, p.d2, p.d4, p.d5) as int) as date_day,
        coalesce(try_cast(concat(p.m1, p.m2) as int),
            list_position({_MONTHS}, lower(left(concat(p.name1, p.name2), 3)))) as date_month,
        coalesce(try_cast(p.hour as int), 0) as clock_hour, coalesce(try_cast(p.minute as int), 0) as minute,
        coalesce(try_cast(p.second as int), 0) as second, upper(p.half) as half,
        (case p.sign when '-' then -1 else 1 end)
            * (3600 * coalesce(try_cast(p.zh as int), 0) + 60 * coalesce(try_cast(p.zm as int), 0)) as ahead
    from parts
), readings as (
    select *, case when one is null or p.mark = '.' then 'date' when one > 12 then 'day first'
            when two > 12 then 'month first' else 'either' end as form,
        epoch(try(make_date(year, coalesce(two, date_month), coalesce(one, date_day))))::bigint as day_first,
        epoch(try(make_date(year, coalesce(one, date_month), coalesce(two, date_day))))::bigint as month_first,
        case when clock_hour < 24 and minute < 60 and second < 60 and abs(ahead) < 86400
            and (half = '' or clock_hour between 1 and 12) then
            3600 * case half when '' then clock_hour when 'AM' then clock_hour % 12 else clock_hour % 12 + 12 end
            + 60 * minute + second - ahead end as of_day
    from fields
), numbers as (
    select *, text like '-%' as negative,
        case when is_number then try_cast(regexp_extract(text, '[0-9]+') as ubigint) end as size,
        case when is_number then rpad(left(regexp_extract(text, '\.([0-9]*)', 1), 9), 9, '0')::int end as billionths,
        case when is_power and abs(try_cast(text as double)) < pow(2, 53) then floor(text::double)::bigint end as power
    from readings
)
select
    text, case when size < {LATEST} and negative then -(size::bigint) - (billionths > 0)::bigint
        when size < {LATEST} then size::bigint when power is not null then power
        when iso is not null then (iso - (iso % 1000000 + 1000000) % 1000000) // 1000000
        when form in ('date', 'day first') then day_first + of_day else month_first + of_day end as seconds,
    case when size is not null and negative and billionths > 0 then 1000000000 - billionths
        when size is not null then billionths
        when iso is not null then (iso % 1000000 + 1000000) % 1000000 * 1000
        else coalesce(try_cast(rpad(left(p.fraction, 9), 9, '0') as int), 0) end::int as fraction,
    case when is_number or is_power then 'number' when iso is not null then 'date' else form end as form,
    case when form = 'either' then day_first + of_day end as day_first
from numbers
"""
"""Of the column `text` of the table `texts`: seconds, null where there is no time, and billionths of them; how they are
written; and the seconds if the day were first, where that cannot be told."""


@dataclass
class Clock:
    """Reads the times of all files of a source. Their order of day and month is known when all are read."""

    form: str = ""
    """Of `datetime.strptime`; empty: numbers, and the common ways to write a date."""
    dates: bool = True
    """False: numbers alone."""
    examples: dict[str, str] = field(default_factory=dict)
    """By what they show: "day first", "month first", "either"; and "number", "date"."""

    def columns(self, duck: Duck, relation: str, value: str) -> dict[str, str]:
        """Returns the expressions of a relation's column: `time`, `fraction` in billionths of its unit, and `form`,
        which is null for numbers. The time is null where there is none, and where `read_written` is to find it.
        ValueError if the column cannot be times."""
        time, fraction, form = "null::bigint", "0", "null::varchar"
        kind = duck.db.sql(f"select {value} from {relation}").types[0].id
        rounded = f"select bool_or(abs({value}) > {2**24} and abs({value}) < {LATEST}::double) from {relation}"
        if kind == "float" and duck.row(rounded)[0]:
            raise ValueError("is of type float, which rounds such times; store it as double or integer")
        if kind in TIME_TYPES:
            ticks, size = (f"epoch_ns({value})", 10**9) if kind == "timestamp_ns" else (f"epoch_us({value})", 10**6)
            time, fraction = _floored(ticks, size)
            form = "'date'"
        elif kind in ("float", "double"):
            there = f"case when isfinite({value}) and abs({value}) < {LATEST}::double then {value}::double end"
            time, fraction = f"floor({there})::bigint", f"coalesce((({there} - floor({there})) * 1e9)::bigint, 0)"
        elif kind not in (*INTEGER_TYPES, "varchar", "decimal", "enum"):
            raise ValueError(f"is of type {kind}; times must be numbers, dates or timestamps")
        elif not self.form and kind in INTEGER_TYPES:
            time = f"case when abs({value}::hugeint) < {LATEST} then {value}::bigint end"
        elif not self.form:
            text = f"{value}::varchar"
            ticks = f"case when regexp_full_match({text}, '{_ISO}') then epoch_us(try_cast({text} as timestamp)) end"
            seconds, part = _floored(ticks, 10**6)
            # Of most numbers nothing else is asked.
            is_number = f"regexp_full_match({text}, '-?[0-9]{{1,18}}')"
            time = f"case when {is_number} then {text}::bigint {f'else {seconds} ' if self.dates else ''}end"
            if self.dates:
                fraction = f"case when {is_number} then 0 else coalesce({part}, 0) end"
                form = f"case when {is_number} then null when {ticks} is not null then 'date' end"
        return {"time": time, "fraction": f"({fraction})::integer", "form": form}

    def read_written(self, duck: Duck) -> None:
        """Finds the times of the rows of the table `rows` that have none yet, by the texts in `written`; and the
        examples, of which file and line are numbers."""
        duck.make("texts", "select distinct written as text from rows where time is null and problem is null")
        if duck.row("select count(text) from texts")[0]:
            if self.form:
                duck.put("moments", self._by_form(duck.table("select text from texts")["text"].combine_chunks()))
            else:
                duck.make("moments", READ_TEXTS)
            only = "" if self.dates else "and m.form = 'number'"
            duck.make(
                "rows",
                f"""select r.* replace (coalesce(r.time, m.seconds) as time, coalesce(r.form, m.form) as form,
                    (r.fraction + coalesce(m.fraction, 0))::integer as fraction, m.day_first as day_first)
                from rows as r left join moments as m on r.written = m.text and r.time is null and r.problem is null
                    and m.seconds > -{LATEST} and m.seconds < {LATEST} {only}""",
            )
            duck.drop("moments")
        duck.drop("texts")

    def note_examples(self, duck: Duck, place: str, order: str) -> None:
        """Notes the first time of each form in the table `rows`, by expressions of where a row is."""
        firsts = f"select coalesce(form, 'number'), min({order}) from rows where time is not null group by 1"
        for form, first in duck.db.execute(firsts).fetchall():
            text = f"{place} || ': ' || coalesce(written, time::varchar)"
            (self.examples[form],) = duck.row(f"select {text} from rows where {order} = {first} order by place limit 1")

    def _by_form(self, texts: pa.Array) -> pa.Table:
        """Texts by `form`, in the columns of READ_TEXTS."""
        seconds, fractions, epoch = list[int | None](), list[int](), datetime(1970, 1, 1, tzinfo=UTC)
        for text in texts.to_pylist():
            gap = timedelta()
            try:
                moment = datetime.strptime(text, self.form)
                gap = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - epoch
                # strptime also takes the names of this machine's zone, and drops them.
                zone = "" if moment.tzinfo or "%Z" not in self.form else strptime(text, self.form).tm_zone
                known = (zone or "UTC").upper() in ("UTC", "GMT")
            except (ValueError, TypeError):
                known = False
            seconds.append(gap.days * 86_400 + gap.seconds if known else None)
            fractions.append(gap.microseconds * 1000 if known else 0)
        nothing = pa.nulls(len(texts), pa.int64())
        found = {"text": texts, "seconds": pa.array(seconds, pa.int64()), "fraction": pa.array(fractions, pa.int32())}
        return pa.table(found | {"form": pa.array(["date"] * len(texts), pa.string()), "day_first": nothing})

    def settled(self, engine: Duck) -> str:
        """The expression of the times of all rows that were read, those of the table `rows`, as they are finally: days
        and months take the order that all of them show; dates written as numbers become dates. ValueError if the order
        cannot be told."""
        seen = self.examples
        if self.day_first():
            return "coalesce(r.day_first, r.time)"
        if set(seen) == {"number"} and self.dates and (form := digits_form(engine, "time", "rows")):
            seen["digits"] = seen.pop("number")
            return f"epoch(strptime(cast(r.time as varchar), '{form}'))::bigint"
        return "r.time"

    def day_first(self) -> bool:
        """Whether days come before months; also False if no date has them so. ValueError if that cannot be told."""
        seen = self.examples
        if "day first" in seen and "month first" in seen:
            raise ValueError(
                f"some dates have the day first ({seen['day first']}), others the month ({seen['month first']}); write "
                "them in one way, such as 2024-01-31"
            )
        if "either" in seen and "day first" not in seen and "month first" not in seen:
            raise ValueError(
                f"it cannot be told which of the first two numbers is the month ({seen['either']}); say it with "
                '--time-format, such as "%d/%m/%Y %H:%M"'
            )
        return "day first" in seen

    @property
    def unit(self) -> str | None:
        """ "s" if all times were written as dates, so that there is nothing to tell from their magnitude."""
        return "s" if self.examples and "number" not in self.examples else None

    def remarks(self) -> Iterator[str]:
        """What a user may want to know, in lines."""
        for order, written in (("day first", "day/month/year"), ("month first", "month/day/year")):
            if order in self.examples:
                yield f"dates are read as {written} ({self.examples[order]})"
        if "digits" in self.examples:
            yield f"the times are read as dates, not as numbers ({self.examples['digits']})"


def digits_form(engine: Duck, column: str, table: str) -> str:
    """The form of dates written as numbers, YYYYMMDD with two digits more for hours, minutes and seconds each; "" if
    one is no such date, is before 1900 or after 2100, or has another form."""
    least, most = engine.row(f"select min({column}), max({column}) from {table}")
    form = DIGITS.get(len(str(least)), "") if least is not None else ""
    year = 10 ** (len(str(least)) - 4)
    if not form or least < 1900 * year or most >= 2101 * year:
        return ""
    date = f"try_strptime(cast({column} as varchar), '{form}')"
    return form if engine.row(f"select count({column}) = count({date}) from {table}")[0] else ""


def _floored(ticks: str, size: int) -> tuple[str, str]:
    """Returns the expressions of whole seconds and of the billionths beyond them, of so many ticks a second."""
    part = f"(({ticks} % {size} + {size}) % {size})"
    return f"({ticks} - {part}) // {size}", f"{part} * {10**9 // size}"


def window(unit: str) -> tuple[int, int]:
    """The first time of 1980 and of 2100 in a unit."""
    return WINDOW[0] * UNITS[unit], WINDOW[1] * UNITS[unit]


def unit_of(engine: Duck, column: str, table: str, place: str = "''") -> str:
    """The unit of a column of times since 1970, one of UNITS; "" for other numbers. Those up to 0 do not count.
    ValueError if some are in one unit, others in another; `place` is an expression for where a row is."""
    within = {unit: f"{column} >= {window(unit)[0]} and {column} < {window(unit)[1]}" for unit in UNITS}
    counts = ", ".join(f"count(case when {of} then 1 end)" for of in within.values())
    above, *found = engine.row(f"select count(case when {column} > 0 then 1 end), {counts} from {table}")
    units = [unit for unit, count in zip(UNITS, found, strict=True) if count]
    if not units or sum(found) < COMMON * above:
        return ""
    if len(units) > 1:
        named = []
        for unit in units[:2]:
            where, time = engine.row(f"select {place}, {column} from {table} where {within[unit]} order by 1 limit 1")
            named.append(f"{UNIT_NAMES[unit]} ({where}{time})")
        raise ValueError(f"some times are in {named[0]} and others in {named[1]}; write all in one unit")
    return units[0]


def outliers_of(engine: Duck, column: str, unit: str) -> str:
    """Returns a line if some times of the table `rows`, which are dates in this unit, are before 1980 or in the future;
    "" otherwise."""
    first, end = window(unit)[0], int((time() + 86_400) * UNITS[unit])
    # The latest ones are the targets.
    count, least, most = engine.row(f"""
        select count(*), min(time), max(time) from (select {column} as time from rows as r) as times
        where time < {first} or time > {end}
    """)
    if not count:
        return ""
    example = max(least, most, key=abs)
    days = np.datetime64(example // UNITS[unit], "s").astype("M8[D]")
    are = "time is" if count == 1 else "times are"
    return f"{count:,} {are} before 1980 or in the future, such as {example} ({days})"


@dataclass(frozen=True)
class Dates:
    """Values of a column as dates."""

    days: np.ndarray
    """FP64, since 1970, in UTC where no zone is named; NaN for what is no date."""
    written: bool
    """Whether they are written as dates, not as numbers of seconds and the like."""


def read_dates(values: pa.Array) -> Dates:
    """ValueError where days cannot be told from months, and for values that are no dates as a whole."""
    clock, duck = Clock(), scratch()
    duck.put("dates", pa.table({"value": values}))
    time = ", ".join(f"{of} as {name}" for name, of in clock.columns(duck, "dates", "value").items())
    duck.make(
        "rows",
        f"""select rowid as line, 0 as place, {time}, value::varchar as written, null as problem,
        null::bigint as day_first from dates""",
    )
    clock.read_written(duck)
    clock.note_examples(duck, "'value:' || (line + 1)", "line")
    found = clock.settled(duck)
    unit = "s"
    if "number" in clock.examples:
        unit = "" if "date" in clock.examples else unit_of(duck, "time", "rows")
    if not unit:
        raise ValueError(f"are no dates ({clock.examples['number']})")
    days = duck.table(f"select ({found}) / {86_400 * UNITS[unit]}.0 as days from rows r order by line")["days"]
    return Dates(as_numpy(days.cast(pa.float64()).fill_null(np.nan)), "number" not in clock.examples)


def moments(values: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """Returns the seconds since 1970 of Arrow's dates and timestamps or of texts, with a zone or without; null for what
    is no date, numbers among texts. And their nanoseconds beyond these, int32. ValueError if days cannot be told from
    months."""
    if not is_text(values.type):
        times = values if pa.types.is_timestamp(values.type) else values.cast(pa.timestamp("s"))
        ticks, count = UNITS[times.type.unit], times.cast(pa.int64()).fill_null(0).to_numpy()
        seconds = pa.array(count // ticks, mask=np.asarray(times.is_null()))
        return seconds, (count % ticks * (10**9 // ticks)).astype(np.int32)
    engine, clock = scratch(), Clock()
    engine.put("texts", pa.table({"text": values}))
    found = engine.table(READ_TEXTS)
    is_date = pc.and_(pc.not_equal(found["form"], "number"), found["seconds"].is_valid())
    forms = pc.if_else(is_date, found["form"], None).combine_chunks()
    for form in forms.drop_null().unique().to_pylist():
        first = pc.index(forms, form).as_py()
        clock.examples[form] = f"value:{first + 1}: {values[first]}"
    seconds = pc.coalesce(found["day_first"], found["seconds"]) if clock.day_first() else found["seconds"]
    fraction = pc.if_else(is_date, found["fraction"], 0).combine_chunks().cast(pa.int32())
    return pc.if_else(is_date, seconds, None).combine_chunks(), fraction.fill_null(0).to_numpy()
