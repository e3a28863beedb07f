"""The items' vectors of an export for other engines of nearest neighbors: indexes of faiss, a Parquet file for those
that load their own, and Qdrant.

Axes: N items of a chunk, X items, H width of a vector.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
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
TRAINED_ON = 64
"""Items that an IVF is trained on, for each of its lists."""
PROBED = 16
"""One in so many lists of an IVF is searched, unless who searches says otherwise."""
LEAST_ITEMS = 256
"""That product quantization can be trained on: as many as a byte has values."""
EF = 1024
"""Items that a search in an HNSW graph keeps in view, unless who searches says otherwise."""

Index = Literal["faiss", "faiss_hnsw", "faiss_ivfpq", "vectors"]


Making = Callable[[Path, Contents, Callable[[], Iterator[Tensor]]], AbstractContextManager[Callable[[Tensor], None]]]
"""Makes a file of vectors, which is complete when the context ends: from its path, the export and a function that
yields all vectors, chunk by chunk, for what is trained on them. The context takes the FP32 vectors [N, H] of the next
items."""


@contextmanager
def _in_faiss(
    kind: str, file: Path, contents: Contents, vectors: Callable[[], Iterator[Tensor]]
) -> Iterator[Callable[[Tensor], None]]:
    """An index of inner products, whose ids are the items' indices. OSError if the disk is full."""
    import faiss

    H, X = next(vectors()).shape[1], contents.about.num_items
    threads = faiss.omp_get_max_threads()
    # Several threads would give another graph, and other lists, each time.
    faiss.omp_set_num_threads(1)
    try:
        if kind == "flat":
            index: Any = faiss.IndexFlatIP(H)
        elif kind == "hnsw":
            index = faiss.index_factory(H, "HNSW32", faiss.METRIC_INNER_PRODUCT)
            index.hnsw.efSearch = EF
        else:
            index = _trained_ivfpq(faiss, H, X, vectors)
        yield lambda vector_NH: index.add(vector_NH.numpy())
    finally:
        faiss.omp_set_num_threads(threads)
    try:
        faiss.write_index(index, str(file))
    except RuntimeError as error:
        raise OSError(f"{file} cannot be written: {error}") from None


def _trained_ivfpq(faiss: Any, H: int, X: int, vectors: Callable[[], Iterator[Tensor]]) -> Any:
    """Lists of products of quantizers of two dimensions each: H / 2 bytes an item."""
    if X < LEAST_ITEMS:
        raise ValueError(
            f"an IVF-PQ index is trained on {LEAST_ITEMS} items, and the export has {X}; leave --faiss-ivfpq out"
        )
    lists = max(1, min(4 * math.isqrt(X), X // TRAINED_ON))
    parts = H // 2 if H % 2 == 0 else H
    # "np": training for polysemous codes takes a quarter of a minute, and nobody searches by them here.
    index = faiss.index_factory(H, f"IVF{lists},PQ{parts}np", faiss.METRIC_INNER_PRODUCT)
    index.pq.cp.min_points_per_centroid = 1  # fewer than 39 are good enough, and no reason for a warning
    index.nprobe = max(1, lists // PROBED)
    step = max(1, X // max(LEAST_ITEMS, TRAINED_ON * lists))
    start, some = 0, []
    for vector_NH in vectors():
        some.append(vector_NH[-start % step :: step])
        start += len(vector_NH)
    index.train(torch.cat(some).numpy())
    return index


@contextmanager
def _in_parquet(
    file: Path, contents: Contents, vectors: Callable[[], Iterator[Tensor]]
) -> Iterator[Callable[[Tensor], None]]:
    H = next(vectors()).shape[1]
    schema = pa.schema({"item": pa.int64(), "id": pa.string(), "vector": pa.list_(pa.float32(), H)})
    rows = enumerate(contents.raw_ids)

    def add(vector_NH: Tensor) -> None:
        index, ids = zip(*islice(rows, len(vector_NH)), strict=True)
        vector = pa.FixedSizeListArray.from_arrays(pa.array(vector_NH.flatten().numpy()), H)
        parquet.write_batch(pa.record_batch([pa.array(index), pa.array(ids), vector], schema=schema))

    with pq.ParquetWriter(file, schema, compression="none") as parquet:
        yield add


INDEXES: Mapping[Index, tuple[str, Making]] = {
    "faiss": (".faiss", partial(_in_faiss, "flat")),
    "faiss_hnsw": ("-hnsw.faiss", partial(_in_faiss, "hnsw")),
    "faiss_ivfpq": ("-ivfpq.faiss", partial(_in_faiss, "ivfpq")),
    "vectors": (".parquet", _in_parquet),
}
"""Of each, how its files' names end, after the stage."""


def index_of(name: str) -> Index | None:
    """Which of INDEXES a file of an export is."""
    ends = {f"{stage}{end}": index for index, (end, _) in INDEXES.items() for stage in ("similarity", "hindexer")}
    return ends.get(name)


def check_index(kind: Index, model: ModelConfig) -> None:
    """ValueError where faiss is needed and not installed, or no score of the model is a dot product of vectors."""
    flag = f"--{kind.replace('_', '-')}"
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
    entries, (end, making) = Entries(), INDEXES[kind]
    for stage in _stages(contents.about.model):
        file = staging / f"{stage}{end}"
        with making(file, contents, partial(_vectors, contents, stage)) as add:
            for vector_NH in _vectors(contents, stage):
                add(vector_NH)
        entries |= writer.extra_entry(staging, file.name)
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
    H = next(_vectors(contents, stage)).shape[1]
    client.create_collection(own, vectors_config=models.VectorParams(size=H, distance=models.Distance.DOT))
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


def _stages(model: ModelConfig) -> list[Stage]:
    """Those whose score is a dot product of one vector each."""
    stages: dict[Stage, bool] = {"similarity": model.similarity.kind == "dot", "hindexer": model.hindexer.weight > 0}
    return [stage for stage, is_dot in stages.items() if is_dot]
