"""Leave-one-out ranking of the whole corpus.

Axes: B users, X items in the corpus, D encoder width.

Every user's rank is computed by one rank, in batches that do not depend on how many ranks there are, so the figures
do not either.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from logitmix.comm.collectives import all_reduce_sum
from logitmix.comm.process_group import Ranks, process_group
from logitmix.modules.batch import Packing
from logitmix.modules.similarity.base import Side, Similarity
from logitmix.modules.towers import Tower
from logitmix.trainer.checkpoint import load_offline
from logitmix.trainer.config import EvaluateConfig
from logitmix.trainer.data.batches import RankingUsers, ranking_users
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.run import read_config, require_same_dataset
from logitmix.trainer.telemetry import counting

HIT_RATES = (1, 10, 50, 100, 200, 500)
ITEMS = 2**13
"""Items projected at once."""
PAIRS = 2**14
"""Query-item pairs scored at once: MoL keeps a few hundred numbers for each."""


def evaluate_run(
    run: Path,
    split: Literal["validation", "test"],
    exclude_history: bool | None,
    device: Literal["auto", "cpu", "cuda"],
    threads: int,
    show_progress: bool,
) -> dict[str, float]:
    """Metrics of the best checkpoint of a run, alone or under torchrun; the same figures for any number of ranks."""
    torch.set_num_threads(threads)
    config = read_config(run)
    options = config.evaluate
    exclude = options.exclude_history if exclude_history is None else exclude_history
    dataset = load_dataset(config.data.path)
    require_same_dataset(run, dataset)
    users = ranking_users(dataset, split, config.model.encoder.max_length)
    group = process_group(device, config.comm.timeout_seconds)
    with group as ranks, counting(split, len(users), show_progress) as advance:
        model = load_offline(run, ranks=ranks)
        metrics = evaluate(model.tower.to(ranks.device), model.item_XD, users, options, exclude, ranks, advance)
    return metrics | {"step": model.step}


def evaluate(
    tower: Tower,
    item_XD: Tensor,
    users: RankingUsers,
    options: EvaluateConfig,
    exclude_history: bool,
    ranks: Ranks,
    advance: Callable[[int], None] = lambda users: None,
) -> dict[str, float]:
    """HR@k, NDCG@10 and MRR over all users; collective, and equal on all ranks."""
    device = ranks.device
    item_XD = item_XD.to(device)
    rank_of = torch.zeros(len(users), dtype=torch.int64)
    with torch.no_grad():
        item = corpus_side(tower.similarity, item_XD)
        for index, part in enumerate(users.batches(options.batch_size)):
            if index % ranks.world_size == ranks.rank:
                start = index * options.batch_size
                packing = Packing(torch.from_numpy(part.lengths)).to(device)
                history_T = torch.from_numpy(part.history).to(device)
                query_BD = tower.queries(item_XD[history_T], packing)
                query = tower.similarity.query(query_BD, packing.last_B)
                score_BX = score_corpus(tower.similarity, query, item)
                excluded = history_T if exclude_history else history_T[:0]
                lengths = packing.lengths_B if exclude_history else torch.zeros_like(packing.lengths_B)
                target_B = torch.from_numpy(part.target).to(device)
                rank_of[start : start + len(part)] = target_ranks(
                    score_BX, target_B, excluded, lengths.to(device)
                ).cpu()
            advance(len(part))
    return summarise(all_reduce_sum(rank_of, ranks).numpy(), len(item_XD))


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


def target_ranks(score_BX: Tensor, target_B: Tensor, history_T: Tensor, lengths_B: Tensor) -> Tensor:
    """Rank of each user's target among the items not in the user's history, from 1 (int64 [B]).

    Ties count against the model, and so does NaN: whatever is not below the target stands above it.
    """
    row_B = torch.arange(len(target_B), device=score_BX.device)
    above_BX = ~(score_BX < score_BX[row_B, target_B][:, None])
    above_BX[torch.repeat_interleave(row_B, lengths_B), history_T] = False
    above_BX[row_B, target_B] = False
    return above_BX.sum(1) + 1


def summarise(rank_of: np.ndarray, corpus: int) -> dict[str, float]:
    """Metrics of the users' ranks, with the numbers of users and items that they were taken over."""
    metrics: dict[str, float] = {f"hr@{k}": float(np.mean(rank_of <= k)) for k in HIT_RATES}
    metrics["ndcg@10"] = float(np.mean(np.where(rank_of <= 10, 1 / np.log2(rank_of + 1.0), 0.0)))
    metrics["mrr"] = float(np.mean(1 / rank_of))
    return metrics | {"users": len(rank_of), "corpus": corpus}
