"""Leave-one-out ranking of the whole corpus.

Axes: B users, X items in the corpus, D encoder width.

Every user's rank is computed by one rank, in batches that do not depend on how many ranks there are, so the figures
do not either.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from logitmix.comm.collectives import all_reduce_sum
from logitmix.comm.process_group import Ranks, process_group
from logitmix.modules.batch import Packing
from logitmix.modules.similarity.base import Side, Similarity
from logitmix.modules.towers import Tower
from logitmix.trainer.checkpoint import load_offline
from logitmix.trainer.config import Config, HistoryRule
from logitmix.trainer.data.batches import RankingUsers, Split, ranking_users
from logitmix.trainer.data.dataset import COMMON_REPEATS, Dataset, load_dataset
from logitmix.trainer.run import read_config, require_same_dataset
from logitmix.trainer.telemetry import counting

HIT_RATES = (1, 10, 50, 100, 200, 500)
ITEMS = 2**13
"""Items projected at once."""
NOT_SERVED = torch.iinfo(torch.int64).max
"""Rank of a target that is excluded: it stands below every item."""
PAIRS = 2**14
"""Query-item pairs scored at once: MoL keeps a few hundred numbers for each."""


def evaluate_run(
    run: Path,
    split: Split,
    exclude_history: HistoryRule | None,
    users: int | None,
    device: Literal["auto", "cpu", "cuda"],
    threads: int,
) -> dict[str, float]:
    """Metrics of the best checkpoint of a run, alone or under torchrun; the same figures for any number of ranks.

    `exclude_history` and `users` stand in for the run's settings of these names.
    """
    torch.set_num_threads(threads)
    config = read_config(run)
    given: dict[str, Any] = {"exclude_history": exclude_history, "users": users}
    options = replace(config.evaluate, **{name: value for name, value in given.items() if value is not None})
    dataset = load_dataset(config.data.path)
    require_same_dataset(run, dataset)
    with process_group(device, config.comm.timeout_seconds) as ranks:
        evaluation = Evaluation(replace(config, evaluate=options), dataset, ranks)
        model = load_offline(run, ranks=ranks)
        metrics = evaluation(split, model.tower.to(ranks.device), model.item_XD)
    return metrics | {"step": model.step}


def excludes_history(rule: HistoryRule, dataset: Dataset, said: Console | None = None) -> bool:
    """Whether a user's history is left out of what is ranked for that user, in evaluation and in serving alike."""
    if rule != "auto":
        return rule == "yes"
    share = dataset.repeated_targets["validation"]
    if share < COMMON_REPEATS:
        return True
    if said:
        said.print(
            f"{share:.0%} of the validation targets are in their user's history: it is not left out of the ranking "
            "(--evaluate.exclude-history yes would)",
            highlight=False,
            soft_wrap=True,
        )
    return False


class Evaluation:
    """Ranks the corpus for the users of a dataset, as a run is configured."""

    def __init__(self, config: Config, dataset: Dataset, ranks: Ranks) -> None:
        self.config, self.dataset, self.ranks = config, dataset, ranks
        said = Console(stderr=True) if ranks.rank == 0 else None
        self.exclude_history = excludes_history(config.evaluate.exclude_history, dataset, said)

    def __call__(self, split: Split, tower: Tower, item_XD: Tensor) -> dict[str, float]:
        """The metrics of a split; collective, and equal on all ranks."""
        options, L = self.config.evaluate, self.config.model.encoder.max_length
        users = ranking_users(self.dataset, split, L).sample(options.users, self.config.train.seed)
        with counting(split, len(users), self.ranks.rank == 0) as advance:
            return evaluate(tower, item_XD, users, options.batch_size, self.exclude_history, self.ranks, advance)


def evaluate(
    tower: Tower,
    item_XD: Tensor,
    users: RankingUsers,
    batch_size: int,
    exclude_history: bool,
    ranks: Ranks,
    advance: Callable[[int], None] = lambda users: None,
) -> dict[str, float]:
    """HR@k, NDCG@10 and MRR over all users, and the share of them whose target is in their history; collective, and
    equal on all ranks."""
    rank_of = target_ranks(tower, item_XD, users, batch_size, exclude_history, ranks, advance)
    return summarize(rank_of.numpy(), len(item_XD)) | {"repeated_targets": users.repeated()}


