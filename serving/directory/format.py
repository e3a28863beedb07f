"""The serving directory: safetensors and JSON, so that reading it runs no code but ours. Format version 5.

    manifest.json        what is here; see below
    tower.safetensors    the weights of the towers
    items-00000-of-000NN.safetensors
                         consecutive items: table [R, D], the vectors from which histories are encoded (with ids alone
                         the rows of the item table), and the item cache: the items' side for the similarity
                         (similarity.0, …; for MoL the components [R, I, C] and the gating weights [R, M]) in the
                         manifest's precision. int8 stores MoL's components as I8, with their scale in
                         similarity.0.scale [1], and the weights in BF16. Also, if items have features, the inputs of
                         all this, so that features can change; and only these, if item_cache is false: own_row [R, W],
                         the items' rows of the item table, and NAME.values of each feature. For kinds of ids, these are
                         rows of the feature's table (I32, or I64 if a table has more than 2^31 rows). Bags also have
                         NAME.offsets (I64 [R + 1], where each item's values begin and end), and a tensor for each
                         number that a value has beside it, such as NAME.weights. With an h-indexer, its vectors in
                         INT8: corpus (U8 [R / 16, H / 4, 16, 4], see Int8Corpus in modules/stage1.py) and corpus.scale
                         [1], the same in all files. If items were removed, the last file has these alone: only
                         histories may hold them
    tables-00000-of-000NN.safetensors
                         TABLE [any number, W]: consecutive rows of each table that has some in this file. Those of all
                         files, one after the other, are the table; of the item table, only the row of unknown items is
                         here
    vocabularies.safetensors
                         the values of each table of features by row: TABLE.data, TABLE.bounds and TABLE.order, in the
                         format of the raw ids below
    ids.safetensors      raw_ids.data (U8, the texts in UTF-8, by item index, removed items last), raw_ids.bounds (I64,
                         where the texts begin and end in it), raw_ids.order (I64, the indices in the order of their
                         bytes); titles.data and titles.bounds if there are titles
    columns.safetensors  where there are filterable columns: NAME.values, F64 [X] with NaN for none, times in seconds
                         since 1970; of text I32 [X], places among NAME.texts.data, NAME.texts.bounds and
                         NAME.texts.order (distinct, in the format of the raw ids), -1 for none
    projections.safetensors
                         where features of texts are encoded by n-grams: NAME [BUCKETS, the feature's width] of each
                         (modules/kinds/text.py)
    README.md            the model card, for people (trainer/export/card.py)
    STAGE.faiss, STAGE-hnsw.faiss, STAGE-ivfpq.faiss, STAGE.parquet
                         on request, the items' vectors for other engines, where STAGE is similarity or hindexer
                         (trainer/export/indexes.py)
    query_tower.onnx     on request, the query tower (trainer/export/programs.py)
    programs/NAME.pt2, programs/NAME.aoti.pt2
                         on request, query_tower, item_tower and cascade as programs. These run code when they are
                         loaded, so the Retriever never does; serving/programs.py loads them where they are trusted

All other tensors are FP32. The fields of the manifest:

    kind, format_version      name and version of the format
    logitmix, torch           versions that wrote it
    run, step, dataset        where the weights come from: names of run and dataset, step of the checkpoint
    model                     the model's configuration
    schema                    the features that the model uses, and their tables (modules/schema.py)
    num_items                 X
    removed                   number of removed items
    item_cache                whether the files of items hold the item cache
    precision                 fp32, bf16, fp16 or int8: how they store it
    exclude_history           whether retrieval leaves a history's own items out by default: as the model was evaluated
    filterable                where there are such columns: {name: number, time or text}
    signature                 inputs and outputs of a retrieval
    files                     {name: {bytes, sha256, tensors: {name: {dtype, shape}}}}; extras, which retrieval does not
                              read, have no tensors; compiled programs have cpu, a list of the architecture and of the
                              instruction sets that they need
    plugins                   where kinds of the model or its features are of plugins: {name: version}. Reading it
                              imports none of them
    sha256                    digest of the other fields (common/checked.py)

Axes: X items in the corpus, R items of a shard, D encoder width, W width of a table, I item components, C component
width, M mixture components, H h-indexer width.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from logitmix.common.checked import Checked
from logitmix.modules.config import ModelConfig
from logitmix.modules.kinds.text import BUCKETS, NGRAMS
from logitmix.modules.schema import ITEM, WANTED, Feature, Owner, Schema
from logitmix.serving.columns import Column, Kind
from logitmix.serving.items import stored_type
from logitmix.serving.mapped import MappedFiles
from logitmix.serving.model import IDS_ALONE, OWN_ROW, TABLE, Precision, item_types, row_shapes, weight_shapes
from logitmix.serving.stored_table import StoredTable
from logitmix.serving.texts import Texts

FORMAT = Checked("logitmix serving directory", 5)
MANIFEST, WEIGHTS, IDS = "manifest.json", "tower.safetensors", "ids.safetensors"
VOCABULARIES, COLUMNS, PROJECTIONS = (f"{of}.safetensors" for of in ("vocabularies", "columns", "projections"))
CARD, ONNX, PROGRAMS = "README.md", "query_tower.onnx", "programs"
_EXTRA = re.compile(
    r"README\.md|(similarity|hindexer)(\.parquet|(-hnsw|-ivfpq)?\.faiss)|query_tower\.onnx|"
    r"programs/(query_tower|item_tower|cascade)(\.aoti)?\.pt2"
)
"""Names of the extras: `read` neither reads nor checks them."""

Entries = dict[str, dict[str, Any]]
"""The field "files" of the manifest, or a part of it."""

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
DTYPES |= {torch.float64: "F64", torch.int8: "I8", torch.uint8: "U8", torch.int32: "I32", torch.int64: "I64"}


@dataclass(frozen=True)
class Source:
    """Where a model comes from: name of the run, step of the checkpoint, name of the dataset."""

    run: str
    step: int
    dataset: str


@dataclass(frozen=True)
class About:
    """What the manifest says of an export, besides its files."""

    model: ModelConfig
    source: Source
    num_items: int
    """X, without those that were removed."""
    exclude_history: bool
    """Whether retrieval leaves a history's own items out by default."""
    schema: Schema = IDS_ALONE
    """The dataset's features that the model uses."""
    item_cache: bool = True
    """Whether the shards hold the item tower's outputs, or its inputs."""
    precision: Precision = "fp32"
    """How they store the outputs."""
    filterable: dict[str, Kind] = field(default_factory=dict)
    """The columns of the items that requests can filter by."""
    removed: int = 0
    """Items that were removed: the last shard's. Histories may hold them, and no answer does."""

    @property
    def projected(self) -> list[Feature]:
        """The features of texts that have a projection."""
        return [feature for feature in self.schema.features if feature.encoder == NGRAMS]

    @property
    def holds_inputs(self) -> bool:
        """Whether the shards hold the item tower's inputs, beside its outputs or instead of them."""
        return not self.item_cache or bool(self.schema.of("item"))


