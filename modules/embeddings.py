"""Embedding tables as torchrec modules, unsharded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import device, nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType

_PREFIX = "table_"


def torchrec_name(table: str) -> str:
    """Torchrec keeps tables in a ModuleDict, whose own names a table must not have: type, values, keys, float, …"""
    return _PREFIX + table


def own_name(torchrec_name: str) -> str:
    return torchrec_name.removeprefix(_PREFIX)


@dataclass(frozen=True)
class EmbeddingTable:
    """A table [rows, dim]. The torchrec feature that looks it up has the same name, and torchrec's table
    `torchrec_name`."""

    name: str
    rows: int
    dim: int
    precision: Literal["fp32", "fp16"] = "fp32"
    pooled: bool = False
    """Whether the owner ranks sum the rows of each bag, rather than send them one by one."""
    weighs: bool = False
    """With `pooled`: whether each id of a bag says what its row counts in the sum."""
    values: int = 0
    """As in schema.Table."""

    def _config(self) -> dict[str, Any]:
        return {
            "name": torchrec_name(self.name),
            "num_embeddings": self.rows,
            "embedding_dim": self.dim,
            "feature_names": [self.name],
            "data_type": DataType.FP16 if self.precision == "fp16" else DataType.FP32,
        }


def embedding_collections(tables: Sequence[EmbeddingTable]) -> nn.ModuleDict:
    """The tables, on the meta device: their rows exist only where a shard of them is placed.

    A torchrec collection has one width, so there is one collection for each width, "dim_64", in the order of the
    tables. Each pooled table is an EmbeddingBagCollection by itself, "bags_NAME".
    """
    by_dim: dict[int, list[EmbeddingConfig]] = {}
    for table in tables:
        if not table.pooled:
            by_dim.setdefault(table.dim, []).append(EmbeddingConfig(**table._config()))
    collections: dict[str, nn.Module] = {
        f"dim_{dim}": EmbeddingCollection(tables=configs, device=device("meta")) for dim, configs in by_dim.items()
    }
    for table in tables:
        if table.pooled:
            config = EmbeddingBagConfig(**table._config(), pooling=PoolingType.SUM)
            collections[f"bags_{table.name}"] = EmbeddingBagCollection([config], table.weighs, device("meta"))
    return nn.ModuleDict(collections)
