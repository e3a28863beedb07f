"""The towers with features: what queries and items are made of, one after the other."""

from dataclasses import replace

import pytest
import torch
from small_data import random_tower
from torch import Tensor

from logitmix.modules.batch import Packing
from logitmix.modules.config import DotConfig, HIndexerConfig, ModelConfig, MoLConfig, PooledConfig, SASRecConfig
from logitmix.modules.features import Features
from logitmix.modules.schema import Feature, Schema, Table
from logitmix.modules.towers import Tower
from logitmix.modules.values import Values

D, ITEMS = 8, 6
SCHEMA = Schema(
    (
        Feature("item", "item", "id", "item"),
        Feature("genres", "item", "ids", "genre"),
        Feature("price", "item", "number", mean=1.0, deviation=2.0),
        Feature("favorite", "user", "id", "genre"),
        Feature("age", "user", "number"),
        Feature("action", "event", "id", "action"),
    ),
    (Table("item", ITEMS + 1), Table("genre", 5, dim=4), Table("action", 3)),
)
IDS = Schema.of_ids(ITEMS)
MOL = MoLConfig(query_components=2, item_components=3, component_dim=4, gate_hidden=5, projection_hidden=6)
CONFIG = ModelConfig(
    dim=D, encoder=SASRecConfig(blocks=1, max_length=5), similarity=MOL, hindexer=HIndexerConfig(dim=4, weight=1.0)
)
LENGTHS = [2, 3]


def tower_of(config: ModelConfig = CONFIG, schema: Schema = SCHEMA) -> Tower:
    return random_tower(config, schema, torch.Generator().manual_seed(0))


def rows() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    dims = SCHEMA.dims(D)
    return {table.name: torch.randn(table.rows, dims[table.name], generator=generator) for table in SCHEMA.tables}


def features() -> Features:
    """Of four items (the last an unknown one), two users and five events; ids are rows of the whole tables."""
    return Features(
        torch.tensor([0, 2, 5, ITEMS]),
        {
            "genres": Values(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 2, 3, 3])),
            "price": Values(torch.tensor([1.0, 3.0, 0.0, 1.0])),
            "favorite": Values(torch.tensor([4, 0])),
            "age": Values(torch.tensor([0.5, -1.0])),
            "action": Values(torch.tensor([1, 2, 0, 1, 1])),
        },
    )


def item_groups(tower: Tower) -> tuple[Tensor, Tensor]:
    """Genres and price [4, D] of the four items, written out."""
    genre_map, price_map = tower.item_tower.features.maps
    genre = rows()["genre"] @ genre_map.weight.t()
    none = torch.zeros(D)
    genres = torch.stack([(genre[1] + genre[2]) / 2, none, genre[3], none])
    price = torch.tensor([[0.0], [1.0], [-0.5], [0.0]]) @ price_map.weight.t() + price_map.bias
    return genres, price


def test_an_item_is_the_sum_of_its_row_and_its_features() -> None:
    tower = tower_of()
    item = tower.item_tower(rows(), features())
    genres, price = item_groups(tower)
    expected = rows()["item"][[0, 2, 5, ITEMS]] + genres + price
    torch.testing.assert_close(item.vector_RD, expected)
    for group, should in zip(item.groups, (genres, price), strict=True):
        torch.testing.assert_close(group, should)


@pytest.mark.parametrize("encoder", [SASRecConfig(blocks=1, max_length=5), PooledConfig(hidden=5, max_length=5)])
def test_a_query_is_the_encoded_events_and_its_users_features(encoder: SASRecConfig | PooledConfig) -> None:
    tower, tables = tower_of(replace(CONFIG, encoder=encoder)), rows()
    packing, item_TD = Packing(torch.tensor(LENGTHS)), torch.randn(5, D)
    query = tower.query_tower(item_TD, packing, tables, features())
    (favorite_map, age_map), sequence_T = tower.query_tower.users.maps, [0, 0, 1, 1, 1]
    favorite = (tables["genre"] @ favorite_map.weight.t())[[4, 0]][sequence_T]
    age = (torch.tensor([[0.5], [-1.0]]) @ age_map.weight.t() + age_map.bias)[sequence_T]
    action = tables["action"][[1, 2, 0, 1, 1]]
    encoded = tower.query_tower.encoder(item_TD + action, packing, None)
    torch.testing.assert_close(query.vector_RD, encoded + favorite + age)
    for group, should in zip(query.groups, (favorite, age, action), strict=True):
        torch.testing.assert_close(group, should)


