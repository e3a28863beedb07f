"""Texts -> numbers, as programs and people write them: 12.5, 12,50, $1,299.00, 1 299,00 €, 5 %.

Whether the comma or the point is the decimal mark is decided for a column as a whole.
"""

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from logitmix.trainer.data.arrow import FLOAT, as_numbers

MISSING = (
    "NaN", "nan", "NAN", "-NaN", "-nan", "NULL", "null", "Null", "(null)", "[NULL]", "None", "NA", "<NA>", "N/A", "n/a",
    "#N/A", "#NA", "NaT", r"\N", "-", "--", "—",
)  # fmt: skip
"""Texts that stand for no value, beside blank ones."""
FEWEST, FEW = 10, 0.05
"""Texts that are no numbers are exceptions in a column of so many numbers, if they are one, or this share of them."""

_NO_VALUE = r"(?i)^\s*([+-]?inf(inity)?|nan|null|none|nil|n\.?/?a\.?|-+|\?+|\.)\s*$"
"""What stands for none among numbers, where it can mean nothing else."""
_SAMPLE = 1000
_MIXED = "values in"
_CURRENCY = (
    r"[A-Za-z]{0,2}\p{Sc}|(?i:USD|EUR|GBP|JPY|CNY|RMB|INR|CHF|AUD|CAD|NZD|SEK|NOK|DKK|ISK|PLN|CZK|HUF|RON|BGN|RUB|UAH"
    r"|TRY|BRL|MXN|ARS|CLP|COP|ZAR|KRW|SGD|HKD|TWD|THB|IDR|MYR|PHP|VND|ILS|AED|SAR|EGP|NGN|PKR)|kr\.?|zł|Kč|Ft|Rs\.?"
)
_MINUS = "\u2212"
_SPACES = " '_\u2019\u00a0\u2009\u202f"
"""What stands between thousands and is no decimal mark."""
_WRITTEN = (
    rf"^\s*(?P<sign>[+{_MINUS}-]?)\s*(?P<before>{_CURRENCY})?\s*(?P<inner>[+{_MINUS}-]?)"
    rf"(?P<digits>[.,]?[0-9](?:[0-9.,{_SPACES}]*[0-9.,])?)(?P<power>[eE][+-]?[0-9]+)?\s*(?P<after>{_CURRENCY}|%)?\s*$"
)
_SPACED = rf"^[0-9]{{1,3}}([{_SPACES}][0-9]{{3}})+([.,][0-9]*)?$"
_WITH_POINT = r"^([0-9]+|[1-9][0-9]{0,2}(,[0-9]{2,3})*,[0-9]{3})?(\.[0-9]*)?$"
"""Digits where the point is the decimal mark, perhaps with commas between thousands."""


@dataclass(frozen=True)
class Numbers:
    values: pa.Array
    """A number for each text; null where it is none."""
    wrong: pa.StringArray
    """The texts that are no numbers and do not stand for a missing one, either."""
    note: str = ""
    """How a text was read that could be read otherwise, or why some are no numbers."""

    @property
    def wrong_are_exceptions(self) -> bool:
        return are_exceptions(len(self.wrong), len(self.values) - self.values.null_count)


def are_exceptions(wrong: int, right: int) -> bool:
    """Whether so many texts that are no numbers, or no dates, are exceptions among those that are."""
    return not wrong or (right >= FEWEST and wrong <= max(1, FEW * right))


