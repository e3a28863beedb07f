"""How the ids of a table of items or users fit those of the actions, and which ids could be one."""

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from logitmix.common.mappings import counted
from logitmix.trainer.prepare.ids import without_zeros

FEW = 0.5
"""Below this share of the items or users that a table knows, an example is shown."""
_SHOWN = 40
_BLANKS = r"^[\s\p{Z}\p{Cf}]+|[\s\p{Z}\p{Cf}]+$"

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


def alike(what: str, ids: pa.StringArray, known: pa.StringArray | None = None) -> list[str]:
    """A line if some of the distinct ids differ from another, or from one of those `known` beside them, only by blanks,
    case, leading zeros or how Unicode composes a letter."""
    both = ids if known is None else pa.concat_arrays([known.cast(ids.type), ids])
    plain = pc.utf8_lower(pc.utf8_normalize(pc.replace_substring_regex(both, _BLANKS, ""), "NFKC"))
    plain = pc.replace_substring_regex(plain, "^0+([0-9]+)$", r"\1")
    codes = plain.dictionary_encode().indices.to_numpy()
    first = np.unique(codes, return_index=True)[1][codes]
    repeated = np.flatnonzero(first != np.arange(len(codes)))
    repeated = repeated[repeated >= len(both) - len(ids)]
    if not len(repeated):
        return []
    one, other = (both[int(row)].as_py()[:_SHOWN] for row in (repeated[0], first[repeated[0]]))
    # Where they look the same, by the codes of their letters.
    shown = repr if one.strip().lower() == other.strip().lower() else ascii
    differ = "differs" if len(repeated) == 1 else "differ"
    return [
        f"{counted(len(repeated), what)} {differ} from another only by blanks, case, zeros or Unicode's forms, such as "
        f"{shown(one)} and {shown(other)}: they count as different"
    ]


def _shown(raw_id: pa.StringScalar) -> str:
    text = raw_id.as_py()[:_SHOWN]
    return text if text and text == text.strip() else repr(text)
