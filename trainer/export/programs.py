"""The towers and the cascade as programs for servers that have torch alone, or onnxruntime, but not logitmix.

query_tower   vectors [B, L, D] of histories' items, oldest first, zeros behind a history; lengths int64 [B], from 1 to
              L; features user_NAME and event_NAME; for an encoder that sees times, int64 times [B, L] of the actions
              and time [B] of the request -> query_similarity_0, …, query_hindexer_0
item_tower    own_row [V, W], the items' rows of the item table; features item_NAME -> item_vector, from which histories
              are encoded, item_similarity_0, …, item_hindexer_0
cascade       what both return of queries and of the corpus's items, but the vectors; excluded int64 [B, E], indices of
              items to leave out, -1 for none -> items int64 and scores FP32 [B, K]: the h-indexer's best, as
              many as a Retriever keeps, or the whole corpus where it has no more, ranked by the similarity

Features are those of users [B, ...], events [B, L, ...] or items [V, ...]. Kind id: int64, the row of the feature's
table, which is its value's place in the vocabulary. Kind ids: int64 [..., S], such rows with -1 behind them. What a
kind has beside each id is a further input, such as NAME_weights, FP32 [..., S] with 0 behind. Kinds number [...] and
vector [..., W]: FP32. The tables of features are in the programs.

Axes: B histories, L positions, T of all histories, V items, X items of the corpus, S ids of a list, K items that are
kept, P pairs, D width of the model, W of a table or vector, R rows.
"""

import inspect
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule
from torch.nn import functional as F

from logitmix.common.files import naming
from logitmix.modules.batch import Packing
from logitmix.modules.config import ModelConfig, sees_times
from logitmix.modules.features import Features
from logitmix.modules.schema import ITEM, Feature
from logitmix.modules.towers import NO_ROWS, Sides, Tower
from logitmix.modules.values import Values
from logitmix.serving.directory import writer
from logitmix.serving.directory.format import ONNX, PROGRAMS, Contents, Entries
from logitmix.serving.model import OWN_ROW, named, trained_tower
from logitmix.serving.programs import capabilities
from logitmix.serving.request import Options
from logitmix.serving.stored_table import StoredTable
from logitmix.serving.topk import NOTHING, rank_keys, split_keys
from logitmix.trainer.quiet import quietly

TOP_K = 500
"""Items that the cascade returns, or all if there are fewer."""
ONNX_BYTES = 2**31 - 2**24
"""Weights that fit into an ONNX file, which protobuf limits to 2 GiB."""
VECTOR = "item_vector"
_EMITTED = re.compile(r"avx.*|fma.*|f16c|bmi2?|lzcnt|popcnt|sse4_[12]|ssse3|sse3")
"""Instruction sets of x86-64 that a compiler uses where it may."""


@dataclass(frozen=True)
class _Input:
    """An input as it is exported with: of sizes that torch does not take for constants, and with names of its dynamic
    axes."""

    example: Tensor
    dynamic: Mapping[int, Any]


