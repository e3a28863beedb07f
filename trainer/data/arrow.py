"""Questions about Arrow's types, and conversions that Arrow lacks."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

FLOAT = pa.float32()
_NUMBER = r"^-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"


def is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def is_time(kind: pa.DataType) -> bool:
    return pa.types.is_timestamp(kind) or pa.types.is_date(kind)


def is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def lengths(lists: pa.Array) -> np.ndarray:
    """int64; 0 for a missing list."""
    return pc.fill_null(pc.list_value_length(lists), 0).to_numpy().astype(np.int64)


def lists_of(lengths: np.ndarray, values: pa.Array, mask: pa.Array | None = None) -> pa.ListArray:
    """Lists of these lengths; none where `mask` is true."""
    return pa.ListArray.from_arrays(pa.array(np.append(0, np.cumsum(lengths)), pa.int32()), values, mask=mask)


def as_numpy(array: pa.Array) -> np.ndarray:
    return array.to_numpy(zero_copy_only=False)


def as_numbers(texts: pa.StringArray, kind: pa.DataType = FLOAT) -> pa.Array:
    """Values of type `kind`, null for text that is not a number."""
    return pc.if_else(pc.match_substring_regex(texts, _NUMBER), texts, None).cast(kind)


def codes_of(values: pa.Array) -> np.ndarray:
    """An integer for each value, equal for equal ones and for missing ones."""
    kind = values.type
    if pa.types.is_null(kind):
        return np.zeros(len(values), np.int32)
    if pa.types.is_nested(kind):
        # Arrow cannot compare these.
        values = pa.array([repr(value) for value in values.to_pylist()], pa.string())
    encoded = values if pa.types.is_dictionary(kind) else values.dictionary_encode()
    return encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)


def order_of_texts(texts: pa.StringArray) -> np.ndarray:
    """Places in order: by number where all are digits (up to 18), else by their UTF-8 bytes."""
    if not pc.all(pc.match_substring_regex(texts, "^[0-9]{1,18}$")).as_py():
        return pc.sort_indices(texts).to_numpy()
    numbers = texts.cast(pa.int64())
    order = np.argsort(numbers.to_numpy())
    if (np.diff(numbers.to_numpy()[order]) > 0).all():
        return order
    # Such as 7 and 07.
    keys = {"number": numbers, "text": texts}
    return pc.sort_indices(pa.table(keys), sort_keys=[(key, "ascending") for key in keys]).to_numpy()


def is_encodable(text: str) -> bool:
    """False for texts with placeholders of undecodable bytes, or with lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
