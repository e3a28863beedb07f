"""The trained tower for serving: loaded from its weights, and the names, types and shapes of an export's tensors.

Axes: R items, D width of the model, H of the h-indexer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from logitmix.modules.config import ModelConfig
from logitmix.modules.features import Embedded
from logitmix.modules.schema import ITEM, Schema
from logitmix.modules.similarity.base import Side
from logitmix.modules.stage1 import LANES, LARGEST, Int8Corpus, scale_of
from logitmix.modules.towers import Sides, Tower

TABLE = "table"
"""Name of the items' vectors [R, D] beside the cache: histories are encoded with them."""
OWN_ROW = "own_row"
"""Name of the items' rows of the item table [R, W], used without the cache."""
CORPUS, CORPUS_SCALE = "corpus", "corpus.scale"
"""The h-indexer's vectors of a shard in INT8."""
IDS_ALONE = Schema.of_ids(1)

Precision = Literal["fp32", "bf16", "fp16", "int8"]
"""How the item cache stores the items' sides."""
STORED = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.bfloat16}
"""By precision; for INT8, all but MoL's components."""
FP16_MOST = torch.finfo(torch.float16).max / 4
"""The largest of some items must be below this: others may be larger."""

SIDE, COMPONENTS_SCALE = "similarity.", "similarity.0.scale"
"""How the names of the items' sides begin, before a number; and MoL's components' scale where they are in INT8."""


def trained_tower(config: ModelConfig, schema: Schema, weights: Mapping[str, Tensor]) -> Tower:
    """The tower with these weights, without a copy, on their device."""
    tower = _empty_tower(config, schema)
    tower.load_state_dict(weights, assign=True)
    if any(buffer.is_meta for buffer in tower.buffers()):  # those that are not saved, but made by constructors
        tower = Tower(config, schema)
        tower.load_state_dict(weights, assign=True)
    return tower.requires_grad_(False).eval()


def named(sides: Sides) -> dict[str, Tensor]:
    """Both stages' sides by name: similarity.0, … and hindexer.0, each [R, ...]."""
    return {f"{stage}.{i}": part for stage, side in sides._asdict().items() for i, part in enumerate(side or ())}


@dataclass(frozen=True)
class Scales:
    """Of what an export stores in INT8; None for what it does not."""

    corpus: float | None
    """The h-indexer's vectors."""
    components: float | None
    """MoL's components of items, where the item cache is INT8."""


def estimated(tower: Tower, precision: Precision, some: Embedded) -> tuple[Precision, Scales]:
    """Scales by some of the items, and the precision: BF16 instead of FP16 where that is too small for them."""
    sides = tower.item_sides(some)
    if precision == "fp16" and any(bool((part.abs() > FP16_MOST).any()) for part in sides.similarity):
        precision = "bf16"
    corpus = None if sides.hindexer is None else scale_of(sides.hindexer[0])
    largest = float(sides.similarity[0].abs().max()) if precision == "int8" else None
    return precision, Scales(corpus, None if largest is None else largest / LARGEST or 1.0)


def stored_items(
    tower: Tower, items: Embedded, precision: Precision, cached: bool, scales: Scales
) -> dict[str, Tensor]:
    """What an export stores of consecutive items, by name. With the item cache: table [R, D], the items' vectors in
    FP32, and their side for the similarity, similarity.0, …, each [R, ...] in the precision; for INT8, similarity.0 is
    a value over similarity.0.scale [1], and the rest is BF16. If there is an h-indexer: its vectors as corpus, the
    blocks of an Int8Corpus, and corpus.scale [1].

    Raises ValueError for numbers that the precision cannot hold.
    """
    tensors: dict[str, Tensor] = {}
    sides = tower.item_sides(items)
    if cached:
        tensors[TABLE] = items.vector_RD
        for i, part in enumerate(sides.similarity):
            if i == 0 and scales.components is not None:
                values = (part / scales.components).round().clamp(-LARGEST, LARGEST)
                tensors |= {SIDE + "0": values.to(torch.int8), COMPONENTS_SCALE: torch.tensor([scales.components])}
                continue
            tensors[f"{SIDE}{i}"] = stored = part.to(STORED[precision])
            if part.isfinite().all() and not stored.isfinite().all():
                raise ValueError(f"the items' {SIDE}{i} does not fit {precision}; export with --precision bf16")
    if sides.hindexer is not None:
        assert scales.corpus is not None
        (vector_RH,) = sides.hindexer
        corpus = Int8Corpus.empty(len(vector_RH), vector_RH.shape[1], scales.corpus)
        corpus.fill(0, vector_RH)
        tensors |= {CORPUS: corpus.blocks, CORPUS_SCALE: torch.tensor([scales.corpus])}
    return tensors


