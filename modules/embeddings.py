"""Feature schema -> torchrec embedding modules, unsharded."""

from torch import Tensor, device
from torchrec import EmbeddingCollection, KeyedJaggedTensor
from torchrec.modules.embedding_configs import EmbeddingConfig

ITEM = "item"
"""Name of the item table and of the feature that looks it up."""


def item_table(num_items: int, dim: int) -> EmbeddingCollection:
    """The item table [X, D] on the meta device: its rows exist only where a shard of it is placed."""
    table = EmbeddingConfig(name=ITEM, num_embeddings=num_items, embedding_dim=dim, feature_names=[ITEM])
    return EmbeddingCollection(tables=[table], device=device("meta"))


def item_lookup(ids_V: Tensor) -> KeyedJaggedTensor:
    """Ids [V] as the one ragged row that looks them up."""
    return KeyedJaggedTensor(keys=[ITEM], values=ids_V, lengths=ids_V.new_tensor([len(ids_V)]))