def read_numbers(texts: pa.StringArray, kind: pa.DataType = FLOAT) -> Numbers:
    """The different texts of a column as numbers of type `kind`."""
    plain = as_numbers(texts, kind)
    rest = texts.filter(pc.and_(plain.is_null(), texts.is_valid()))
    rest = rest.filter(pc.invert(pc.match_substring_regex(rest, _NO_VALUE)))
    # Long texts, such as descriptions, need not all be looked at.
    sample = rest[:: max(1, len(rest) // _SAMPLE)]
    if not pc.any(pc.match_substring_regex(sample, _WRITTEN)).as_py():
        return Numbers(plain, rest)
    parts = pc.extract_regex(texts, _WRITTEN)
    part = {of: pc.struct_field(parts, of) for of in ("sign", "before", "inner", "digits", "power", "after")}
    unit, digits = _joined(part["before"], part["after"]), _unspaced(part["digits"])
    mark, note = _decimal_mark(texts, digits)
    note = _mixed_units(unit, digits) or note
    if not mark or note.startswith(_MIXED):
        return Numbers(plain, rest, note)
    digits = digits if mark == "." else _swapped(digits)
    whole = pc.if_else(_fit(digits), pc.replace_substring(digits, ",", ""), None)
    sign = pc.replace_substring(_joined(part["sign"], part["inner"]), _MINUS, "-")
    values = as_numbers(pc.replace_substring_regex(_joined(sign, whole, part["power"]), r"^\+", ""), kind)
    wrong = pc.and_(values.is_null(), pc.or_(plain.is_valid(), pc.is_in(texts, value_set=rest)))
    return Numbers(values, texts.filter(wrong), note)


def _joined(*parts: pa.Array) -> pa.StringArray:
    return pc.binary_join_element_wise(*parts, "")


def _unspaced(digits: pa.StringArray) -> pa.StringArray:
    """Without the spaces between thousands; null where they are elsewhere."""
    bare = pc.replace_substring_regex(digits, f"[{_SPACES}]", "")
    fine = pc.or_(pc.equal(bare, digits), pc.match_substring_regex(digits, _SPACED))
    return pc.if_else(fine, bare, None)


def _swapped(digits: pa.StringArray) -> pa.StringArray:
    """Commas for points, and points for commas."""
    return pc.replace_substring(pc.replace_substring(pc.replace_substring(digits, ".", " "), ",", "."), " ", ",")


def _fit(digits: pa.StringArray) -> pa.BooleanArray:
    return pc.fill_null(pc.match_substring_regex(digits, _WITH_POINT), False)


def _decimal_mark(texts: pa.StringArray, digits: pa.StringArray) -> tuple[str, str]:
    """The mark that some texts can only have, and a note; "" if they contradict each other."""
    of_point, of_comma = _fit(digits), _fit(_swapped(digits))
    either = pc.and_(of_point, of_comma)
    examples = {".": texts.filter(pc.and_not(of_point, of_comma)), ",": texts.filter(pc.and_not(of_comma, of_point))}
    if not any(map(len, examples.values())):
        # 1,299 and 1.299: the former is common for thousands, the latter is how programs write numbers.
        examples = {
            mark: texts.filter(pc.and_(either, pc.fill_null(pc.match_substring(digits, found), False)))
            for mark, found in ((".", ","), (",", "."))
        }
        if len(examples["."]) and not len(examples[","]):
            one = examples["."][0].as_py()
            return ".", f"{one!r} is read as a whole number, the comma between thousands"
        if not len(examples["."]):
            return ".", ""
    (_, few), (mark, many) = sorted(examples.items(), key=lambda found: len(found[1]))
    if not len(few):
        return mark, ""
    note = f"{many[0].as_py()!r} and {few[0].as_py()!r} differ in their decimal marks"
    return (mark if len(few) <= FEW * len(many) else ""), note


def _mixed_units(unit: pa.StringArray, digits: pa.StringArray) -> str:
    """A note if the numbers are not all of one unit."""
    unit = pc.utf8_rtrim(pc.utf8_upper(unit), characters=".")
    units = sorted(filter(None, pc.unique(unit.filter(digits.is_valid())).to_pylist()))
    if len(units) > 1:
        return f"{_MIXED} {', '.join(units[:4])}"
    bare = pc.and_(pc.equal(unit, ""), pc.fill_null(pc.match_substring_regex(digits, "[1-9]"), False))
    return f"{_MIXED} %, and without" if units == ["%"] and pc.any(bare).as_py() else ""
