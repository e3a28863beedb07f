"""Numbers as people write them."""

import pyarrow as pa
import pytest

from logitmix.trainer.data.numbers import read_numbers
from logitmix.trainer.data.where import Condition


@pytest.mark.parametrize(
    ("texts", "numbers"),
    [
        (["12.5", "-3", "1e3", ".5", "5."], [12.5, -3, 1000, 0.5, 5]),
        (["12,50", "3,99", "5"], [12.5, 3.99, 5]),
        (["1.299,00", "12,5", "1.299"], [1299, 12.5, 1299]),
        (["0,125", "1,250"], [0.125, 1.25]),
        (["1,299.00", "12.50", "1,299"], [1299, 12.5, 1299]),
        (["1,299,000", "1,250"], [1_299_000, 1250]),
        (["1.250", "2.500"], [1.25, 2.5]),
        (["1 299,50", "1\u00a0299", "1\u202f299\u202f000", "5"], [1299.5, 1299, 1_299_000, 5]),
        (["1'299.50", "1\u2019299", "1_000"], [1299.5, 1299, 1000]),
        (["$1,299.00", "$5", " $ 12.5 "], [1299, 5, 12.5]),
        (["€ 5", "5 €", "7,5€"], [5, 5, 7.5]),
        (["12.50 USD", "3 usd"], [12.5, 3]),
        (["-$5", "$-5.5", "\u22123", "+4"], [-5, -5.5, -3, 4]),
        (["5%", "11.0 %", "-0,5%"], None),
        (["5%", "11.0 %", "-0.5%"], [5, 11, -0.5]),
        (["5 %", "0"], [5, 0]),
        (["1,5e3", "2,5"], [1500, 2.5]),
    ],
)
def test_a_column_of_numbers(texts: list[str], numbers: list[float] | None) -> None:
    found = read_numbers(pa.array(texts), pa.float64())
    if numbers is None:
        assert "differ in their decimal marks" in found.note and len(found.wrong)
    else:
        assert (found.values.to_pylist(), found.wrong.to_pylist(), found.note) == (numbers, [], "")


@pytest.mark.parametrize(
    ("texts", "wrong", "note"),
    [
        (["12,50", "12.50"], ["12,50"], "'12,50' and '12.50' differ in their decimal marks"),
        (["1,299", "1.299"], ["1,299"], "'1.299' and '1,299' differ in their decimal marks"),
        (["€ 5", "$ 6"], ["€ 5", "$ 6"], "values in $, €"),
        (["5%", "0.05"], ["5%"], "values in %, and without"),
        (
            ["1", "1,2,3", "1 2", "12.5.1", "--5", "$", "x1", "1x"],
            ["1,2,3", "1 2", "12.5.1", "--5", "$", "x1", "1x"],
            "",
        ),
        (["a", "b"], ["a", "b"], ""),
    ],
)
def test_what_is_no_number_or_two(texts: list[str], wrong: list[str], note: str) -> None:
    found = read_numbers(pa.array(texts))
    assert (found.wrong.to_pylist(), found.note) == (wrong, note)
    assert found.values.null_count == len(wrong)


def test_one_of_another_kind_is_an_exception() -> None:
    found = read_numbers(pa.array([f"{n},5" for n in range(30)] + ["12.50"]))
    assert found.wrong.to_pylist() == ["12.50"] and found.wrong_are_exceptions
    assert found.note == "'0,5' and '12.50' differ in their decimal marks"
    assert found.values.to_pylist() == [n + 0.5 for n in range(30)] + [None]


def test_a_comma_that_could_be_either_is_said() -> None:
    found = read_numbers(pa.array(["7", "1,299"]))
    assert found.values.to_pylist() == [7, 1299]
    assert found.note == "'1,299' is read as a whole number, the comma between thousands"


def test_conditions_read_numbers_as_columns_do() -> None:
    price = pa.array(["$1,299.00", "$12.50", "NULL"]).dictionary_encode()
    assert Condition.parse("price >= 100", "--where").fulfilled(price, ["price"]).tolist() == [True, False, False]
