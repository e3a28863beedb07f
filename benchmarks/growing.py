"""A stream of ids that come and go: what a table of fewer rows loses against one with a row for each id.

    python -m benchmarks.growing [--ids 10000000] [--rows 1000000] [--window 300000] [--lasting 100000]

Each step draws 8,192 ids. Seven of ten are uniform in a window, which moves over all ids from the first step to the
last; the others are drawn from ids that last, the k-th with a probability like 1 / k. Which of 1,000 items comes next
is a function of the id alone, so a model has to learn each id's row, and forgets what a row had learned that passes to
another id. The model is a dot product of width 16 with row-wise Adagrad, on one process. Each way of training runs in a
process of its own, on the same steps.

Quality is that of a batch before it is trained on, over the second half of the steps: the mean training loss, and in
every tenth step HR@10 over all items. Memory is that of the table, its optimizer and its map; the peak is that of the
process above what it held before.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import tyro

from benchmarks.measure import Spent, in_turn, machine, print_table, spent
from logitmix.comm.process_group import process_group
from logitmix.common.mappings import from_mapping
from logitmix.modules.batch import Batch, Packing
from logitmix.modules.features import Features, Values
from logitmix.modules.noise import Noise
from logitmix.modules.schema import ITEM, ITEM_FEATURE, Feature, Schema, Table
from logitmix.trainer.config import Config
from logitmix.trainer.parallel.optimizer import dense_optimizer
from logitmix.trainer.parallel.parallelize import parallelize
from logitmix.trainer.quiet import quietly
from logitmix.trainer.step.pipeline import Pipeline

NAME, ITEMS, DRAWN, NEGATIVES = "campaign", 1000, 8192, 32
FROM_WINDOW = 0.7


@dataclass(frozen=True)
class Options:
    ids: int = 10_000_000
    rows: int = 1_000_000
    """Rows of the table whose rows pass from id to id."""
    window: int = 300_000
    """Ids that are drawn often at a time."""
    lasting: int = 100_000
    """Ids that do not go."""
    steps: int = 4000
    evict: tuple[str, ...] = ("last_use", "frequency")
    admit_after: tuple[int, ...] = (1,)


@dataclass(frozen=True)
class Found:
    loss: float
    hr: float
    table_mb: float
    """With the optimizer's state and the map."""
    spent: Spent


def drawn(options: Options, step: int) -> np.ndarray:
    """The ids of a step, from 1."""
    random = np.random.default_rng(step)
    first = (options.ids - options.window) * step // options.steps
    moving = first + random.integers(0, options.window, DRAWN)
    lasting = (options.lasting ** random.random(DRAWN)).astype(np.int64) - 1
    return 1 + np.where(random.random(DRAWN) < FROM_WINDOW, moving, lasting)


def batch_of(options: Options, step: int) -> Batch:
    id_B = drawn(options, step)
    # Neighbors have nothing in common.
    target_B = (id_B.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32)).astype(np.int64) % ITEMS
    unique, place_B = np.unique(id_B, return_inverse=True)
    items = torch.arange(ITEMS)
    negatives = np.random.default_rng([step, 1]).integers(0, ITEMS, (1, NEGATIVES))
    return Batch(
        ids={ITEM: items, NAME: torch.from_numpy(unique)},
        id_V=items,
        features=Features(None, {NAME: Values(torch.from_numpy(place_B))}),
        packing=Packing(torch.ones(DRAWN, dtype=torch.int64)),
        input_T=torch.zeros(DRAWN, dtype=torch.int64),
        target_T=torch.from_numpy(target_B),
        negatives_GN=torch.from_numpy(negatives),
        bounds=[0, DRAWN],
        noise=Noise(step),
        total_targets=DRAWN,
    )


