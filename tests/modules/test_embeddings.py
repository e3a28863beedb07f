import torch
from torch import Tensor, nn

from logitmix.modules.config import ModelConfig
from logitmix.modules.embeddings import EmbeddingTable, embedding_collections, own_name
from logitmix.modules.model import RetrievalModel
from logitmix.modules.schema import Schema

TABLES = [EmbeddingTable("item", 10**12, 64), EmbeddingTable("zip", 5, 16), EmbeddingTable("brand", 7, 64, "fp16")]


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {own_name(name.split(".")[-2]): w for name, w in module.named_parameters()}


def test_tables_of_one_width_are_one_collection_without_rows() -> None:
    """Which they have once they are sharded."""
    model = RetrievalModel(TABLES, Schema.of_ids(1), ModelConfig())
    assert {name: list(weights(each)) for name, each in model.tables.items()} == {
        "dim_64": ["item", "brand"],
        "dim_16": ["zip"],
    }
    found = {name: (tuple(of.shape), of.dtype, of.device.type) for name, of in weights(model.tables).items()}
    assert found["item"] == ((10**12, 64), torch.float32, "meta") and found["brand"][1] == torch.float16


def test_a_table_may_have_any_name_that_a_feature_may_have() -> None:
    """A catalog has columns such as type, values and items, and torch's modules have attributes of these names."""
    names = [name for name in dir(nn.ModuleDict()) if name.isidentifier()]
    assert {"type", "values", "items", "float"} <= set(names)
    for pooled in (False, True):
        collections = embedding_collections([EmbeddingTable(name, 3, 4, pooled=pooled) for name in names])
        assert [name for each in collections.values() for name in weights(each)] == names
