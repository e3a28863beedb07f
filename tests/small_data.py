"""Small datasets and configurations for tests."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, get_args

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor

from logitmix.comm.process_group import process_group
from logitmix.common.mappings import from_mapping
from logitmix.modules.batch import Bags
from logitmix.modules.config import HSTUConfig, LossConfig, ModelConfig
from logitmix.modules.kinds.date import NO_DATE
from logitmix.modules.schema import ITEM, Feature, Owner, Schema, Table
from logitmix.modules.towers import Tower
from logitmix.trainer.config import Config, TrainConfig, dump_toml
from logitmix.trainer.data import writer
from logitmix.trainer.data.batches import HeldOut, RankingUsers, TrainingBatches, leave_one_out
from logitmix.trainer.data.columns import Column
from logitmix.trainer.data.dataset import Dataset, load_dataset
from logitmix.trainer.data.description import DIGESTS
from logitmix.trainer.data.lookups import columns_of
from logitmix.trainer.data.repeats import repeated_targets
from logitmix.trainer.data.writer import DatasetContents
from logitmix.trainer.evaluation.embed import Embedder
from logitmix.trainer.export.catalog import Catalog
from logitmix.trainer.parallel.sharded_rows import ShardedRows
from logitmix.trainer.run.checkpoint import load_saved
from logitmix.trainer.run.metrics import read_rows

if TYPE_CHECKING:
    from logitmix.trainer.parallel.parallelize import ParallelModel
    from logitmix.trainer.parallel.plan import TableRules
    from logitmix.trainer.run.metrics import RunProgress
    from logitmix.trainer.step.pipeline import Pipeline

ITEMS = 50


def in_memory(offsets: np.ndarray, items_flat: np.ndarray, items: int) -> Dataset:
    """A dataset without a directory: user u's items are items_flat[offsets[u] : offsets[u + 1]]."""
    return Dataset(
        Path("nowhere"),
        "made",
        len(offsets) - 1,
        items,
        items_flat.astype(np.int32),
        offsets.astype(np.int64),
        np.arange(len(items_flat), dtype=np.int32),
        Schema.of_ids(items),
        repeated_targets(offsets, items_flat),
    )


def write_dataset(
    path: Path,
    users: int = 60,
    items: int = ITEMS,
    seed: int = 0,
    features: bool = False,
    ring: bool = False,
    weighted: bool = False,
) -> Path:
    """Users with 5 to 24 random actions each, at random times; `features` adds one of each owner and kind, `weighted`
    weighted bags too; on the ring, each user walks from item to next item."""
    random = np.random.default_rng(seed)
    lengths = random.integers(5, 25, users)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    actions = random.integers(0, items, offsets[-1])
    if ring:
        actions = (np.repeat(actions[offsets[:-1]] - offsets[:-1], lengths) + np.arange(offsets[-1])) % items
    names = pa.array([f"item-{index}" for index in range(items)])
    rows = {"item": items, "user": users, "event": int(offsets[-1])}
    features = features or weighted
    schema = (WEIGHTED if weighted else FEATURES) if features else Schema.of_ids(items)
    if features:
        schema = replace(schema, tables=(Table("item", items + 1), *schema.tables[1:]))
    columns = {f.name: random_column(f, schema, rows[f.owner], random) for f in schema.features if f.name != "item"}
    vocabularies = {
        table.name: pa.array([None, *(f"{table.name}-{row}" for row in range(1, table.rows))], pa.string())
        for table in schema.tables
        if table.name != "item"
    }
    times = np.cumsum(2 ** np.random.default_rng([seed, 1]).integers(0, 20, offsets[-1]))
    contents = DatasetContents(
        offsets, actions, times, names, schema=schema, columns=columns, vocabularies=vocabularies
    )
    writer.write_dataset(path, contents, "demo")
    return path


