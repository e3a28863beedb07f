"""How the ids of a table of items or users fit those of the actions, and which ids could be one."""

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

from logitmix.trainer.prepare.ids import without_zeros

FEW = 0.5
"""Below this share of the items or users that a table knows, an example is shown."""
_SHOWN = 40

_DIFFERENCES: dict[str, Callable[[pa.StringArray], pa.StringArray]] = {
    "blanks": pc.utf8_trim_whitespace,
    "case": pc.utf8_lower,
    "a trailing .0": without_zeros,
    "leading zeros": lambda ids: pc.utf8_ltrim(ids, characters="0"),
}
"""What ids of one thing may differ by, and how it is left out."""


def match(
    what: str, name: str, table: pa.StringArray, read: pa.StringArray, kept: pa.StringArray, given: bool
) -> tuple[dict[str, int], str]:
    """The entry of dataset.json for the table `name` of `what`, whose ids are `table`; and a line if it knows few of
    those in the dataset, `kept`, or "". ValueError if it knows none of those that were read, but was `given`."""
    known = pc.unique(table)
    missing = kept.filter(pc.invert(pc.is_in(kept, value_set=known)))
    acted = pc.sum(pc.is_in(known, value_set=read), min_count=0).as_py()
    counts = {"ids": len(known), "matched": len(kept) - len(missing), "without_actions": len(known) - acted}
    difference = "" if not len(missing) else _difference(missing, known, len(kept))
    if counts["matched"] >= FEW * len(kept) and not difference:
        return counts, ""
    ids = difference or f"ids {_shown(missing[0])} / {_shown(known[0]) if len(known) else 'none'}"
    line = f"{counts['matched']:,} of {len(kept):,} {what} of the actions are in {name} ({ids})"
    if given and not acted:
        raise ValueError(f"{line}; give the actions and --{what} the same ids")
    return counts, line


def _difference(missing: pa.StringArray, known: pa.StringArray, count: int) -> str:
    """What at least a twentieth of the `count` ids and those of the table differ by, with an example; "" if there is
    no such thing."""

    def without_all(ids: pa.StringArray) -> pa.StringArray:
        for leave_out in _DIFFERENCES.values():
            ids = leave_out(ids)
        return ids

    for name, leave_out in {**_DIFFERENCES, "blanks, case, a trailing .0 or leading zeros": without_all}.items():
        places = pc.index_in(leave_out(missing), value_set=leave_out(known))
        if len(places) - places.null_count >= max(1, count / 20):
            row = pc.index(places.is_valid(), True).as_py()
            return f"ids {_shown(missing[row])} / {_shown(known[places[row].as_py()])}, which differ by {name}"
    return ""


def _shown(raw_id: pa.StringScalar) -> str:
    text = raw_id.as_py()[:_SHOWN]
    return text if text and text == text.strip() else repr(text)