@dataclass(frozen=True, eq=False)
class Contents:
    """The content of a serving directory."""

    about: About
    weights: Mapping[str, Tensor]
    """Weights of the towers."""
    tables: Mapping[str, StoredTable]
    """[rows, W] for each table of features; [1, W] for the item table, the unknown item's row."""
    vocabularies: Mapping[str, Texts]
    """For each table of features, the values by row, with their order."""
    shards: Sequence[Mapping[str, Tensor]]
    """Consecutive items, by the names of `stored_items` and, where there are inputs, of `ItemInputs.tensors`."""
    raw_ids: Texts
    """Of all items, the removed ones last; distinct, with their order."""
    titles: Texts | None
    """Of the same, for people to read."""
    columns: Mapping[str, Column] = field(default_factory=dict)
    """Those of About.filterable."""
    projections: Mapping[str, Tensor] = field(default_factory=dict)
    """Those of About.projected, by name."""
    digest: str = ""
    """The manifest's."""
    delta: int = 0
    """The number of the last delta that was applied to it."""
    files: MappedFiles = field(default_factory=MappedFiles)
    """From which the tensors are mapped."""


def is_extra(name: str) -> bool:
    return _EXTRA.fullmatch(name) is not None


def is_compiled(name: str) -> bool:
    return name.endswith(".aoti.pt2")


def items_file(number: int, count: int) -> str:
    return f"items-{number:05}-of-{count:05}.safetensors"


def tables_file(number: int, count: int) -> str:
    return f"tables-{number:05}-of-{count:05}.safetensors"


def numbered(name: Callable[[int, int], str], names: Collection[str]) -> list[str]:
    """The names of the files of a kind, in order: as many as there are names with the same beginning."""
    kind = name(0, 0).partition("-")[0]
    count = sum(of.startswith(f"{kind}-") for of in names)
    return [name(number, count) for number in range(count)]