def write_late_items(path: Path) -> Path:
    """40 users, u-0 and so on, with ten actions each at the same times; the last one of every other user is of an item
    that is new then."""
    items = np.random.default_rng(0).integers(0, 30, (40, 10))
    items[::2, -1] = np.arange(30, 50)
    contents = DatasetContents(
        np.arange(0, 401, 10),
        items.ravel(),
        np.tile(np.arange(10), 40),
        pa.array([f"item-{index}" for index in range(50)]),
        pa.array([f"u-{user}" for user in range(40)]),
    )
    writer.write_dataset(path, contents, "demo")
    return path


def catalog_of(folder: Path, text: str, name: str = "new.csv", only: bool = False) -> Catalog:
    """A table of items, to be written into an export."""
    (folder / name).write_text(text)
    return Catalog(str(folder / name), only=only)


def forget_digests(path: Path) -> Path:
    """Leaves the digests out of a dataset.json, as other writers do, so that files may be changed."""
    file = path / "dataset.json"
    description = json.loads(file.read_text(encoding="utf-8"))
    for entry in DIGESTS:
        description.pop(entry, None)
    file.write_text(json.dumps(description), encoding="utf-8")
    return path


FEATURES = Schema(
    (
        Feature("item", "item", "id", "item"),
        Feature("brand", "item", "id", "brand"),
        Feature("tags", "item", "ids", "tags"),
        Feature("price", "item", "number", mean=0.5, deviation=2.0),
        Feature("image", "item", "vector", width=3),
        Feature("country", "user", "id", "country"),
        Feature("favorites", "user", "ids", "brand"),
        Feature("age", "user", "number", mean=-1.0),
        Feature("taste", "user", "vector", width=2),
        Feature("action", "event", "id", "type"),
        Feature("query", "event", "ids", "tags"),
        Feature("rating", "event", "number", mean=3.0, deviation=0.5),
        Feature("place", "event", "vector", width=2, deviation=4.0),
        Feature("released", "item", "date", unit="s"),
    ),
    (Table("item", ITEMS + 1), Table("brand", 7), Table("tags", 11), Table("country", 4), Table("type", 3)),
)
"""Every owner with every kind; two tables are shared, and one has the name of an attribute of torch's modules."""
WEIGHTED = replace(
    FEATURES,
    features=(
        *FEATURES.features,
        *(
            Feature(f"weighted_{owner}", owner, "weighted_ids", "brand", columns={"weights": f"weights_{owner}"})
            for owner in get_args(Owner)
        ),
    ),
)
"""FEATURES with weighted bags of brands."""


def random_column(feature: Feature, schema: Schema, rows: int, random: np.random.Generator) -> Column:
    """Values of a feature, among them unknown ones and empty lists."""
    if feature.kind == "date":
        days = random.integers(0, 100, rows).astype(np.float32)
        return Column(np.where(days < 10, np.float32(NO_DATE), days))
    if feature.kind == "number":
        return Column(random.normal(feature.mean, feature.deviation, rows).astype(np.float32))
    if feature.kind == "vector":
        shape = (rows, feature.width)
        return Column(random.normal(feature.mean, feature.deviation, shape).astype(np.float32))
    table_rows = schema.table(feature.table).rows
    if feature.kind == "id":
        return Column(random.integers(0, table_rows, rows))
    offsets = np.concatenate([[0], np.cumsum(random.integers(0, 4, rows))])
    ids = random.integers(0, table_rows, offsets[-1])
    # Some are 0, and so are all of some bags.
    weights = {"weights": (random.integers(0, 4, len(ids)) / 2).astype(np.float32)} if feature.form.parallel else {}
    return Column(ids, offsets, weights)


