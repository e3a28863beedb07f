"""Sums of the scores of runs that differ in their seeds: what an ensemble of dot products brings beside MoL. Such a sum
is itself one dot product, that of all their vectors, one after the other.

    python -m benchmarks.sums RUN RUN [RUN ...] [--beside RUN,RUN] [--heads]

Test metrics over the whole corpus: of the runs alone, of the sums of 2, 3, … of them, means over all ways to choose
these, and of other runs on the same dataset. The differences to the first row are paired over the users, with their
standard errors.

With --heads, similarities over the frozen encoders and tables of the first two runs are trained for an epoch, each from
what gives their sum: gates of MoL for the two dot products, a linear map of each side, and MoL 4x4.

Axes: U users, X items, M metrics, T positions, N items of a batch, R runs, D width of one of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import sqrt
from pathlib import Path
from typing import cast

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from logitmix.comm.process_group import process_group
from logitmix.modules.batch import Batch
from logitmix.modules.config import DotConfig, MoLConfig
from logitmix.modules.initialize import reset_layers
from logitmix.modules.losses.blockwise import Examples
from logitmix.modules.noise import Noise
from logitmix.modules.similarity.base import Side, Similarity
from logitmix.modules.similarity.dot import Dot
from logitmix.modules.similarity.mol import MoL
from logitmix.trainer.data.batches import ranking_users
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.data.lookups import columns_of
from logitmix.trainer.evaluation.embed import Embedder
from logitmix.trainer.evaluation.evaluate import excludes_history, held_out
from logitmix.trainer.loop import training_batches
from logitmix.trainer.metrics import METRICS
from logitmix.trainer.run.checkpoint import load_saved

SHOWN = ("hr@10", "hr@50", "hr@200", "hr@500", "ndcg@10")


@dataclass(frozen=True)
class Options:
    runs: tyro.conf.Positional[tuple[str, ...]]
    beside: str = ""
    """Other runs, separated by commas."""
    heads: bool = False
    """Also train similarities over the first two runs, whose encoders and tables stay as they are."""
    threads: int = 1


def main(options: Options) -> None:
    torch.set_num_threads(options.threads)
    scored = [scores(Path(run)) for run in options.runs]
    rows = {f"{count} of {len(scored)}": mean_of_sums(scored, count) for count in range(1, len(scored) + 1)}
    rows |= {run: mean_of_sums([scores(Path(run))], 1) for run in options.beside.split(",") if run}
    show(rows)
    if options.heads:
        show(trained_heads([Path(run) for run in options.runs[:2]]))


def scores(run: Path) -> tuple[Tensor, Tensor]:
    """What a run's best checkpoint gives each item [U, X], -inf where it is left out, and the targets [U, 1]."""
    with torch.no_grad(), process_group("cpu", 60) as ranks:
        model = load_saved(run, ranks=ranks)
        config, dataset = model.config, load_dataset(model.config.data.path)
        of_run, similarity = held_out(config, dataset), model.tower.similarity
        users = ranking_users(dataset, "test", config.model.encoder.max_length, of_run)
        columns = columns_of(dataset, model.tower.schema, of_run.trained(dataset))
        embedder, item_X = Embedder(model.tower, model.sharded_rows(ranks), columns), np.arange(dataset.num_items)
        side = similarity.item_side(embedder.items(item_X), torch.from_numpy(item_X))
        score_UX = torch.cat(
            [
                similarity.all_pairs(similarity.query_side(embedder.queries(part), torch.arange(len(part))), side)
                for part in users.batches(config.evaluate.batch_size)
            ]
        )
    if excludes_history(config, dataset):
        user_S = np.repeat(np.arange(len(users)), users.seen_lengths)
        score_UX[torch.from_numpy(user_S), torch.from_numpy(users.seen)] = -torch.inf
    return score_UX, torch.from_numpy(users.target)[:, None]


def mean_of_sums(scored: list[tuple[Tensor, Tensor]], count: int) -> np.ndarray:
    """The metrics of each user [U, M], means over the sums of `count` of the scores. Ties count against a target."""
    found = []
    for few in combinations(scored, count):
        score_UX, target_U1 = torch.stack([of for of, _ in few]).sum(0), few[0][1]
        rank_U = (score_UX >= score_UX.gather(1, target_U1)).sum(1).numpy()
        found.append(np.stack([METRICS.find(name)(rank_U) for name in SHOWN], 1, dtype=float))
    return np.mean(found, 0)


class Gates(MoL):
    """The runs' dot products as the components, with the gates of MoL, which begin as even."""

    def __init__(self, runs: int, dim: int) -> None:
        config = MoLConfig(query_components=runs, item_components=runs, component_dim=dim, gate_hidden=32)
        super().__init__(runs * dim, config)
        self.runs = runs
        reset_layers(self, torch.Generator().manual_seed(0))
        of_query, of_item, last = (
            cast(nn.Linear, cast(nn.Sequential, gate)[2]) for gate in (self.query_gate, self.item_gate, self.cross_gate)
        )
        with torch.no_grad():
            last.weight.zero_()
            # No weight for a query of one run with an item of another.
            last.bias.zero_().view(runs, runs).fill_diagonal_(10.0)
            of_query.weight.mul_(0.1)
            of_item.weight.mul_(0.1)

    def query(self, query_TD: Tensor, row_T: Tensor, noise: Noise | None = None, groups: Sequence[Tensor] = ()) -> Side:
        parts_TRD = query_TD.unflatten(1, (self.runs, -1)) * sqrt(self.runs)
        return parts_TRD / self.config.temperature, self.query_gate(query_TD)

    def item(self, item_ND: Tensor, row_N: Tensor, noise: Noise | None = None, groups: Sequence[Tensor] = ()) -> Side:
        return item_ND.unflatten(1, (self.runs, -1)) * sqrt(self.runs), self.item_gate(item_ND)


