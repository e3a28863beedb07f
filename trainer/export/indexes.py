"""The items' vectors of an export for other engines of nearest neighbors: flat indexes of faiss, a Parquet file for
engines that load their own, and Qdrant.

Axes: N items of a chunk, X items, H width of a vector.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from logitmix.modules.config import ModelConfig
from logitmix.serving.directory import writer
from logitmix.serving.directory.format import Contents, Entries
from logitmix.serving.directory.reader import read
from logitmix.serving.items import Items, Stage, shard_of
from logitmix.serving.model import trained_tower

if TYPE_CHECKING:
    from qdrant_client import QdrantClient

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


def to_qdrant(
    directory: Path,
    client: "QdrantClient",
    name: str,
    payloads: Iterable[Mapping[str, Any]] = (),
    stage: Stage = "hindexer",
) -> None:
    """Writes the vectors of an export to Qdrant: points of a new collection, by the items' indices, with the raw `id`
    and the item's payload, of which there are none or one for each item. Then the alias `name` is its name: who
    searches by it finds all of the old export's items or all of the new one's.

    ValueError if the model has no such stage, or for another number of payloads.
    """
    from qdrant_client import models

    contents = read(directory)
    if stage not in (there := _stages(contents.about.model)):
        raise ValueError(f"{directory} has no vectors of the stage {stage}; there are: {', '.join(there) or 'none'}")
    X, more = contents.about.num_items, list(payloads) or [{}] * contents.about.num_items
    if len(more) != X:
        raise ValueError(f"there are {len(more):,} payloads for {X:,} items of {directory}; give one for each")
    before = {of.alias_name: of.collection_name for of in client.get_aliases().aliases}.get(name)
    own = next(of for of in (f"{name}-{contents.digest[:16]}", f"{name}-again") if of != before)
    # One that is there already is what is left of a writer that was killed.
    client.delete_collection(own)
    size = _width(contents, stage)
    client.create_collection(own, vectors_config=models.VectorParams(size=size, distance=models.Distance.DOT))
    every = (vector_H for vector_NH in _vectors(contents, stage) for vector_H in vector_NH.tolist())
    rows = enumerate(zip(every, islice(contents.raw_ids, X), more, strict=True))
    points = (models.PointStruct(id=at, vector=of, payload={**more, "id": id_}) for at, (of, id_, more) in rows)
    client.upload_points(own, points, wait=True)
    alias = models.CreateAlias(collection_name=own, alias_name=name)
    changes: list[Any] = [models.CreateAliasOperation(create_alias=alias)]
    if before:
        changes.insert(0, models.DeleteAliasOperation(delete_alias=models.DeleteAlias(alias_name=name)))
    client.update_collection_aliases(changes)
    if before:
        client.delete_collection(before)


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
