"""The items' vectors of an export as faiss indexes, for servers that use faiss.

Axes: N items of a chunk.
"""

from pathlib import Path

import torch

from logitmix.modules.config import ModelConfig
from logitmix.serving.directory import writer
from logitmix.serving.directory.format import Contents, Entries
from logitmix.serving.items import Items, Stage, shard_of
from logitmix.serving.model import trained_tower

CHUNK_ITEMS = 2**16
"""Items added to an index at once."""


def check_indexes(model: ModelConfig) -> None:
    """ValueError where faiss is not installed, or no score of the model is a dot product of vectors."""
    try:
        import faiss  # noqa: F401
    except ModuleNotFoundError:
        raise ValueError("faiss indexes need a package that is not installed: pip install faiss-cpu") from None
    if not _stages(model):
        raise ValueError(
            f"faiss indexes need vectors, and a similarity of kind {model.similarity.kind} without an h-indexer "
            "has none; train with --model.hindexer.weight above 0, or leave --faiss out"
        )


def write_indexes(staging: Path, contents: Contents) -> Entries:
    """Writes similarity.faiss (for dot products) and hindexer.faiss: flat indexes of inner products whose ids are the
    items' indices. OSError if the disk is full."""
    import faiss

    about = contents.about
    tower = trained_tower(about.model, about.schema, contents.weights)
    shards = [shard_of(shard, about.item_cache, tower, contents.tables) for shard in contents.shards]
    items = Items(shards, torch.device("cpu"))
    entries = Entries()
    for stage in _stages(about.model):
        index = None
        for _, (vector_ND,) in items.all(stage, CHUNK_ITEMS):
            index = index or faiss.IndexFlatIP(vector_ND.shape[1])
            index.add(vector_ND.float().numpy())
        assert index is not None and index.ntotal == about.num_items
        file = staging / f"{stage}.faiss"
        try:
            faiss.write_index(index, str(file))
        except RuntimeError as error:
            raise OSError(f"{file} cannot be written: {error}") from None
        entries |= writer.extra_entry(staging, file.name)
    return entries


def _stages(model: ModelConfig) -> list[Stage]:
    """Those whose score is a dot product of one vector each."""
    stages: dict[Stage, bool] = {"similarity": model.similarity.kind == "dot", "hindexer": model.hindexer.weight > 0}
    return [stage for stage, is_dot in stages.items() if is_dot]