KNOWN_USERS = replace(SCHEMA, users=3).only(["all", "user"])
OWN_COMPONENT = replace(CONFIG, similarity=replace(MOL, query_components=3, user_component=True))


def of_known_users() -> tuple[dict[str, Tensor], Features]:
    """The tables and features, with the users' ids."""
    tables = rows() | {"user": torch.randn(4, D, generator=torch.Generator().manual_seed(2))}
    return tables, replace(features(), values=features().values | {"user": Values(torch.tensor([3, 1]))})


def test_the_users_id_is_a_component_of_its_own() -> None:
    tower, (tables, known) = tower_of(OWN_COMPONENT, KNOWN_USERS), of_known_users()
    mol, packing, item_TD = tower.similarity, Packing(torch.tensor(LENGTHS)), torch.randn(5, D)
    query = tower.query_tower(item_TD, packing, tables, known)
    user_TD = tables["user"][[3, 3, 1, 1, 1]]
    torch.testing.assert_close(query.groups[-1], user_TD)
    components_TUC, weights_TM = mol.query_side(query, packing.row_T)
    expected = torch.nn.functional.normalize(user_TD @ mol.user_map.weight.t(), dim=1) / MOL.temperature
    torch.testing.assert_close(components_TUC[:, -1], expected)
    # The other components and the query's gate do not know the user; the h-indexer does.
    others = replace(known, values=known.values | {"user": Values(torch.tensor([0, 2]))})
    other = tower.query_tower(item_TD, packing, tables, others)
    assert torch.equal(other.vector_RD, query.vector_RD)
    other_TUC, other_TM = mol.query_side(other, packing.row_T)
    assert torch.equal(other_TUC[:, :-1], components_TUC[:, :-1]) and torch.equal(other_TM, weights_TM)
    assert not torch.isclose(other_TUC[:, -1], components_TUC[:, -1]).all(1).any()
    of_stage1 = tower.hindexer.query_side(query, packing.row_T)
    tower.hindexer.user_apart = False
    torch.testing.assert_close(of_stage1, tower.hindexer.query(query.vector_RD + user_TD, packing.row_T))


def test_a_component_of_a_user_whom_the_model_does_not_know_is_refused() -> None:
    own = Schema((*IDS.features, Feature("user", "user", "number")), IDS.tables)
    for schema in (IDS, own):
        with pytest.raises(ValueError, match=r"^model\.similarity\.user_component takes the user's id: add user"):
            Tower(OWN_COMPONENT, schema)


@pytest.mark.parametrize("similarity", [MOL, OWN_COMPONENT.similarity, DotConfig()])
def test_every_parameter_and_every_row_that_is_named_gets_a_gradient(similarity: MoLConfig | DotConfig) -> None:
    (rows_of, given), schema = (rows(), features()), SCHEMA
    if similarity == OWN_COMPONENT.similarity:
        (rows_of, given), schema = of_known_users(), KNOWN_USERS
    tower = tower_of(replace(CONFIG, similarity=similarity), schema)
    tables = {name: table.requires_grad_() for name, table in rows_of.items()}
    item = tower.item_tower(tables, given)
    packing, history_T = Packing(torch.tensor(LENGTHS)), torch.tensor([0, 1, 2, 3, 0])
    queries = tower.query_sides(tower.queries(item.vector_RD[history_T], packing, tables, given))
    items = tower.item_sides(item)
    score = tower.similarity.all_pairs(queries.similarity, items.similarity).pow(2).sum()
    score = score + tower.hindexer.all_pairs(queries.hindexer, items.hindexer).pow(2).sum()
    score.backward()
    for name, parameter in tower.named_parameters():
        # Of the last positions alone, attention's queries and the positions' embeddings are used.
        assert parameter.grad is not None and (parameter.grad.any() or "key_value.bias" in name), name
    touched = {name: table.grad.any(1).nonzero().flatten().tolist() for name, table in tables.items()}
    users = {"user": [1, 3]} if schema == KNOWN_USERS else {}
    assert touched == {"item": [0, 2, 5, 6], "genre": [0, 1, 2, 3, 4], "action": [0, 1, 2]} | users
