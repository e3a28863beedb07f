"""Raw feature values become what the towers take; what is missing or unknown has its place."""

from typing import Any

import numpy as np
import pytest
import torch
from small_models import in_order

from logitmix.modules.schema import Feature, Owner, Schema, Table
from logitmix.serving.features import FeatureReader

SCHEMA = Schema(
    (
        Feature("item", "item", "id", "item"),
        Feature("brand", "item", "id", "brand"),
        Feature("tags", "item", "ids", "tags"),
        Feature("price", "item", "number", mean=3.0, deviation=2.0),
        Feature("image", "item", "vector", width=2, mean=0.5),
        Feature("favorite", "user", "id", "brand"),
    ),
    (Table("item", 10), Table("brand", 3), Table("tags", 4)),
)
READER = FeatureReader(SCHEMA, {"brand": in_order(["", "acme", "17"]), "tags": in_order(["", "c", "a", "b"])})


def test_values_are_rows_of_the_tables_and_numbers_as_they_are() -> None:
    items: list[dict[str, Any]] = [
        {"brand": "acme", "tags": ["c", "new", None, "a", ""], "price": 7, "image": [1, 2.5]},
        {"brand": 17, "tags": [], "price": -0.5, "image": (0.0, 0.0)},
        {"brand": "other"},
        {"brand": np.int64(17), "tags": np.array(["a"]), "price": np.float32(2), "image": torch.tensor([1.0, 2.0])},
    ]
    values = READER.read("item", items, [f"item {place}" for place in range(4)])
    assert set(values) == {"brand", "tags", "price", "image"}
    assert values["brand"].values.tolist() == [1, 2, 0, 2] and values["brand"].offsets is None
    assert values["tags"].values.tolist() == [1, 0, 2, 2]
    assert values["tags"].offsets is not None and values["tags"].offsets.tolist() == [0, 3, 3, 3, 4]
    assert values["price"].values.tolist() == [7.0, -0.5, 3.0, 2.0]
    assert values["image"].values.tolist() == [[1.0, 2.5], [0.0, 0.0], [0.5, 0.5], [1.0, 2.0]]
    users = READER.read("user", [{"favorite": None}, {}], ["request 0", "request 1"])
    assert users["favorite"].values.tolist() == [0, 0]
    assert READER.read("event", [{}] * 3, ["event"] * 3) == {}


def test_no_rows_have_the_right_shapes() -> None:
    values = READER.read("item", [], [])
    assert {name: tuple(of.values.shape) for name, of in values.items()} == {
        "brand": (0,), "tags": (0,), "price": (0,), "image": (0, 2),
    }  # fmt: skip
    assert values["tags"].offsets is not None and torch.equal(values["tags"].offsets, torch.tensor([0]))
    assert values["brand"].values.dtype == torch.int64 and values["price"].values.dtype == torch.float32


@pytest.mark.parametrize(
    ("owner", "record", "said"),
    [
        ("item", {"bran": 1}, "item 1: the model has no item feature 'bran' (did you mean brand?); there are: brand, "),
        ("item", {"brand": 1.5}, "item 1: feature brand is 1.5; it must be text or a whole number"),
        ("item", {"price": np.bool_(True)}, "item 1: feature price is"),
        ("item", {"tags": "a"}, "item 1: feature tags is 'a'; it must be a list"),
        ("item", {"price": "7"}, "item 1: feature price is '7'; it must be a finite number"),
        ("item", {"image": [1]}, "item 1: feature image has 1 numbers; it must have 2"),
    ],
)
def test_a_wrong_value_is_named(owner: Owner, record: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as error:
        READER.read(owner, [{}, record], ["item 0", "item 1"])
    assert str(error.value).startswith(said)