CACHE = (TABLE, CORPUS, CORPUS_SCALE, COMPONENTS_SCALE)
"""The tensors of the item cache, besides the sides."""


def is_side(name: str) -> bool:
    """Whether a tensor is a part of the items' sides; a feature may be named similarity, too."""
    return name.startswith(SIDE) and name.removeprefix(SIDE).isdigit()


def side_of(tensors: Mapping[str, Tensor]) -> tuple[Side, float]:
    """A shard's side for the similarity as stored, and the scale of its first part."""
    count = sum(map(is_side, tensors))
    scale = float(tensors[COMPONENTS_SCALE]) if COMPONENTS_SCALE in tensors else 1.0
    return tuple(tensors[f"{SIDE}{i}"] for i in range(count)), scale


def scales_of(tensors: Mapping[str, Tensor]) -> Scales:
    """Those of a shard."""
    corpus, components = (tensors.get(name) for name in (CORPUS_SCALE, COMPONENTS_SCALE))
    return Scales(None if corpus is None else float(corpus), None if components is None else float(components))


@dataclass(frozen=True)
class _Model:
    """Of which functions remember what they have computed. A plugin's settings may have fields without a hash."""

    config: ModelConfig
    schema: Schema

    def __hash__(self) -> int:
        return hash(repr(self))


def weight_shapes(config: ModelConfig, schema: Schema) -> dict[str, list[int]]:
    """The weights of a tower of this configuration."""
    return {name: list(shape) for name, shape in _weight_shapes(_Model(config, schema)).items()}


@lru_cache(maxsize=16)
def _weight_shapes(of: _Model) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in _empty_tower(of.config, of.schema).state_dict().items()}


def item_types(
    config: ModelConfig, schema: Schema, count: int, precision: Precision = "fp32", cached: bool = True
) -> dict[str, tuple[torch.dtype, list[int]]]:
    """Types and shapes of `stored_items`'s output for `count` items and a tower of this configuration."""
    lengths = {CORPUS: -(-count // LANES), CORPUS_SCALE: 1, COMPONENTS_SCALE: 1}
    of_one = _types_of_one(_Model(config, schema), precision, cached)
    return {name: (dtype, [lengths.get(name, count), *shape[1:]]) for name, (dtype, shape) in of_one.items()}


# An export has many files of items, of the same types.
@lru_cache(maxsize=16)
def _types_of_one(of: _Model, precision: Precision, cached: bool) -> dict[str, tuple[torch.dtype, torch.Size]]:
    # Computed for one real item: torch takes seconds to load what it needs to compute with shapes alone.
    zeros = {name: torch.zeros(shape) for name, shape in _weight_shapes(of).items()}
    tower, vector_1D = trained_tower(of.config, of.schema, zeros), torch.zeros(1, of.config.dim)
    one = Embedded(vector_1D, [vector_1D] * len(of.schema.of("item")))
    with torch.inference_mode():
        scales = Scales(1.0 if tower.hindexer else None, 1.0 if precision == "int8" else None)
        stored = stored_items(tower, one, precision, cached, scales)
    return {name: (each.dtype, each.shape) for name, each in stored.items()}


def row_shapes(config: ModelConfig, schema: Schema) -> dict[str, list[int]]:
    """By table, the shape of the rows in an export: all rows, but only the unknown item's row of the item table."""
    dims = schema.dims(config.dim)
    return {table.name: [1 if table.name == ITEM else table.rows, dims[table.name]] for table in schema.tables}


def _empty_tower(config: ModelConfig, schema: Schema) -> Tower:
    with torch.device("meta"):
        return Tower(config, schema)
