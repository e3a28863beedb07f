"""Small trained models and brute-force rankings of them, for the tests of serving."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from small_data import FEATURES, random_column, random_tower
from torch import Tensor

from logitmix.comm.process_group import process_group
from logitmix.modules.batch import Packing
from logitmix.modules.config import (
    DeepFMConfig,
    DotConfig,
    EncoderConfig,
    HIndexerConfig,
    MLPConfig,
    ModelConfig,
    MoLConfig,
    NeuMFConfig,
    SASRecConfig,
    SimilarityConfig,
)
from logitmix.modules.schema import ITEM, RECENCY, RECENCY_VALUES, Schema, Table
from logitmix.modules.similarity.base import Side, Similarity
from logitmix.modules.stage1 import Int8Corpus, hindexer_topk
from logitmix.modules.towers import Tower
from logitmix.serving.directory.format import About, Source
from logitmix.serving.model import Precision
from logitmix.serving.texts import Texts
from logitmix.trainer.config import Config
from logitmix.trainer.data.columns import Column
from logitmix.trainer.export.columns import column_of
from logitmix.trainer.export.export import DatasetItems, Extra, export_model
from logitmix.trainer.run.checkpoint import SavedModel

LENGTH = 7
SOURCE = Source(run="small", step=12, dataset="demo")


@dataclass(frozen=True)
class SmallModel:
    """A tower and its table, as if trained."""

    config: ModelConfig
    item_XD: Tensor
    tower: Tower
    others: Mapping[str, Tensor] = field(default_factory=dict)
    """Tables of features."""
    features: Mapping[str, Column] = field(default_factory=dict)
    """Of the items."""

    def saved(self) -> SavedModel:
        def read_rows(table: str, start: int, stop: int) -> Tensor:
            # The last row is that of unknown items.
            rows = self.others | {ITEM: torch.cat([self.item_XD, torch.zeros(1, self.config.dim)])}
            return rows[table][start:stop]

        return SavedModel(Config(model=self.config), SOURCE.step, self.tower, read_rows)


def small_model(
    kind: str,
    num_items: int,
    hindexer: bool = True,
    seed: int = 0,
    schema: Schema | None = None,
    encoder: EncoderConfig = SASRecConfig(blocks=2, heads=2, max_length=LENGTH),  # noqa: B008 (frozen)
) -> SmallModel:
    """Random weights, of every kind of parameter: initial biases are zero and initial norms do nothing."""
    schema = schema or Schema.of_ids(num_items)
    mol = MoLConfig(query_components=2, item_components=3, component_dim=4, gate_hidden=8, projection_hidden=16)
    similarities: dict[str, SimilarityConfig] = {
        "dot": DotConfig(),
        "mlp": MLPConfig(hidden=12),
        "neumf": NeuMFConfig(gmf_dim=5, hidden=12, mlp_dim=4, final_hidden=8),
        "deepfm": DeepFMConfig(query_components=2, item_components=3, component_dim=4, projection_hidden=16, hidden=8),
        "mol": mol,
        "mol, linear": replace(mol, item_projection_linear=True),
        "mol, no hidden": replace(mol, projection_hidden=0),
        "mol, joint": replace(mol, gating="joint"),
    }
    config = ModelConfig(
        dim=16,
        encoder=encoder,
        similarity=similarities[kind],
        hindexer=HIndexerConfig(dim=8, weight=0.2 if hindexer else 0.0),
    )
    generator = torch.Generator().manual_seed(seed)
    tower = random_tower(config, schema, generator)
    item_XD = torch.randn(num_items, config.dim, generator=generator)
    dims = schema.dims(config.dim)
    others = {
        table.name: torch.randn(table.rows, dims[table.name], generator=generator)
        for table in schema.tables
        if table.name != ITEM
    }
    random = np.random.default_rng(seed)
    features = {feature.name: random_column(feature, schema, num_items, random) for feature in schema.of("item")}
    return SmallModel(config, item_XD, tower.eval(), others, features)


def every_feature(num_items: int) -> Schema:
    """A feature of each owner and kind."""
    return replace(FEATURES, tables=(Table(ITEM, num_items + 1), *FEATURES.tables[1:]))


def in_order(texts: list[str]) -> Texts:
    """Texts that can be found."""
    made = Texts.of(texts)
    order = sorted(range(len(texts)), key=made.encoded)
    return Texts(made.data, made.bounds, torch.tensor(order, dtype=torch.int64))


def raw_ids(num_items: int) -> list[str]:
    return [f"id {index * 7}" for index in range(num_items)]


def small_columns(num_items: int) -> dict[str, list[Any]]:
    """Of each kind, with items that have none."""
    random = np.random.default_rng(num_items)

    def drawn(*values: Any) -> list[Any]:
        return [values[at] for at in random.integers(len(values), size=num_items)]

    days = [date(2024, 1, day) for day in (1, 9, 20)]
    return {
        "price": drawn(None, 0.5, 3.0, 17.0, 40.0),
        "in_stock": drawn(0, 1),
        "category": drawn(None, "a", "b b", "c's", "d"),
        "since": drawn(None, *days),
    }


def export_small(
    model: SmallModel,
    out: Path,
    overwrite: bool = False,
    item_cache: bool = True,
    precision: Precision = "fp32",
    extras: Collection[Extra] = (),
) -> Path:
    ids = raw_ids(len(model.item_XD))
    titles = [f"«{raw_id}»" for raw_id in ids]
    about = About(model.config, SOURCE, len(ids), True, model.tower.schema, item_cache, precision)

    def vocabulary(table: str) -> pa.ChunkedArray:
        if table == RECENCY:
            return pa.chunked_array([RECENCY_VALUES])
        rows = pa.array(range(len(model.others[table]))).cast(pa.string())
        return pa.chunked_array([pa.nulls(1, pa.string()), rows[1:]])

    columns = {name: column_of(name, pa.array(values)) for name, values in small_columns(len(ids)).items()}
    about = replace(about, filterable={name: column.kind for name, column in columns.items()})
    items = DatasetItems(
        lambda: pa.chunked_array([ids]), lambda: pa.chunked_array([titles]), model.features, vocabulary, columns
    )
    with process_group("cpu", 60) as ranks:
        export_model(model.saved(), about, items, out, overwrite, ranks, extras=extras)
    return out


@dataclass(frozen=True)
class BruteForce:
    """Scores [B, X] of all items, from the trained modules, the h-indexer's in INT8; excluded items have -inf."""

    similarity_BX: Tensor
    hindexer_BX: Tensor | None

    def leave_out(self, out_X: Tensor, row: int | slice = slice(None)) -> None:
        for score_BX in (self.similarity_BX, self.hindexer_BX):
            if score_BX is not None:
                score_BX[row, out_X] = -torch.inf

    def of(self, stage1: int | None) -> Tensor:
        """What decides: the similarity, in one stage or in two if there are two."""
        return self.two_stages(stage1) if stage1 and self.hindexer_BX is not None else self.similarity_BX

    def two_stages(self, stage1: int) -> Tensor:
        """The similarity, with -inf for items that are not among the best `stage1` of the h-indexer."""
        assert self.hindexer_BX is not None
        left_out = torch.ones_like(self.hindexer_BX, dtype=torch.bool)
        best = self.hindexer_BX.sort(descending=True, stable=True).indices[:, :stage1]
        left_out.scatter_(1, best, False)
        return self.similarity_BX.masked_fill(left_out, -torch.inf)


