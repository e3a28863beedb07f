"""The items' vectors of an export for other engines of nearest neighbors: flat indexes of faiss, and a Parquet file
for engines that load their own.

Axes: N items of a chunk, X items, H width of a vector.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from logitmix.modules.config import ModelConfig
from logitmix.serving.directory import writer
from logitmix.serving.directory.format import Contents, Entries
from logitmix.serving.items import Items, Stage, shard_of
from logitmix.serving.model import trained_tower

CHUNK_ITEMS = 2**16
"""Items added to an index at once."""

Index = Literal["faiss", "vectors"]


def _write_faiss(file: Path, contents: Contents, stage: Stage) -> None:
    """Writes a flat index of inner products, whose ids are the items' indices. OSError if the disk is full."""
    import faiss

    index: Any = faiss.IndexFlatIP(_width(contents, stage))
    for vector_NH in _vectors(contents, stage):
        index.add(vector_NH.numpy())
    try:
        faiss.write_index(index, str(file))
    except RuntimeError as error:
        raise OSError(f"{file} cannot be written: {error}") from None


def _write_parquet(file: Path, contents: Contents, stage: Stage) -> None:
    H = _width(contents, stage)
    schema = pa.schema({"item": pa.int64(), "id": pa.string(), "vector": pa.list_(pa.float32(), H)})
    rows = enumerate(contents.raw_ids)
    with pq.ParquetWriter(file, schema, compression="none") as parquet:
        for vector_NH in _vectors(contents, stage):
            index, ids = zip(*islice(rows, len(vector_NH)), strict=True)
            vector = pa.FixedSizeListArray.from_arrays(pa.array(vector_NH.flatten().numpy()), H)
            parquet.write_batch(pa.record_batch([pa.array(index), pa.array(ids), vector], schema=schema))


INDEXES: Mapping[Index, tuple[str, Callable[[Path, Contents, Stage], None]]] = {
    "faiss": (".faiss", _write_faiss),
    "vectors": (".parquet", _write_parquet),
}
"""Of each, how its files' names end, after the stage."""


def check_index(kind: Index, model: ModelConfig) -> None:
    """ValueError where faiss is needed and not installed, or no score of the model is a dot product of vectors."""
    flag = f"--{kind}"
    if kind != "vectors":
        try:
            import faiss  # noqa: F401
        except ModuleNotFoundError:
            raise ValueError(f"{flag} needs a package that is not installed: pip install faiss-cpu") from None
    if not _stages(model):
        raise ValueError(
            f"{flag} needs vectors, and a similarity of kind {model.similarity.kind} without an h-indexer has none; "
            f"train with --model.hindexer.weight above 0, or leave {flag} out"
        )


def write_index(kind: Index, staging: Path, contents: Contents) -> Entries:
    """Writes the vectors of all items: hindexer and, for dot products, similarity, each with the kind's ending."""
    entries, (end, write) = Entries(), INDEXES[kind]
    for stage in _stages(contents.about.model):
        write(staging / f"{stage}{end}", contents, stage)
        entries |= writer.extra_entry(staging, f"{stage}{end}")
    return entries


def _vectors(contents: Contents, stage: Stage) -> Iterator[Tensor]:
    """FP32, chunk by chunk, of all items."""
    about = contents.about
    tower = trained_tower(about.model, about.schema, contents.weights)
    shards = [shard_of(shard, about.item_cache, tower, contents.tables) for shard in contents.shards]
    items = Items(shards, torch.device("cpu"), range(len(shards) - bool(about.removed)))
    for _, (vector_NH,) in items.all(stage, CHUNK_ITEMS):
        yield vector_NH.float().contiguous()


def _width(contents: Contents, stage: Stage) -> int:
    return next(_vectors(contents, stage)).shape[1]


def _stages(model: ModelConfig) -> list[Stage]:
    """Those whose score is a dot product of one vector each."""
    stages: dict[Stage, bool] = {"similarity": model.similarity.kind == "dot", "hindexer": model.hindexer.weight > 0}
    return [stage for stage, is_dot in stages.items() if is_dot]
