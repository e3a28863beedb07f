"""Columns of ids as text: integers and whole numbers by their digits, as far as these are exact."""

import pyarrow as pa
import pyarrow.compute as pc

from logitmix.common.mappings import counted
from logitmix.trainer.data.numbers import MISSING
from logitmix.trainer.prepare.rejects import Rejects

FEW_LABELS = 5
"""So many ids must be there with two labels."""
_NONE = pa.array(sorted({text.lower() for text in MISSING} | {"undefined"}))
WHOLE = r"^(-?[0-9]+)(\.0*)?$"


def without_zeros(texts: pa.StringArray) -> pa.StringArray:
    """12.0 as 12; all else as it is."""
    return pc.replace_substring_regex(texts, WHOLE, r"\1")


def as_whole(name: str, ids: pa.StringArray, rejects: Rejects) -> pa.StringArray:
    """Distinct ids of a column, 12.0 as 12 if all are whole numbers: programs write those of a column with a missing
    value so. Otherwise it is said where both are there."""
    zeros = ids.filter(pc.match_substring_regex(ids, r"^-?[0-9]+\.0*$"))
    if not len(zeros):
        return ids
    if pc.all(pc.match_substring_regex(ids, WHOLE)).as_py():
        rejects.say(f"column {name}: whole numbers such as {zeros[0]} are read as {without_zeros(zeros)[0]}")
        return without_zeros(ids)
    both = zeros.filter(pc.is_in(without_zeros(zeros), value_set=ids))
    if len(both):
        rejects.say(f"column {name}: {both[0]} and {without_zeros(both)[0]} are two ids")
    return ids


def labeled(name: str, ids: pa.Array) -> list[str]:
    """A line if many ids are there with two endings, such as N7-1 and N7-0, by which lists of impressions say which
    items were clicked."""
    parts = pc.extract_regex(ids, r"^(?P<id>.+)(?P<label>[-:][01])$").drop_null()
    found = pc.struct_field(parts, "id").value_counts()
    both = found.field(0).filter(pc.greater(found.field(1), 1))
    if len(both) < FEW_LABELS or 4 * len(both) < len(ids):
        return []
    mark = pc.struct_field(parts, "label")[0].as_py()[0]
    such = f"{counted(len(both), 'id')} end in {mark}1 and in {mark}0, such as {both[0]}{mark}1 and {both[0]}{mark}0"
    return [
        f"column {name}: {such}: if these are labels of clicks, one item counts as two, and what was only shown as an "
        'action; write the label into a column of its own, and give --shown "label = 0"'
    ]


def doubtful(name: str, found: pa.Table) -> list[str]:
    """Lines about ids (`whole`) that stand for none, with how many actions (`n`) they have."""
    ids = found["whole"].combine_chunks()
    of_none = found.filter(pc.is_in(pc.utf8_lower(pc.utf8_trim_whitespace(ids)), value_set=_NONE))
    counts = of_none.group_by("whole", use_threads=False).aggregate([("n", "sum")])
    return [
        f"column {name}: {text} is the id of {counted(count, 'action')}, as if they had none; "
        f'--where "{name} != {text}" leaves them out'
        for text, count in zip(counts["whole"].to_pylist(), counts["n_sum"].to_pylist(), strict=True)
    ]
