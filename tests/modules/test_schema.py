import dataclasses
import json
from dataclasses import replace
from typing import Any

import pytest

from logitmix.common.mappings import from_mapping
from logitmix.modules.schema import Feature, Schema, Table

ITEM = Feature("item", "item", "id", "item")
SCHEMA = Schema(
    (
        ITEM,
        Feature("genres", "item", "ids", "genre"),
        Feature("price", "item", "number", mean=2.5, deviation=0.5),
        Feature("image", "item", "vector", width=4, mean=0.25),
        Feature("favorite", "user", "id", "genre"),
        Feature("rating", "event", "number", mean=3.0, deviation=1.0),
    ),
    (Table("item", 11), Table("genre", 5)),
)


def test_recency_is_there_when_it_is_named() -> None:
    names = {"": [], "price": ["price"], "all": ["all"], "recency": ["recency"], "both": ["all", "recency"]}
    kept = {key: [feature.name for feature in SCHEMA.only(of).features] for key, of in names.items()}
    everything = [feature.name for feature in SCHEMA.features]
    assert kept["all"] == everything and kept["both"] == [*everything, "recency"]
    assert (kept[""], kept["price"], kept["recency"]) == (["item"], ["item", "price"], ["item", "recency"])
    recency = SCHEMA.only(["recency"])
    assert recency.tables == (Table("item", 11), Table("recency", 66))
    assert recency.of("event") == (Feature("recency", "event", "id", "recency"),)
    assert recency.only(["all"]) == recency
    with pytest.raises(ValueError, match=r"names recent, .* \(did you mean recency\?\); it has recency$"):
        Schema.of_ids(3).only(["recent"])


def test_a_dataset_may_have_a_recency_of_its_own() -> None:
    own = Schema((ITEM, Feature("recency", "user", "number")), (Table("item", 3),))
    assert own.only(["recency"]) == own.only(["all"]) == own
    table = Schema((ITEM, Feature("gap", "event", "id", "recency")), (Table("item", 3), Table("recency", 4)))
    assert table.only(["all"]) == table
    with pytest.raises(ValueError, match="names recency, which the dataset does not have; it has gap"):
        table.only(["recency"])


def test_users_are_there_when_they_are_named_and_counted() -> None:
    counted = replace(SCHEMA, users=7)
    assert counted == SCHEMA and counted.only(["all"]) == SCHEMA
    users = counted.only(["user"])
    assert users.features == (ITEM, Feature("user", "user", "id", "user"))
    assert users.tables == (Table("item", 11), Table("user", 8)) and users.table("user").unknown == 0
    assert "users" not in counted.to_mapping()
    with pytest.raises(ValueError, match="names user, which the dataset does not have"):
        SCHEMA.only(["user"])
    own = Schema((ITEM, Feature("user", "event", "number")), (Table("item", 3),), users=7)
    assert own.only(["user"]) == own


def test_json_and_back() -> None:
    text = json.dumps(SCHEMA.to_mapping())
    assert from_mapping(Schema, json.loads(text), "dataset.json") == SCHEMA
    assert SCHEMA.to_mapping()["features"][0] == {"name": "item", "owner": "item", "kind": "id", "table": "item"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "a b"}, "feature 'a b': a name has letters"),
        ({"name": "../x"}, "a name has letters"),
        ({"kind": "id"}, "feature price of kind id names no table"),
        ({"table": "item"}, "feature price of kind number names a table"),
        ({"width": 2}, "feature price of kind number has width 2"),
        ({"kind": "vector", "width": 0}, "feature price of kind vector has width 0"),
        ({"deviation": 0.0}, "has mean 0.0 and deviation 0.0; they must"),
        ({"mean": float("nan")}, "has mean nan"),
        ({"kind": "date", "owner": "user", "unit": "s"}, "only items have dates, in the unit of the actions' times"),
        ({"kind": "date", "unit": "days"}, "only items have dates, in the unit of the actions' times"),
        ({"kind": "ids", "table": "item", "mean": 1.0}, "feature price of kind ids has mean 1.0"),
    ],
)
def test_features_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(Feature("price", "item", "number"), **changes)


@pytest.mark.parametrize(
    ("features", "tables", "message"),
    [
        ((), ("item",), "no feature item of owner item, kind id"),
        ((Feature("item", "user", "id", "item"),), ("item",), "no feature item of owner item"),
        ((ITEM,), (), "feature item names table item, which is not there"),
        ((ITEM, Feature("brand", "item", "id", "brands")), ("item", "brand"), "names table brands, which is not there"),
        ((ITEM, Feature("age", "user", "number"), Feature("age", "item", "number")), ("item",), "two features are"),
        ((ITEM,), ("item", "item"), "two tables are named item"),
        ((ITEM, *(Feature(of, "item", "date", unit=of) for of in ("ms", "s"))), ("item",), "the units ms and s"),
        ((ITEM,), ("item", "brand"), "no feature uses table brand"),
    ],
)
def test_schemas_that_cannot_be(features: tuple[Feature, ...], tables: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schema(features, tuple(Table(name, 3) for name in tables))


def test_a_table_has_a_row_for_what_is_unknown() -> None:
    with pytest.raises(ValueError, match="table brand has 0 rows"):
        Table("brand", 0)