class Maps(Dot):
    """The dot product of a linear map of each side, which begins as the identity."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, DotConfig())
        self.of_query, self.of_item = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        for map_ in (self.of_query, self.of_item):
            nn.init.eye_(map_.weight)

    def query(self, query_TD: Tensor, row_T: Tensor, noise: Noise | None = None) -> Side:
        return super().query(self.of_query(query_TD), row_T, noise)

    def item(self, item_ND: Tensor, row_N: Tensor, noise: Noise | None = None) -> Side:
        return super().item(self.of_item(item_ND), row_N, noise)


def trained_heads(runs: list[Path]) -> dict[str, np.ndarray]:
    frozen = [Frozen(run) for run in runs]
    item_XD, test_UD = (
        torch.cat(of, 1) / sqrt(len(runs)) for of in ([f.item_XD for f in frozen], [f.test_UD for f in frozen])
    )
    steps = [
        (torch.cat([query for query, _ in of], 1) / sqrt(len(runs)), of[0][1])
        for of in zip(*(f.steps for f in frozen), strict=True)
    ]
    dim = item_XD.shape[1]
    mol = MoL(
        dim, MoLConfig(query_components=4, item_components=4, component_dim=32, gate_hidden=32, projection_hidden=128)
    )
    mol.reset_parameters(torch.Generator().manual_seed(0))
    heads = {"gates": Gates(len(runs), dim // len(runs)), "linear maps": Maps(dim), "MoL 4x4": mol}

    def values(head: Similarity) -> np.ndarray:
        with torch.no_grad():
            side, row_U = head.item(item_XD, torch.arange(len(item_XD))), torch.arange(len(test_UD))
            parts = zip(test_UD.split(64), row_U.split(64), strict=True)
            score_UX = torch.cat([head.all_pairs(head.query(part, row), side) for part, row in parts])
        score_UX[frozen[0].left_out] = -torch.inf
        return mean_of_sums([(score_UX, frozen[0].target_U1)], 1)

    rows = {"sum": values(Dot(dim, DotConfig()))}
    for name, head in heads.items():
        rows[f"{name} at the start"] = values(head)
        train_head(head, item_XD, steps)
        rows[name] = values(head)
    return rows


class Frozen:
    """The vectors of a run's best checkpoint, of length 1: of all items, of the test queries, and of the positions of
    an epoch of training, with the encoder's dropout."""

    def __init__(self, run: Path) -> None:
        with torch.no_grad(), process_group("cpu", 60) as ranks:
            model = load_saved(run, ranks=ranks)
            loss = replace(model.config.model.loss, negatives=128, share="sequence")
            config = replace(
                model.config, model=replace(model.config.model, loss=loss), train=replace(model.config.train, seed=7)
            )
            dataset, tower = load_dataset(config.data.path), model.tower
            of_run = held_out(config, dataset)
            users = ranking_users(dataset, "test", config.model.encoder.max_length, of_run)
            embedder = Embedder(
                tower, model.sharded_rows(ranks), columns_of(dataset, tower.schema, of_run.trained(dataset))
            )
            item_XD = embedder.items(np.arange(dataset.num_items)).vector_RD
            self.item_XD = F.normalize(item_XD)
            self.test_UD = torch.cat([F.normalize(embedder.queries(part).vector_RD) for part in users.batches(64)])
            batches = training_batches(config, dataset, ranks)
            self.steps: list[tuple[Tensor, Batch]] = []
            for step in range(batches.steps_per_epoch):
                batch = batches.at(step)
                query = tower.query_tower(item_XD[batch.id_V][batch.input_T], batch.packing, noise=batch.noise)
                self.steps.append((F.normalize(query.vector_RD), batch))
        user_S = np.repeat(np.arange(len(users)), users.seen_lengths)
        self.left_out = torch.from_numpy(user_S), torch.from_numpy(users.seen)
        self.target_U1 = torch.from_numpy(users.target)[:, None]


def train_head(head: Similarity, item_XD: Tensor, steps: list[tuple[Tensor, Batch]]) -> None:
    """Adam with a rate that falls linearly from 0.001."""
    optimizer = torch.optim.Adam(head.parameters(), lr=0.001, betas=(0.9, 0.98))
    for step, (query_TD, batch) in enumerate(steps):
        optimizer.param_groups[0]["lr"] = 0.001 * (1 - step / len(steps))
        row_T = batch.packing.row_T
        examples = Examples(row_T, batch.target_T, batch.bounds, batch.negatives_GN)
        query, item = head.query(query_TD, row_T, batch.noise), head.item(item_XD[batch.id_V], batch.id_V, batch.noise)
        loss = head.sampled_softmax(query, item, examples, batch.noise) / len(query_TD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def show(rows: dict[str, np.ndarray]) -> None:
    table, first_UM = Table("", *SHOWN), next(iter(rows.values()))
    for name, value_UM in rows.items():
        more_UM = value_UM - first_UM
        error_M = more_UM.std(0) / sqrt(len(more_UM))
        cells = zip(value_UM.mean(0), more_UM.mean(0), error_M, strict=True)
        table.add_row(
            name, *(f"{mean:.4f}" + (f" ({more:+.4f} ± {error:.4f})" if error else "") for mean, more, error in cells)
        )
    Console(width=180).print(table)


if __name__ == "__main__":
    main(tyro.cli(Options))
