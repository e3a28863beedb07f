"""Embedding tables as torchrec modules, unsharded, and how they are looked up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, cat, device, nn
from torchrec import EmbeddingCollection, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType, EmbeddingConfig


@dataclass(frozen=True)
class EmbeddingTable:
    """A table [rows, dim]; the feature that looks it up has its name."""

    name: str
    rows: int
    dim: int
    precision: Literal["fp32", "fp16"] = "fp32"


def embedding_collections(tables: Sequence[EmbeddingTable]) -> nn.ModuleDict:
    """The tables, on the meta device: their rows exist only where a shard of them is placed.

    torchrec wants one width in a collection, so there is one for each, «dim_64», in the order of the tables.
    """
    by_dim: dict[int, list[EmbeddingConfig]] = {}
    for table in tables:
        config = EmbeddingConfig(
            name=table.name,
            num_embeddings=table.rows,
            embedding_dim=table.dim,
            feature_names=[table.name],
            data_type=DataType.FP16 if table.precision == "fp16" else DataType.FP32,
        )
        by_dim.setdefault(table.dim, []).append(config)
    return nn.ModuleDict(
        {f"dim_{dim}": EmbeddingCollection(tables=configs, device=device("meta")) for dim, configs in by_dim.items()}
    )


def lookup(ids: Mapping[str, Tensor]) -> KeyedJaggedTensor:
    """The ids of each table, as the one ragged row that looks them up."""
    pieces = list(ids.values())
    lengths = pieces[0].new_tensor([len(piece) for piece in pieces])
    return KeyedJaggedTensor(keys=list(ids), values=pieces[0] if len(pieces) == 1 else cat(pieces), lengths=lengths)