def small_config(data: Path, settings: Mapping[str, Any] = MappingProxyType({})) -> Config:
    """A MoL that trains in a moment: D = 8, 2 x 2 components; `settings` ({"train.epochs": 3}) go on top."""
    flat = {
        "data.path": str(data),
        "model.dim": 8,
        "model.encoder.blocks": 1,
        "model.encoder.max_length": 12,
        "model.similarity.kind": "mol",
        "model.similarity.query_components": 2,
        "model.similarity.item_components": 2,
        "model.similarity.component_dim": 4,
        "model.similarity.gate_hidden": 8,
        "model.similarity.projection_hidden": 8,
        "model.hindexer.dim": 4,
        "model.hindexer.weight": 0.5,
        "model.loss.negatives": 5,
        "model.loss.share": "sequence",
        "train.device": "cpu",
        "train.batch_size": 16,
        "train.epochs": 2,
        "train.precision": "bf16",
        "train.log_every": 1,
    }
    flat |= settings
    for section, kind in (("model.similarity.", "mol"), ("model.encoder.", "sasrec")):
        if flat.get(f"{section}kind", kind) != kind:
            flat = {key: value for key, value in flat.items() if not key.startswith(section) or key in settings}
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return from_mapping(Config, tree, "test")


def made_run(path: Path, rows: list[dict[str, Any]], settings: dict[str, Any], **files: Any) -> Path:
    """A run directory without training."""
    path.mkdir()
    (path / "config.toml").write_text(dump_toml(small_config(path, settings)))
    (path / "dataset.json").write_text(json.dumps({"name": "a <b> & c", "users": 60, "items": 50, "actions": 700}))
    if rows:
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def random_tower(config: ModelConfig, schema: Schema, generator: torch.Generator) -> Tower:
    """All weights random: initial biases are zero, and initial norms do nothing."""
    tower = Tower(config, schema)
    tower.reset_parameters(generator)
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return tower


def require_limits(section: type, prefix: str, field: str, wrong: list[float], right: list[float]) -> None:
    """Values of a field that a section of a configuration refuses, and that it takes."""
    for value in wrong:
        with pytest.raises(ValueError, match=rf"^{prefix}\.{field} is {value}; it must be "):
            section(**{field: value})
    for value in right:
        assert getattr(section(**{field: value}), field) == value


def batches_of(dataset: Dataset, schema: Schema, held_out: HeldOut | None = None, **options: Any) -> TrainingBatches:
    """Batches of a dataset, leave-one-out if nothing else is given; `options` are settings of the model, its loss, its
    encoder and the training by their last names, and arguments of TrainingBatches."""

    def of(*names: str) -> dict[str, Any]:
        return {name: options.pop(name) for name in names if name in options}

    arguments = of("explicit", "weights", "first_U", "pooled", "rank", "world_size")
    train, loss = TrainConfig(**of("batch_size", "seed", "stride")), LossConfig(**of(*LossConfig.__annotations__))
    encoder = HSTUConfig(**of("max_length", "times"))
    model = ModelConfig(**{"user_id_dropout": 0.0, "wanted_dropout": 0.0} | options, encoder=encoder, loss=loss)
    return TrainingBatches(dataset, schema, model, train, held_out or leave_one_out(dataset), **arguments)


def table_rules(config: Config) -> "TableRules":
    """What the plan of the tables takes of a configuration."""
    from logitmix.trainer.parallel.plan import TableRules

    return TableRules(config.tables, config.train.ema > 0, config.comm.parts)


@contextmanager
def a_model(
    config: Config, schema: Schema | None = None, device: Any = "cpu"
) -> Iterator[tuple["ParallelModel", torch.optim.Optimizer]]:
    """On all ranks: a model with its dense optimizer, of this schema, or of that of the configured dataset."""
    from logitmix.trainer.loop import parallel_model
    from logitmix.trainer.parallel.optimizer import dense_optimizer

    with process_group(device, 60) as ranks:
        model = parallel_model(config, schema or load_dataset(config.data.path).schema, ranks)
        yield model, dense_optimizer(model.tower, config.dense)