def signature(about: About) -> dict[str, Any]:
    """Inputs and outputs of a retrieval, for readers of the manifest."""
    model, schema = about.model, about.schema
    columns = {}
    if model.wanted:
        columns["want"] = f"value of {model.wanted} of the action that is to come"
    if about.filterable:
        of = f"the columns {', '.join(about.filterable)}"
        columns |= {"where": f"condition on {of}", "limit": f"most items of a value, by name, of {of}"}

    def features(owner: Owner) -> dict[str, str]:
        return {
            of.name: of.form.in_request.format(width=of.width)
            for of in schema.of(owner)
            if of.name != WANTED + model.wanted
        }

    return {
        "inputs": {
            "history": {
                "items": "raw ids, or item indices from 0 to num_items - 1",
                "order": "oldest first",
                "min_length": 0 if schema.of("user") else 1,
                "max_length": model.encoder.max_length,
                "longer": "the last max_length are encoded",
            },
            "timestamps": "whole numbers, one a history item, oldest first; used with recency, times or dates alone",
            "time": "whole number, when the request is made; used with times or dates alone; else the last timestamp",
            "user": features("user"),
            "events": {"one a history item, oldest first": features("event")},
            "allowed": "raw ids; only these items are ranked where it is given",
            "blocked": "raw ids of items that are left out",
            **columns,
            "k": "number of items to retrieve",
        },
        "new_items": features("item"),
        "outputs": {
            "items": "item indices, highest score first, equal scores by rising index; -1 where none is left",
            "scores": "F32, the similarity; -inf where no item is left",
        },
    }


def described(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: {"dtype": DTYPES[value.dtype], "shape": list(value.shape)} for name, value in tensors.items()}


def expected_tensors(found: Mapping[str, Mapping[str, Any]], about: About) -> dict[str, dict[str, Any]]:
    """By file, its tensors as a manifest has them: those that follow from the model and the number of items, with as
    many rows, ids in bags and bytes of texts as found. LookupError, ValueError or RuntimeError where there are none."""
    expected = {name: items_tensors(found[name], about) for name in numbered(items_file, found)}
    shapes = row_shapes(about.model, about.schema)
    for name in numbered(tables_file, found):
        there = found[name]
        expected[name] = _float32({of: [there[of]["shape"][0], W] for of, (_, W) in shapes.items() if of in there})
    expected[WEIGHTS] = _float32(weight_shapes(about.model, about.schema))
    count = about.num_items + about.removed
    expected[IDS] = _texts_tensors(found[IDS], "raw_ids", count)
    if "titles.data" in found[IDS]:
        expected[IDS] |= _texts_tensors(found[IDS], "titles", count, ordered=False)
    expected[VOCABULARIES] = {}
    for table in about.schema.tables:
        if table.name != ITEM:
            expected[VOCABULARIES] |= _texts_tensors(found[VOCABULARIES], table.name, table.rows)
    if about.projected:
        expected[PROJECTIONS] = _float32({of.name: [BUCKETS, of.width] for of in about.projected})
    if about.filterable:
        expected[COLUMNS] = {}
    for name, kind in about.filterable.items():
        expected[COLUMNS][f"{name}.values"] = {"dtype": "I32" if kind == "text" else "F64", "shape": [about.num_items]}
        if kind == "text":
            count = int(found[COLUMNS][f"{name}.texts.order"]["shape"][0])
            expected[COLUMNS] |= _texts_tensors(found[COLUMNS], f"{name}.texts", count)
    return expected


def row_tensor(about: About) -> str:
    return TABLE if about.item_cache else OWN_ROW


def items_tensors(found: Mapping[str, Any], about: About) -> dict[str, Any]:
    """The tensors of a shard, with as many items and ids in bags as found."""
    R = found[row_tensor(about)]["shape"][0]
    types = item_types(about.model, about.schema, R, about.precision, about.item_cache)
    expected = {name: {"dtype": DTYPES[dtype], "shape": shape} for name, (dtype, shape) in types.items()}
    if not about.holds_inputs:
        return expected
    expected |= _float32({OWN_ROW: [R, about.schema.dims(about.model.dim)[ITEM]]})
    for feature in about.schema.of("item"):
        name, dtype = f"{feature.name}.values", DTYPES[stored_type(feature, about.schema)]
        form = feature.form
        count = found[name]["shape"][0] if form.bag else R
        expected[name] = {"dtype": dtype, "shape": [count, feature.width] if form.wide else [count]}
        if form.bag:
            expected[f"{feature.name}.offsets"] = {"dtype": "I64", "shape": [R + 1]}
        expected |= _float32({f"{feature.name}.{beside}": [count] for beside in form.parallel})
    return expected


def _float32(shapes: Mapping[str, list[int]]) -> dict[str, Any]:
    return {name: {"dtype": "F32", "shape": shape} for name, shape in shapes.items()}


def _texts_tensors(found: Mapping[str, Any], name: str, count: int, ordered: bool = True) -> dict[str, Any]:
    """Those of some texts, as long as found."""
    expected = {
        f"{name}.bounds": {"dtype": "I64", "shape": [count + 1]},
        f"{name}.data": {"dtype": "U8", "shape": [int(found[f"{name}.data"]["shape"][0])]},
    }
    return expected | ({f"{name}.order": {"dtype": "I64", "shape": [count]}} if ordered else {})