@torch.no_grad()
def brute_force(
    model: SmallModel,
    histories: list[list[int]],
    exclude_history: bool = True,
    times: tuple[list[list[int]], ...] = (),
) -> BruteForce:
    """`times`: when each action was and when the query after it was asked, for an encoder that sees times."""
    tower, seen = model.tower, [history[-LENGTH:] for history in histories]
    packed = [torch.tensor([time for of in given for time in of[-LENGTH:]]) for given in times]
    packing = Packing(torch.tensor([len(history) for history in seen]), 0, *packed)
    history_T = torch.tensor([item for history in seen for item in history])
    query_BD = tower.queries(model.item_XD[history_T], packing).vector_RD

    def sides(stage: Similarity) -> tuple[Side, Side]:
        item_X = torch.arange(len(model.item_XD))
        return stage.query(query_BD, packing.last_B), stage.item(model.item_XD, item_X)

    def left(score_BX: Tensor) -> Tensor:
        if exclude_history:
            for row, history in enumerate(histories):
                score_BX[row, history] = -torch.inf
        return score_BX

    similarity_BX = left(tower.similarity.all_pairs(*sides(tower.similarity)))
    if tower.hindexer is None:
        return BruteForce(similarity_BX, None)
    (query_BH,), (item_XH,) = sides(tower.hindexer)
    # All items, in the order of their index.
    return BruteForce(similarity_BX, left(hindexer_topk(query_BH, Int8Corpus.of(item_XH), len(item_XH)).scores_BK))


def random_histories(num_items: int, lengths: list[int], seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(num_items, (length,), generator=generator).tolist() for length in lengths]
