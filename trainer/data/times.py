"""Dates and times -> whole seconds since 1970, UTC, and the nanoseconds beyond them."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_ISO = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]+)?)?(Z|[+-][0-9]{2}(:?[0-9]{2})?)?)?$"
_ZONE = r"[T ].*(Z|[+-][0-9:]+)$"
_TICKS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def seconds_of_texts(texts: pa.StringArray) -> pa.Int64Array:
    """ISO 8601: a date, or a date and a time of day, with a zone or else in UTC. null for other texts."""
    shaped = pc.if_else(pc.match_substring_regex(texts, _ISO), texts, None)
    if shaped.null_count == len(texts):
        return pa.nulls(len(texts), pa.int64())
    whole = pc.replace_substring_regex(shaped, r"\.[0-9]+", "")
    zoned = pc.match_substring_regex(whole, _ZONE)
    parts = ((pc.if_else(zoned, whole, None), "UTC"), (pc.if_else(zoned, None, whole), None))
    return pc.coalesce(*(_parse(part, zone) for part, zone in parts))


def nanoseconds_of_texts(texts: pa.StringArray) -> np.ndarray:
    """int32: the fractions of a second in ISO 8601 texts, up to 9 digits; 0 without one."""
    digits = pc.struct_field(pc.extract_regex(texts, r"\.(?P<digits>[0-9]{1,9})"), "digits")
    return pc.utf8_rpad(pc.fill_null(digits, "0"), 9, "0").cast(pa.int32()).to_numpy()


def _parse(texts: pa.StringArray, zone: str | None) -> pa.Int64Array:
    """null for dates that do not exist."""
    try:
        return texts.cast(pa.timestamp("s", zone)).cast(pa.int64())
    except pa.ArrowInvalid:
        if len(texts) == 1:
            return pa.nulls(1, pa.int64())
    half = len(texts) // 2
    return pa.concat_arrays([_parse(texts[:half], zone), _parse(texts[half:], zone)])


def is_time(kind: pa.DataType) -> bool:
    return pa.types.is_timestamp(kind) or pa.types.is_date(kind)


def seconds_of_times(times: pa.Array) -> pa.Int64Array:
    """Of timestamps and dates as Arrow has them."""
    kind = times.type
    if pa.types.is_date32(kind):
        return pc.multiply(times.cast(pa.int32()).cast(pa.int64()), 86_400)
    ticks = _TICKS["ms" if pa.types.is_date64(kind) else kind.unit]
    # Arrow rounds quotients towards 0, which is wrong before 1970.
    whole = times.cast(pa.int64()).fill_null(0).to_numpy() // ticks
    return pa.array(whole, mask=np.asarray(times.is_null()))


def nanoseconds_of_times(times: pa.Array) -> np.ndarray:
    """int32: what `seconds_of_times` cuts off."""
    if pa.types.is_date(times.type):
        return np.zeros(len(times), np.int32)
    ticks = _TICKS[times.type.unit]
    return (times.cast(pa.int64()).fill_null(0).to_numpy() % ticks * (10**9 // ticks)).astype(np.int32)