@contextmanager
def a_pipeline(config: Config, total: int, done: "RunProgress | None" = None) -> Iterator["Pipeline"]:
    """Of the configured dataset's batches, on all ranks."""
    from logitmix.trainer.loop import training_batches
    from logitmix.trainer.step.pipeline import Pipeline

    with a_model(config, device=config.train.device) as (model, optimizer):
        batches = training_batches(config, load_dataset(config.data.path), model.ranks)
        with Pipeline(model, optimizer, batches, total, done) as pipeline:
            yield pipeline


def whole_state(pipeline: "Pipeline") -> list[Tensor]:
    """Copies of all that a step may change: weights, moments, their averages, counts of updates."""
    model = pipeline.model
    sharded = [*model.shards().values(), *(model.average.tables.values() if model.average else [])]
    sharded += [moment for of_table in model.table_optimizers.state_dict().values() for moment in of_table.values()]
    towers = [model.tower, *([model.average.tower] if model.average else [])]
    dense = [value for of in pipeline.optimizer.state.values() for value in of.values() if value is not None]
    held = [shard.tensor for of in sharded for shard in of.local_shards()]
    held += [*dense, *(weight for tower in towers for weight in tower.parameters())]
    return [*(each.detach().cpu().clone() for each in held), torch.tensor(model.table_optimizers.steps)]


def a_step(pipeline: "Pipeline") -> dict[str, Tensor]:
    """Trains one step; the gradients of the tower by parameter."""
    pipeline.receive_rows()
    pipeline.loss()
    pipeline.backward()
    pipeline.check_gradients()
    gradients = {name: parameter.grad.clone() for name, parameter in pipeline.model.tower.named_parameters()}
    pipeline.apply_gradients()
    return gradients


def assert_close(actual: Tensor, expected: Tensor, relative: float) -> None:
    """In the norm of the whole tensor: single elements may be zero but for rounding."""
    assert (actual - expected).norm() <= relative * expected.norm()


def interrupted(*_: object, **__: object) -> NoReturn:
    """In place of what a job is killed in."""
    raise KeyboardInterrupt


def move_rows(model: "ParallelModel", ids: Tensor, gradient: Tensor) -> None:
    """Rows of sorted ids here and their gradient back: one update of the item table, once its optimizer's step has
    begun."""
    move_tables(model, {ITEM: ids}, {ITEM: gradient})


def move_tables(model: "ParallelModel", ids: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
    """As `move_rows`, of several tables; each id of a pooled one is a bag by itself."""
    exchange = model.row_exchange(
        {
            name: Bags(of_table, torch.arange(len(of_table) + 1)) if model.plan[name].pooled else of_table
            for name, of_table in ids.items()
        }
    )
    exchange.send_rows()
    for name, leaf in exchange.wait().items():
        leaf.grad = gradients[name]
    exchange.send_gradients()
    exchange.apply_gradients()


def gather_table(model: "ParallelModel", name: str = ITEM) -> Tensor:
    """A whole table [rows, D] on every rank."""
    sharded = model.shards()[name]
    return ShardedRows.of_shards(sharded, model.ranks).fetch(torch.arange(sharded.size()[0]))


def hit_rate(run: Path) -> float:
    """HR@1 of a run on the test part."""
    rate: float = json.loads((run / "results.json").read_text())["hr@1"]
    return rate


def losses_of(run: Path) -> list[float]:
    return [row["loss"] for row in read_rows(run, "train")]


@torch.no_grad()
def trained_scores(run: Path, dataset: Dataset, users: RankingUsers) -> Tensor:
    """Of each user with each item, by the trained model from its tables."""
    model = load_saved(run)
    with process_group("cpu", 60) as ranks:
        embedder = Embedder(model.tower, model.sharded_rows(ranks), columns_of(dataset, model.tower.schema))
        queries = model.tower.query_sides(embedder.queries(users))
        items = model.tower.item_sides(embedder.items(np.arange(dataset.num_items)))
    return model.tower.similarity.all_pairs(queries.similarity, items.similarity)
