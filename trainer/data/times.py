"""Times as files write them -> whole numbers in one unit, and the fractions that they leave out.

Numbers keep their unit; dates become seconds since 1970, UTC where they name no zone. `unit_of` tells the unit of
numbers from their magnitude: those between 1980 and 2100 in seconds, milliseconds, microseconds or nanoseconds.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from time import strptime
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from logitmix.trainer.data.arrow import is_text, is_time

LATEST = 2**62
"""Times are below it, and above its negative: their differences fit into 64 bits."""
UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
"""Ticks a second."""
UNIT_NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
WINDOW = (315_532_800, 4_102_444_800)
"""1980 to 2100, in seconds since 1970."""
COMMON = 0.9
"""Share of the times that must be in the window of a unit: counters and other integers are spread more widely. The rest
may be the open ends of a database, such as 9999-12-31."""

_ISO = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]+)?)?(Z|[+-][0-9]{2}(:?[0-9]{2})?)?)?$"
_ZONE = r"[T ].*(Z|[+-][0-9:]+)$"
_WRITTEN = (
    r"^(?:(?P<y1>[0-9]{4})[-/.](?P<m1>[0-9]{1,2})[-/.](?P<d1>[0-9]{1,2})"
    r"|(?P<y2>[0-9]{4})(?P<m2>[0-9]{2})(?P<d2>[0-9]{2})"
    r"|(?P<a>[0-9]{1,2})(?P<mark>[-/.])(?P<b>[0-9]{1,2})[-/.](?P<y3>[0-9]{4}))"
    r"(?:(?:T|,? )(?P<hour>[0-9]{1,2})"
    r"(?::?(?P<minute>[0-9]{2})(?::?(?P<second>[0-9]{2})(?:[.,](?P<fraction>[0-9]+))?)?)?"
    r"(?:[ \x{a0}\x{202f}]?(?P<half>[AaPp][Mm]))?"
    r"(?: ?(?P<zone>Z|UTC|GMT|(?P<sign>[+-])(?P<zh>[0-9]{2}):?(?P<zm>[0-9]{2})?))?)?$"
)
"""What else is read, year first; compact; or day and month before the year."""
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH = rf"(?i:{'|'.join(_MONTHS)})[a-z]*\.?"
_NAMED = (
    rf"^(?:[A-Za-z]{{3,9}},? )?(?:(?P<d1>[0-9]{{1,2}})[-/. ](?P<m1>{_MONTH})|(?P<m2>{_MONTH}) (?P<d2>[0-9]{{1,2}}),?)"
    r"[-/. ](?P<year>[0-9]{4})(?P<rest>.*)$"
)
"""Dates with the English name of a month: 01-Jan-1995, Sun, 1 Jan 1995, January 1, 1995."""
_NUMBER = r"^-?[0-9]{1,19}(\.[0-9]*)?$"
_POWER = r"^-?[0-9]+(\.[0-9]*)?[eE]\+?[0-9]{1,2}$"
_DIGITS = {8: 1_00_00, 10: 1_00_00_00, 12: 1_00_00_00_00, 14: 1_00_00_00_00_00}
"""Digits of dates written as numbers, YYYYMMDD to YYYYMMDDhhmmss, and what their years are multiples of."""
_UNDECIDED = 2**61
"""Added to dates of which day and month cannot be told apart yet; in seconds, no other date comes near."""


@dataclass(frozen=True)
class Times:
    """A column of times."""

    written: pa.Array
    values: np.ndarray
    """int64; 0 where there is no time."""
    there: np.ndarray
    """bool: which rows have a time."""
    nanoseconds: np.ndarray | None = None
    """int32: what `values` leave out, in 10^-9 of their unit; None: all 0."""


@dataclass
class Clock:
    """Reads the times of all files of a source. Their order of day and month is known when all are read."""

    form: str = ""
    """Of `datetime.strptime`; empty: numbers, and the common ways to write a date."""
    dates: bool = True
    """False: numbers alone."""
    examples: dict[str, str] = field(default_factory=dict)
    """By what they show: "day first", "month first", "either"; and "number", "date"."""

    def read(self, label: str, numbers: np.ndarray, column: pa.Array) -> Times:
        """ValueError if the column cannot be times. `numbers` are the rows' places in the file `label`."""
        self._place = label, numbers
        return self._read(column)

    def _read(self, column: pa.Array) -> Times:
        kind = column.type
        if pa.types.is_dictionary(kind):
            return self._read(column.cast(kind.value_type))
        if is_time(kind):
            seconds, there = _filled(seconds_of_times(column))
            self._note("date", there, pa.array(seconds))
            return Times(column, seconds, there, nanoseconds_of_times(column))
        if self.form and (pa.types.is_integer(kind) or is_text(kind)):
            return self._by_form(column.cast(pa.string()))
        if pa.types.is_integer(kind):
            return self._numbers(column, *_filled(column))
        if pa.types.is_floating(kind):
            return self._floats(column)
        if is_text(kind) or pa.types.is_decimal(kind):
            return self._texts(column.cast(pa.string()))
        raise ValueError(f"is of type {kind}; times must be numbers, dates or timestamps")

    def settle(self, values: np.ndarray) -> np.ndarray:
        """Times of all rows that were read, as they are finally. ValueError as `settling` raises it."""
        change = self.settling(lambda: [values])
        return change(values) if change else values

    def settling(self, pieces: Callable[[], Iterable[np.ndarray]]) -> Callable[[np.ndarray], np.ndarray] | None:
        """What makes the times of all rows that were read, `pieces`, final; None: they are. Days and months take the
        order that all of them show; dates written as numbers become dates. ValueError if the order cannot be told."""
        seen = self.examples
        if "day first" in seen and "month first" in seen:
            raise ValueError(
                f"some dates have the day first ({seen['day first']}), others the month ({seen['month first']}); write "
                "them in one way, such as 2024-01-31"
            )
        if "either" in seen:
            if "day first" not in seen and "month first" not in seen:
                raise ValueError(
                    f"it cannot be told which of the first two numbers is the month ({seen['either']}); say it with "
                    '--time-format, such as "%d/%m/%Y %H:%M"'
                )
            return partial(_decided, day_first="day first" in seen)
        if set(seen) == {"number"} and are_digits(pieces()):
            seen["digits"] = seen.pop("number")
            return _of_digits
        return None

    @property
    def unit(self) -> str | None:
        """ "s" if all times were written as dates, so that there is nothing to tell from their magnitude."""
        return "s" if self.examples and "number" not in self.examples else None

    def said(self) -> Iterable[str]:
        """What a user may want to know, in lines."""
        for order, written in (("day first", "day/month/year"), ("month first", "month/day/year")):
            if order in self.examples:
                yield f"dates are read as {written} ({self.examples[order]})"
        if "digits" in self.examples:
            yield f"the times are read as dates, not as numbers ({self.examples['digits']})"

    def _note(self, what: str, which: np.ndarray, written: pa.Array, rows: np.ndarray | None = None) -> None:
        """Keeps the first example of `what`, of texts that are at `rows` of the block, if these are not all."""
        if what not in self.examples and which.any():
            row = int(np.argmax(which))
            label, numbers = self._place
            self.examples[what] = f"{label}:{numbers[row if rows is None else rows[row]]}: {written[row]}"

    def _numbers(
        self, written: pa.Array, values: np.ndarray, there: np.ndarray, fractions: np.ndarray | None = None
    ) -> Times:
        there = there & (values > -LATEST) & (values < LATEST)
        self._note("number", there, written)
        return Times(written, np.where(there, values, 0).astype(np.int64), there, fractions)

    def _floats(self, column: pa.Array) -> Times:
        values = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
        with np.errstate(invalid="ignore"):
            there = np.abs(values) < LATEST
            if column.type != pa.float64() and (there & (np.abs(values) > 2**24)).any():
                raise ValueError(f"is of type {column.type}, which rounds such times; store it as double or integer")
        values = np.where(there, values, 0)
        whole = np.floor(values)
        return self._numbers(column, whole, there, ((values - whole) * 1e9).astype(np.int32))

    def _texts(self, texts: pa.StringArray) -> Times:
        try:
            values = texts.cast(pa.int64())
        except pa.ArrowInvalid:
            return self._mixed(texts)
        return self._mixed(texts) if _has_hexadecimal(texts) else self._numbers(texts, *_filled(values))

    def _mixed(self, texts: pa.StringArray) -> Times:
        """Whole numbers, others, and dates."""
        values, there = np.zeros(len(texts), np.int64), np.zeros(len(texts), bool)
        nanoseconds = np.zeros(len(texts), np.int32)
        plain = _matches(texts, _NUMBER)
        if plain.any():
            rows = np.flatnonzero(plain)
            values[rows], nanoseconds[rows], there[rows] = _decimals(texts.take(pa.array(rows)))
        powers = ~plain & _matches(texts, _POWER)
        if powers.any():
            rows = np.flatnonzero(powers)
            floats = texts.take(pa.array(rows)).cast(pa.float64()).to_numpy()
            there[rows] = exact = np.abs(floats) < 2**53
            values[rows] = np.floor(np.where(exact, floats, 0))
        self._note("number", there, texts)
        if self.dates and not plain.all():
            dates, of_dates = self._dates(texts)
            seconds, known = _filled(dates)
            values[known], nanoseconds[known], there = seconds[known], of_dates[known], there | known
        return Times(texts, values, there, nanoseconds)

    def _dates(self, texts: pa.StringArray) -> tuple[pa.Int64Array, np.ndarray]:
        """Seconds, null for other texts; and nanoseconds."""
        shaped = pc.if_else(pc.match_substring_regex(texts, _ISO), texts, None)
        seconds, nanoseconds = _of_iso(shaped), nanoseconds_of_texts(shaped)
        self._note("date", np.asarray(seconds.is_valid()), texts)
        # Digits alone are a number, even those of 20240131.
        others = pc.and_(shaped.is_null(), pc.invert(pc.fill_null(pc.ascii_is_decimal(texts), True)))
        rows = np.flatnonzero(np.asarray(others))
        if not len(rows):
            return seconds, nanoseconds
        found, known = _filled(seconds)
        nanoseconds = nanoseconds.copy()
        found[rows], nanoseconds[rows], known[rows] = self._written(texts.take(pa.array(rows)), rows)
        self._note("date", known, texts)
        return pa.array(found, mask=~known), nanoseconds

    def _written(self, texts: pa.StringArray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Seconds, nanoseconds, and which are dates, of texts at `rows` of the block."""
        found = pc.extract_regex(_in_digits(texts), _WRITTEN)
        there = np.asarray(found.is_valid())

        def text(*names: str) -> pa.StringArray:
            parts = [pc.fill_null(pc.struct_field(found, name), "") for name in names]
            return pc.binary_join_element_wise(*parts, "")

        def number(*names: str) -> np.ndarray:
            digits = text(*names)
            return pc.if_else(pc.equal(digits, ""), "0", digits).cast(pa.int64()).to_numpy()

        first, second = number("a"), number("b")
        numbered, dots = first > 0, np.asarray(pc.equal(text("mark"), "."))
        day_first = numbered & (dots | (first > 12))
        either = numbered & ~dots & (first <= 12) & (second <= 12)
        month_first = numbered & ~day_first & ~either
        year = number("y1", "y2", "y3")
        month = np.where(numbered, np.where(day_first, second, first), number("m1", "m2"))
        day = np.where(numbered, np.where(day_first, first, second), number("d1", "d2"))
        hour, half = number("hour"), pc.utf8_upper(text("half"))
        halves = np.asarray(pc.not_equal(half, ""))
        there &= ~halves | ((hour >= 1) & (hour <= 12))
        hour = np.where(halves, hour % 12 + 12 * np.asarray(pc.equal(half, "PM")), hour)
        ahead = np.where(np.asarray(pc.equal(text("sign"), "-")), -1, 1) * (3600 * number("zh") + 60 * number("zm"))
        seconds, real = _seconds_of(year, month, day, hour, number("minute"), number("second"))
        there &= real & (np.abs(ahead) < 86_400)
        seconds = np.where(there, seconds - ahead, 0)
        for what, which in (("day first", day_first & ~dots), ("month first", month_first), ("either", either)):
            self._note(what, which & there, texts, rows)
        seconds[either & there] += _UNDECIDED
        fraction = pc.utf8_slice_codeunits(pc.utf8_rpad(text("fraction"), 9, "0"), 0, 9)
        return seconds, fraction.cast(pa.int32()).to_numpy(), there

    def _by_form(self, texts: pa.StringArray) -> Times:
        encoded = texts.dictionary_encode()
        parsed = [_strptime(text, self.form) for text in encoded.dictionary.to_pylist()]
        known = np.array([time is not None for time in parsed] + [False])
        pairs = np.array([time or (0, 0) for time in parsed] + [(0, 0)], np.int64)
        codes = encoded.indices.fill_null(len(parsed)).to_numpy()
        self._note("date", known[codes], texts)
        return Times(texts, pairs[codes, 0], known[codes], pairs[codes, 1].astype(np.int32))


def _in_digits(texts: pa.StringArray) -> pa.StringArray:
    """Returns dates with the name of a month as 1995-1-1, and what follows them; other texts are unchanged."""
    found = pc.extract_regex(texts, _NAMED)
    month, day = (
        pc.binary_join_element_wise(*(pc.struct_field(found, f"{part}{way}") for way in "12"), "") for part in "md"
    )
    number = pc.index_in(pc.utf8_slice_codeunits(pc.utf8_lower(month), 0, 3), value_set=pa.array(_MONTHS))
    year, rest = pc.struct_field(found, "year"), pc.struct_field(found, "rest")
    date = pc.binary_join_element_wise(year, pc.add(number, 1).cast(pa.string()), day, "-")
    return pc.coalesce(pc.binary_join_element_wise(date, rest, ""), texts)


def _strptime(text: str, form: str) -> tuple[int, int] | None:
    """Seconds and nanoseconds."""
    try:
        time = datetime.strptime(text, form)
        # strptime also takes the names of this machine's zone, and drops them.
        if "%Z" in form and not time.tzinfo and (strptime(text, form).tm_zone or "UTC").upper() not in ("UTC", "GMT"):
            return None
    except ValueError:
        return None
    gap = (time if time.tzinfo else time.replace(tzinfo=UTC)) - datetime(1970, 1, 1, tzinfo=UTC)
    return gap.days * 86_400 + gap.seconds, gap.microseconds * 1000


def unit_of(times: np.ndarray | Iterable[np.ndarray], examples: Mapping[str, str] = MappingProxyType({})) -> str:
    """The unit of times since 1970, int64, in one or several arrays, one of UNITS; "" for other numbers. Those up to 0
    do not count.

    ValueError if some are in one unit, others in another; `examples` has one of each unit.
    """
    counts, above, first = dict.fromkeys(UNITS, 0), 0, dict[str, Any]()
    for values in [times] if isinstance(times, np.ndarray) else times:
        above += int(np.count_nonzero(values > 0))
        for unit in UNITS:
            fit = within(values, unit)
            if fit.any():
                counts[unit] += int(np.count_nonzero(fit))
                first.setdefault(unit, values[np.argmax(fit)])
    return unit_of_counts(counts, above, {**first, **examples})


def unit_of_counts(counts: Mapping[str, int], above: int, examples: Mapping[str, Any]) -> str:
    """As `unit_of`, of times of which so many may be in each unit, and so many are above 0."""
    units = [unit for unit, count in counts.items() if count]
    if not units or sum(counts.values()) < COMMON * above:
        return ""
    if len(units) > 1:
        found = [f"{UNIT_NAMES[unit]} ({examples[unit]})" for unit in units[:2]]
        raise ValueError(f"some times are in {found[0]} and others in {found[1]}; write all in one unit")
    return units[0]


def said_of_outliers(pieces: Iterable[np.ndarray], unit: str, now: float) -> str:
    """Returns a line if some times, which are dates in this unit, are before 1980 or in the future; "" otherwise."""
    first, end, count, example = window(unit)[0], (now + 86_400) * UNITS[unit], 0, 0
    for values in pieces:
        outside = values[(values < first) | (values > end)]
        count += len(outside)
        # The latest ones are the targets.
        example = max(example, int(outside.max()), key=abs) if len(outside) else example
    if not count:
        return ""
    days = np.datetime64(example // UNITS[unit], "s").astype("M8[D]")
    are = "time is" if count == 1 else "times are"
    return f"{count:,} {are} before 1980 or in the future, such as {example} ({days})"


def note_units(examples: dict[str, str], label: str, numbers: np.ndarray, values: np.ndarray) -> None:
    """Adds one of the times for each unit in which some may be and of which there is none yet."""
    for unit in UNITS.keys() - examples.keys():
        found = within(values, unit)
        if found.any():
            row = int(np.argmax(found))
            examples[unit] = f"{label}:{numbers[row]}: {values[row]}"


def window(unit: str) -> tuple[int, int]:
    """The first time of 1980 and of 2100 in a unit."""
    return WINDOW[0] * UNITS[unit], WINDOW[1] * UNITS[unit]


def within(values: np.ndarray, unit: str) -> np.ndarray:
    """Which of the times are between 1980 and 2100 if they are in this unit."""
    first, end = window(unit)
    return (values >= first) & (values < end)


def seconds_of_digits(values: np.ndarray) -> np.ndarray | None:
    """Dates written as numbers, YYYYMMDD, with two digits more for hours, minutes and seconds each. None if a number
    is no such date, or one before 1900 or after 2100."""
    return found[1] if (found := _dates(values)) else None


def _of_digits(values: np.ndarray) -> np.ndarray:
    seconds = seconds_of_digits(values)
    assert seconds is not None
    return seconds


def are_digits(pieces: Iterable[np.ndarray]) -> bool:
    """Whether all are such dates of one form."""
    forms = set()
    for values in pieces:
        if (found := _dates(values)) is None:
            return False
        forms.add(found[0])
    return len(forms) == 1


def _dates(values: np.ndarray) -> tuple[int, np.ndarray] | None:
    """How many digits they have, and their seconds."""
    if not len(values):
        return None
    for digits, year in _DIGITS.items():
        if values.min() >= 1900 * year and values.max() < 2101 * year:
            pairs = [values // 100**place % 100 for place in range((digits - 6) // 2 + 1)][::-1]
            while len(pairs) < 5:
                pairs.append(np.zeros_like(values))
            seconds, real = _seconds_of(values // year, *pairs)
            return (digits, seconds) if real.all() else None
    return None


def _decided(values: np.ndarray, day_first: bool) -> np.ndarray:
    """Dates that were read as month/day, in the order that is known now."""
    rows = np.flatnonzero(np.abs(values - _UNDECIDED) < WINDOW[1] * 100)
    seconds = values[rows] - _UNDECIDED
    if day_first:
        days = (seconds // 86_400).astype("M8[D]")
        months = days.astype("M8[M]")
        year, month = months.astype("M8[Y]").astype(int) + 1970, months.astype(int) % 12 + 1
        seconds = seconds % 86_400 + _seconds_of(year, (days - months).astype(int) + 1, month)[0]
    values = values.copy()
    values[rows] = seconds
    return values


def _seconds_of(
    year: np.ndarray,
    month: np.ndarray,
    day: np.ndarray,
    hour: np.ndarray | int = 0,
    minute: np.ndarray | int = 0,
    second: np.ndarray | int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Since 1970; and which of the times exist."""
    months = (year - 1970).astype("M8[Y]").astype("M8[M]") + (month - 1)
    days = months.astype("M8[D]") + (day - 1)
    real = (month >= 1) & (month <= 12) & (day >= 1) & (days.astype("M8[M]") == months)
    real &= (np.asarray(hour) < 24) & (np.asarray(minute) < 60) & (np.asarray(second) < 60)
    return days.astype(np.int64) * 86_400 + hour * 3600 + minute * 60 + second, real


def seconds_of_texts(texts: pa.StringArray) -> pa.Int64Array:
    """Dates, with a time of day and a zone or without; null for other texts, numbers among them. ValueError if days
    cannot be told from months."""
    clock = Clock()
    clock._place = "value", np.arange(1, len(texts) + 1)
    seconds, known = _filled(clock._dates(texts)[0])
    return pa.array(clock.settle(seconds), mask=~known)


@dataclass(frozen=True)
class Dates:
    """Values of a column as dates."""

    days: np.ndarray
    """FP64, since 1970, in UTC where no zone is named; NaN for what is no date."""
    written: bool
    """Whether they are written as dates, not as numbers of seconds and the like."""


def read_dates(values: pa.Array) -> Dates:
    """ValueError where days cannot be told from months, and for values that are no dates as a whole."""
    clock = Clock()
    found = clock.read("value", np.arange(1, len(values) + 1), values)
    times, unit = clock.settle(found.values[found.there]), "s"
    if "number" in clock.examples:
        unit = "" if "date" in clock.examples else unit_of(times)
    if not unit:
        raise ValueError(f"are no dates ({clock.examples['number']})")
    days = np.full(len(values), np.nan)
    days[found.there] = times / (86_400 * UNITS[unit])
    return Dates(days, "number" not in clock.examples)


def nanoseconds_of_texts(texts: pa.StringArray) -> np.ndarray:
    """int32: the fractions of a second in ISO 8601 texts, up to 9 digits; 0 without one."""
    digits = pc.struct_field(pc.extract_regex(texts, r"\.(?P<digits>[0-9]{1,9})"), "digits")
    return pc.utf8_rpad(pc.fill_null(digits, "0"), 9, "0").cast(pa.int32()).to_numpy()


def _of_iso(shaped: pa.StringArray) -> pa.Int64Array:
    """Seconds of ISO 8601 texts; null for those that do not exist."""
    if shaped.null_count == len(shaped):
        return pa.nulls(len(shaped), pa.int64())
    whole = pc.replace_substring_regex(shaped, r"\.[0-9]+", "")
    zoned = pc.match_substring_regex(whole, _ZONE)
    parts = ((pc.if_else(zoned, whole, None), "UTC"), (pc.if_else(zoned, None, whole), None))
    return pc.coalesce(*(_parse(part, zone) for part, zone in parts))


def _parse(texts: pa.StringArray, zone: str | None) -> pa.Int64Array:
    """null for dates that do not exist."""
    try:
        return texts.cast(pa.timestamp("s", zone)).cast(pa.int64())
    except pa.ArrowInvalid:
        if len(texts) == 1:
            return pa.nulls(1, pa.int64())
    half = len(texts) // 2
    return pa.concat_arrays([_parse(texts[:half], zone), _parse(texts[half:], zone)])


def _decimals(texts: pa.StringArray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers of up to 19 digits: the whole ones below, billionths beyond these, and which are times."""
    parts = pc.extract_regex(texts, r"^(?P<sign>-?)(?P<whole>[0-9]+)\.?(?P<fraction>[0-9]*)$")
    negative = np.asarray(pc.equal(pc.struct_field(parts, "sign"), "-"))
    # Of up to 19 digits, which only fit without the sign.
    sizes = pc.struct_field(parts, "whole").cast(pa.uint64()).to_numpy()
    there = sizes < LATEST
    fractions = pc.utf8_slice_codeunits(pc.utf8_rpad(pc.struct_field(parts, "fraction"), 9, "0"), 0, 9)
    billionths = fractions.cast(pa.int32()).to_numpy()
    below = negative & (billionths > 0)
    values = np.where(there, sizes, 0).astype(np.int64)
    values = np.where(negative, -values, values) - below
    return values, np.where(below, 10**9 - billionths, billionths), there


def _filled(values: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """0 for null; and which are not."""
    return values.fill_null(0).to_numpy().copy(), np.asarray(values.is_valid())


def _matches(texts: pa.StringArray, pattern: str) -> np.ndarray:
    return np.asarray(pc.fill_null(pc.match_substring_regex(texts, pattern), False))


def _has_hexadecimal(texts: pa.StringArray) -> bool:
    """Whether there may be 0x1F, which Arrow takes for a number. Looks through all characters at once."""
    characters = np.frombuffer(texts.buffers()[2] or b"", np.uint8)
    return bool((characters | 0x20 == ord("x")).any())


def seconds_of_times(times: pa.Array) -> pa.Int64Array:
    """Of timestamps and dates as Arrow has them."""
    kind = times.type
    if pa.types.is_date32(kind):
        return pc.multiply(times.cast(pa.int32()).cast(pa.int64()), 86_400)
    ticks = UNITS["ms" if pa.types.is_date64(kind) else kind.unit]
    # Arrow rounds quotients towards 0, which is wrong before 1970.
    whole = times.cast(pa.int64()).fill_null(0).to_numpy() // ticks
    return pa.array(whole, mask=np.asarray(times.is_null()))


def nanoseconds_of_times(times: pa.Array) -> np.ndarray:
    """int32: what `seconds_of_times` cuts off."""
    if pa.types.is_date(times.type):
        return np.zeros(len(times), np.int32)
    ticks = UNITS[times.type.unit]
    return (times.cast(pa.int64()).fill_null(0).to_numpy() % ticks * (10**9 // ticks)).astype(np.int32)