def configured(settings: dict[str, Any]) -> Config:
    tree = {
        "data": {"path": "none"},
        "model": {
            "dim": 16,
            "features": [NAME],
            # The one item of a history says nothing.
            "encoder": {"kind": "pooled", "max_length": 1, "hidden": 4, "dropout": 0.0},
            "loss": {"negatives": NEGATIVES, "share": "batch"},
        },
        "tables": {"optimizer": "rowwise_adagrad", "lr": 0.05, NAME: {"lr": 1.0, **settings}},
        "train": {"device": "cpu", "precision": "fp32", "log_every": 1000},
    }
    return from_mapping(Config, tree, "growing")


def measured(options: Options, settings: dict[str, Any]) -> Found:
    """Trains on all steps with these settings of the table."""
    found: list[tuple[float, float, float]] = []
    spent_ = spent(lambda: found.append(trained(options, settings)))
    return Found(*found[0], spent_)


def trained(options: Options, settings: dict[str, Any]) -> tuple[float, float, float]:
    torch.set_num_threads(1)
    config = configured(settings)
    feature = Feature(NAME, "user", "id", NAME)
    schema = Schema((ITEM_FEATURE, feature), (Table(ITEM, ITEMS + 1), Table(NAME, options.ids + 1)))
    losses, hits = [], []
    with quietly(), process_group("cpu", 60) as ranks:
        model = parallelize(schema, config, ranks)
        optimizer = dense_optimizer(model.tower, config.dense)
        with Pipeline(model, optimizer, partial(batch_of, options), options.steps) as pipeline:
            for step in range(options.steps):
                pipeline.receive_rows()
                late = step >= options.steps // 2
                if late and step % 10 == 0:
                    hits.append(hit_rate(pipeline))
                pipeline.loss()
                pipeline.backward()
                pipeline.check_gradients()
                pipeline.apply_gradients()
                if late:
                    losses.append(pipeline.losses["loss"].item())
        of_table = model.plan[NAME]
    return float(np.mean(losses)), float(np.mean(hits)), (of_table.bytes + of_table.map_bytes) / 1e6


@torch.no_grad()
def hit_rate(pipeline: Pipeline) -> float:
    """HR@10 of the batch, by the rows as they were received."""
    tower, batch = pipeline.model.tower, pipeline.batch
    tower.eval()
    items = tower.item_tower(pipeline.rows, batch.features)
    queries = tower.queries(items.vector_RD[batch.input_T], batch.packing, pipeline.rows, batch.features)
    sides = tower.query_sides(queries).similarity, tower.item_sides(items).similarity
    score_BX = tower.similarity.all_pairs(*sides)
    own_B1 = score_BX.gather(1, batch.target_T[:, None])
    return float(((score_BX > own_B1).sum(1) < 10).float().mean())


def main(options: Options) -> None:
    ways: dict[str, dict[str, Any]] = {"a row for each id": {}}
    for evict in options.evict:
        for admit_after in options.admit_after:
            ways[f"{evict}, admit_after {admit_after}"] = {
                "capacity": options.rows, "evict": evict, "admit_after": admit_after,
            }  # fmt: skip
    tasks = {name: partial(measured, options, settings) for name, settings in ways.items()}
    found = {name: of for name, (of,) in in_turn(tasks, 1).items()}
    sizes = f"{options.ids:,} ids, {options.rows:,} rows, a window of {options.window:,}, {options.lasting:,} that last"
    whole, rows = found["a row for each id"], []
    for name, of in found.items():
        figures = f"{of.loss:.4f}", f"{of.hr:.4f}", f"{of.hr / whole.hr - 1:+.1%}", f"{of.table_mb:,.0f}"
        rows.append((name, *figures, f"{of.spent.peak_mb:,.0f}", f"{of.spent.cpu_s:,.0f}"))
    heads = ("rows", "loss", "HR@10", "to all rows", "table, MB", "peak, MB", "CPU s")
    print_table(heads, rows, f"{sizes}, {options.steps:,} steps of {DRAWN:,}; {machine()}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