@torch.no_grad()
def target_ranks(
    tower: Tower,
    item_XD: Tensor,
    users: RankingUsers,
    batch_size: int,
    exclude_history: bool,
    ranks: Ranks,
    advance: Callable[[int], None] = lambda users: None,
) -> Tensor:
    """Rank of each user's target in the corpus, from 1 (int64 [U]), NOT_SERVED where the target is excluded."""
    device = ranks.device
    item_XD = item_XD.to(device)
    rank_of = torch.zeros(len(users), dtype=torch.int64)
    item = corpus_side(tower.similarity, item_XD)
    for index, part in enumerate(users.batches(batch_size)):
        if index % ranks.world_size == ranks.rank:
            start = index * batch_size
            packing = Packing(torch.from_numpy(part.lengths)).to(device)
            query_BD = tower.queries(item_XD[torch.from_numpy(part.history).to(device)], packing)
            query = tower.similarity.query(query_BD, packing.last_B)
            score_BX = score_corpus(tower.similarity, query, item)
            excluded = part.seen if exclude_history else part.seen[:0]
            lengths = part.seen_lengths if exclude_history else np.zeros_like(part.seen_lengths)
            tensors = (torch.from_numpy(array).to(device) for array in (part.target, excluded, lengths))
            rank_of[start : start + len(part)] = rank_targets(score_BX, *tensors).cpu()
        advance(len(part))
    return all_reduce_sum(rank_of, ranks)


def corpus_side(similarity: Similarity, item_XD: Tensor) -> Side:
    """The item's side of the similarity for all X items, made in chunks: projections are wider than what they make."""
    row_X = torch.arange(len(item_XD), device=item_XD.device)
    chunks = zip(item_XD.split(ITEMS), row_X.split(ITEMS), strict=True)
    parts = [similarity.item(item_ND, row_N) for item_ND, row_N in chunks]
    return tuple(torch.cat(side) for side in zip(*parts, strict=True))


def score_corpus(similarity: Similarity, query: Side, item: Side) -> Tensor:
    """phi(x, u) of B queries with all X items, FP32 [B, X], in chunks of items."""
    chunk = max(1, PAIRS // max(1, len(query[0])))
    count = len(item[0])
    parts = [
        similarity.all_pairs(query, tuple(side[start : start + chunk] for side in item))
        for start in range(0, count, chunk)
    ]
    return torch.cat(parts, dim=1)


def rank_targets(score_BX: Tensor, target_B: Tensor, excluded_T: Tensor, lengths_B: Tensor) -> Tensor:
    """Rank of each user's target among the items that are not excluded, from 1 (int64 [B]); NOT_SERVED where the target
    is excluded itself.

    Ties count against the model, and so does NaN: whatever is not below the target stands above it.
    """
    row_B = torch.arange(len(target_B), device=score_BX.device)
    row_T = torch.repeat_interleave(row_B, lengths_B)
    above_BX = ~(score_BX < score_BX[row_B, target_B][:, None])
    above_BX[row_B, target_B] = False
    above_BX[row_T, excluded_T] = False
    rank_B = above_BX.sum(1) + 1
    rank_B[row_T[excluded_T == target_B[row_T]]] = NOT_SERVED
    return rank_B


def summarize(rank_of: np.ndarray, corpus: int) -> dict[str, float]:
    """Metrics of the users' ranks, with the numbers of users and items that they were taken over."""
    metrics: dict[str, float] = {f"hr@{k}": float(np.mean(rank_of <= k)) for k in HIT_RATES}
    metrics["ndcg@10"] = float(np.mean(np.where(rank_of <= 10, 1 / np.log2(rank_of + 1.0), 0.0)))
    metrics["mrr"] = float(np.mean(np.where(rank_of < NOT_SERVED, 1 / rank_of, 0.0)))
    return metrics | {"users": len(rank_of), "corpus": corpus}