class _Program(nn.Module, ABC):
    """A part of the model as a function of tensors that are given as keywords."""

    def __init__(self, tower: Tower, inputs: Mapping[str, _Input], tables: Mapping[str, Tensor] = NO_ROWS) -> None:
        super().__init__()
        self.tower, self.inputs, self.names = tower, inputs, list(tables)
        for name, table in tables.items():
            self.register_buffer(f"table_{name}", table)

        def forward(**given: Tensor) -> dict[str, Tensor]:
            return self.compute(given)

        # Keywords, because AOTInductor takes the tensors of a mapping in whatever order they come. torch.export wants
        # to know their names.
        keywords = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in inputs]
        forward.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
        self.forward = forward

    @property
    def tables(self) -> dict[str, Tensor]:
        return {name: self.get_buffer(f"table_{name}") for name in self.names}

    @property
    def examples(self) -> dict[str, Tensor]:
        return {name: of.example for name, of in self.inputs.items()}

    @abstractmethod
    def compute(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The outputs by name."""

    @torch.no_grad()
    def export(self) -> ExportedProgram:
        dynamic = {name: of.dynamic for name, of in self.inputs.items()}
        exported = torch.export.export(self, (), self.examples, dynamic_shapes=dynamic)
        # They name places on this machine.
        for part in exported.graph_module.modules():
            for node in part.graph.nodes if isinstance(part, GraphModule) else ():
                node.meta.pop("stack_trace", None)
        return exported


class QueryProgram(_Program):
    """Histories -> the sides of their queries."""

    def __init__(self, tower: Tower, tables: Mapping[str, StoredTable]) -> None:
        most, dim = tower.config.encoder.max_length, tower.config.dim
        B = {0: Dim("batch", min=1)}
        BL = B | ({1: Dim("length", min=1, max=most)} if most > 1 else {})
        inputs = {
            "vectors": _Input(torch.zeros(2, min(2, most), dim), BL),
            "lengths": _Input(torch.ones(2, dtype=torch.int64), B),
        }
        if sees_times(tower.config.encoder, tower.schema):
            inputs["times"] = _Input(torch.zeros(2, min(2, most), dtype=torch.int64), BL)
            inputs["time"] = _Input(torch.zeros(2, dtype=torch.int64), B)
        for feature in tower.schema.of("user"):
            inputs |= _inputs(feature, (2,), B)
        for feature in tower.schema.of("event"):
            inputs |= _inputs(feature, (2, min(2, most)), BL)
        super().__init__(tower, inputs, _tables_of([*tower.schema.of("user"), *tower.schema.of("event")], tables))

    def compute(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        vectors_BLD, tower = given["vectors"], self.tower
        values = {of.name: _values(of, given) for of in tower.schema.of("user")}
        values |= {of.name: _flat(_values(of, given)) for of in tower.schema.of("event")}
        packing = _Rows(given["lengths"], vectors_BLD.shape[1], given.get("times"), given.get("time"))
        query = tower.queries(vectors_BLD.flatten(0, 1), packing, self.tables, Features(values=values))
        return _outputs("query", tower.query_sides(query))


class ItemProgram(_Program):
    """Items -> their vectors and sides."""

    def __init__(self, tower: Tower, tables: Mapping[str, StoredTable]) -> None:
        V = {0: Dim("items", min=1)}
        inputs = {OWN_ROW: _Input(torch.zeros(2, tower.schema.dims(tower.config.dim)[ITEM]), V)}
        for feature in tower.schema.of("item"):
            inputs |= _inputs(feature, (2,), V)
        super().__init__(tower, inputs, _tables_of(tower.schema.of("item"), tables))

    def compute(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        values = {of.name: _values(of, given) for of in self.tower.schema.of("item")}
        item = self.tower.item_tower(self.tables | {ITEM: given[OWN_ROW]}, Features(values=values))
        return {VECTOR: item.vector_RD} | _outputs("item", self.tower.item_sides(item))


class CascadeProgram(_Program):
    """Sides of queries and of the corpus's items -> the best items."""

    def __init__(self, query: QueryProgram, item: ItemProgram, num_items: int, k: int, stage1: int) -> None:
        """`num_items` decides whether there is a stage 1, which keeps `stage1` items. The program can be given more."""
        self.two_stages = query.tower.hindexer is not None and num_items > stage1
        self.k, self.stage1 = min(k, stage1 if self.two_stages else num_items), stage1
        least = stage1 if self.two_stages else self.k
        B, X = {0: Dim("batch", min=1)}, {0: Dim("corpus", min=least)}
        with torch.no_grad():
            sides = {name: (part, B) for name, part in query.compute(query.examples).items()}
            for name, part in item.compute(item.examples).items():
                # Contiguous, as the inputs will be: AOTInductor compiles for the examples' strides.
                sides[name] = torch.zeros(max(2, least), *part.shape[1:]), X
        del sides[VECTOR]
        inputs = {name: _Input(example, dynamic) for name, (example, dynamic) in sides.items()}
        inputs["excluded"] = _Input(torch.full((2, 2), -1), B | {1: Dim("excluded", min=1)})
        super().__init__(query.tower, inputs)

    def compute(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        query, item = (_sides(owner, given) for owner in ("query", "item"))
        similarity, hindexer = self.tower.similarity, self.tower.hindexer
        if not self.two_stages or hindexer is None or query.hindexer is None or item.hindexer is None:
            keys_BX = _all_keys(similarity.all_pairs(query.similarity, item.similarity), given["excluded"])
            return _ranking(keys_BX, self.k)
        keys_BX = _all_keys(hindexer.all_pairs(query.hindexer, item.hindexer), given["excluded"])
        index_BK, _ = split_keys(keys_BX.topk(self.stage1).values)
        place_P = index_BK.clamp(min=0).flatten()
        items = tuple(part[place_P] for part in item.similarity)
        queries = tuple(
            part[:, None].expand(-1, self.stage1, *part.shape[1:]).flatten(0, 1) for part in query.similarity
        )
        score_BK = similarity.pairs(queries, items).view(-1, self.stage1)
        return _ranking(rank_keys(score_BK, index_BK).masked_fill(index_BK < 0, NOTHING), self.k)


def _all_keys(score_BX: Tensor, excluded_BE: Tensor) -> Tensor:
    """The keys of all items, NOTHING for those that are left out."""
    X = score_BX.shape[1]
    keys_BX = rank_keys(score_BX, torch.arange(X))
    # -1 leaves out an item behind the last one.
    place_BE = torch.where(excluded_BE < 0, X, excluded_BE)
    return F.pad(keys_BX, (0, 1)).scatter(1, place_BE, NOTHING)[:, :-1]


def _ranking(keys: Tensor, k: int) -> dict[str, Tensor]:
    items_BK, score_BK = split_keys(keys.topk(k).values)
    return {"items": items_BK, "scores": score_BK}


class _Rows(Packing):
    """Histories as rows of L positions, each of which counts as a position of its history: so no shape depends on the
    lengths' values. Causality hides from a history what lies behind it."""

    def __init__(self, lengths_B: Tensor, longest: int, times_BL: Tensor | None, time_B: Tensor | None) -> None:
        B = lengths_B.shape[0]
        self.shape, self.lengths_B = (B, longest), lengths_B
        self.offset_B = torch.arange(B + 1) * longest
        self.sequence_T = torch.arange(B)[:, None].expand(B, longest).reshape(-1)
        self.position_T = torch.arange(longest).expand(B, longest).reshape(-1)
        self.padded_T = self.grouped_T = self.source_S = torch.arange(B * longest)
        self.groups = [(B, longest)]
        self.last_B = torch.arange(B) * longest + lengths_B - 1
        self.time_T = self.asked_T = None
        if times_BL is not None and time_B is not None:
            place_L = torch.arange(longest)
            next_BL = times_BL[:, (place_L + 1).clamp(max=longest - 1)]
            asked_BL = torch.where(place_L == lengths_B[:, None] - 1, time_B[:, None], next_BL)
            self.time_T, self.asked_T = times_BL.flatten(), asked_BL.flatten()


def _tables_of(features: Sequence[Feature], tables: Mapping[str, StoredTable]) -> dict[str, Tensor]:
    names = {of.table: None for of in features if of.sparse}
    return {name: torch.cat(list(tables[name].parts)) for name in names}


def _name(feature: Feature) -> str:
    return f"{feature.owner}_{feature.name}"


def _inputs(feature: Feature, rows: tuple[int, ...], dynamic: Mapping[int, Any]) -> dict[str, _Input]:
    name, form = _name(feature), feature.form
    if not form.bag:
        shape, dtype = (*rows, feature.width) if form.wide else rows, torch.int64 if form.sparse else torch.float32
        return {name: _Input(torch.zeros(shape, dtype=dtype), dynamic)}
    dynamic = {**dynamic, len(rows): Dim(f"ids_of_{name}", min=1)}
    beside = {f"{name}_{of}": _Input(torch.zeros(*rows, 2), dynamic) for of in form.parallel}
    return {name: _Input(torch.full((*rows, 2), -1), dynamic), **beside}


def _values(feature: Feature, given: Mapping[str, Tensor]) -> Values:
    name, form = _name(feature), feature.form
    # Behind a history there may be -1, as in lists.
    values = given[name].clamp(min=0) if form.sparse and not form.bag else given[name]
    return Values(values, parallel={of: given[f"{name}_{of}"] for of in form.parallel})


def _flat(of: Values) -> Values:
    """One position after the other."""
    return Values(of.values.flatten(0, 1), parallel={name: each.flatten(0, 1) for name, each in of.parallel.items()})


def _outputs(owner: str, sides: Sides) -> dict[str, Tensor]:
    return {f"{owner}_{name.replace('.', '_')}": part for name, part in named(sides).items()}


def _sides(owner: str, given: Mapping[str, Tensor]) -> Sides:
    """From the output of `_outputs`."""
    similarity, hindexer = (
        tuple(part for name, part in given.items() if name.startswith(f"{owner}_{stage}_"))
        for stage in ("similarity", "hindexer")
    )
    return Sides(similarity, hindexer or None)


def programs_of(contents: Contents) -> dict[str, _Program]:
    """By name."""
    tower = trained_tower(contents.about.model, contents.about.schema, contents.weights)
    query, item = QueryProgram(tower, contents.tables), ItemProgram(tower, contents.tables)
    X = contents.about.num_items
    cascade = CascadeProgram(query, item, X, TOP_K, Options(TOP_K).kept(X))
    return {"query_tower": query, "item_tower": item, "cascade": cascade}


def check_programs(model: ModelConfig) -> None:
    """ValueError without a C++ compiler."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ValueError(f"--programs needs a C++ compiler, and there is no {compiler}: install g++, or set CXX to one")


def _this_cpu() -> list[str]:
    here = capabilities()
    there = [name for name in here if here[name] is True]
    if here["architecture"] == "x86_64":
        there = list(filter(_EMITTED.fullmatch, there))
    return [here["architecture"], *there]


@quietly()
def write_programs(staging: Path, contents: Contents) -> Entries:
    """Writes programs/NAME.pt2 for torch.export.load and programs/NAME.aoti.pt2, compiled for this machine's
    instruction set, for torch._inductor.aoti_load_package. ValueError if the compiler fails, OSError if the disk is
    full."""
    # It takes a second to import.
    from torch._inductor.exc import CppCompileError, InductorError, InvalidCxxCompiler

    (staging / PROGRAMS).mkdir()
    entries = Entries()
    for name, program in programs_of(contents).items():
        plain, compiled = (f"{PROGRAMS}/{name}{suffix}.pt2" for suffix in ("", ".aoti"))
        exported = program.export()
        try:
            # Into memory: where a disk is full, torch's own writer ends the process.
            torch._inductor.aoti_compile_and_package(exported, package_path=(package := BytesIO()))
        except (InductorError, InvalidCxxCompiler) as error:
            if isinstance(error, InductorError) and not isinstance(error.inner_exception, CppCompileError):
                raise
            last = [line for line in str(error).splitlines() if line.strip()][-1].strip()
            raise ValueError(f"the C++ compiler cannot compile {name}: {last}") from None
        # The examples are as large as the corpus.
        exported.example_inputs = None
        torch.export.save(exported, saved := BytesIO())
        for file, buffer in ((plain, saved), (compiled, package)):
            with naming(staging / file):
                (staging / file).write_bytes(buffer.getbuffer())
        entries |= writer.extra_entry(staging, plain)
        entries |= writer.extra_entry(staging, compiled, _this_cpu())
    return entries


def check_onnx(model: ModelConfig) -> None:
    """ValueError where onnx or onnxscript is not installed, and for an encoder that sees times: ONNX has no operation
    for the bits of a number, by which times have their buckets."""
    if getattr(model.encoder, "times", False):
        raise ValueError("--onnx cannot hold an encoder that sees times; --programs can")
    if missing := [name for name in ("onnx", "onnxscript") if find_spec(name) is None]:
        raise ValueError(f"--onnx needs packages that are not installed: pip install {' '.join(missing)}")


@quietly()
def write_onnx(staging: Path, contents: Contents) -> Entries:
    """Writes query_tower.onnx, the query tower with these inputs and outputs. ValueError if it is too large for one
    file."""
    program = programs_of(contents)["query_tower"]
    size = sum(tensor.nbytes for tensor in program.state_dict().values())
    if size > ONNX_BYTES:
        raise ValueError(
            f"the query tower and its tables of features take {size / 2**30:.1f} GiB; an ONNX file holds 2; leave "
            "--onnx out"
        )
    names = list(program.compute(program.examples))
    made = torch.onnx.export(program.export(), dynamo=True, external_data=False, output_names=names, verbose=False)
    assert made is not None
    made.save(staging / ONNX)
    return writer.extra_entry(staging, ONNX)
