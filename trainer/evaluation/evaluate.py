"""Ranking of the whole corpus for held-out actions: who is ranked, by which rule, and what is reported.

Axes: U users, K items at the top, X items in the corpus.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console

from logitmix.comm.collectives import on_first_rank_at_length
from logitmix.comm.process_group import Ranks, process_group
from logitmix.common.messages import tell
from logitmix.launch.processes import end_lost, require_threads
from logitmix.modules.config import ModelConfig, sees_times
from logitmix.modules.schema import WANTED, Owner, Schema, require_kind
from logitmix.modules.towers import Tower
from logitmix.trainer.config import DataConfig, EvaluateConfig, HistoryRule
from logitmix.trainer.data.batches import RankingUsers, Split, ranking_users
from logitmix.trainer.data.columns import Column, ranges
from logitmix.trainer.data.dataset import Dataset, load_dataset
from logitmix.trainer.data.limited import asked_places, held_out, limited, said_of_limit, within
from logitmix.trainer.data.lookups import Ints, columns_of
from logitmix.trainer.data.repeats import are_common, highest_hit_rates, said_of_repeats
from logitmix.trainer.evaluation.baselines import (
    MOST_ITEMS,
    MOST_SCORES,
    ItemKNN,
    Score,
    popularity,
    rank_targets,
    target_counts,
)
from logitmix.trainer.evaluation.by_group import features_of, means_by_group
from logitmix.trainer.evaluation.embed import Embedder
from logitmix.trainer.evaluation.ranking import Rankings, rank_corpus
from logitmix.trainer.metrics import NOT_SERVED, SETS_AT, means, means_of_sets
from logitmix.trainer.parallel.sharded_rows import ShardedRows
from logitmix.trainer.progress import counting
from logitmix.trainer.run.agreement import facts_of
from logitmix.trainer.run.checkpoint import load_saved
from logitmix.trainer.run.folder import read_config, require_same_dataset, said_of_code
from logitmix.trainer.run.stages import chosen_run, final_run

SAMPLE = 0
"""The seed of samples of users: one for all runs, which are compared by the same users."""
RECOMMENDED = 10
"""Items at the top of a user's ranking that count as recommended."""
RECALL_OF = (10, 100)
"""Numbers of the similarity's best items that are looked up among those that the h-indexer keeps."""
RECALL_AT = (100, 500, 1000, 5000, 10_000, 50_000, 100_000)
"""How many items the h-indexer keeps, the paper's k'."""


def evaluate_run(
    run: Path, split: Split, device: Literal["auto", "cpu", "cuda"], threads: int, **settings: Any
) -> dict[str, float]:
    """Returns metrics of the best checkpoint of a run, alone or under torchrun; the same figures for any number of
    ranks. They are of the run that was trained first if that is better, and on the test part of the refit if there is
    one. `settings` that are not None replace the run's of its section evaluate.
    """
    require_threads("threads", threads)
    torch.set_num_threads(threads)
    run = final_run(run) if split == "test" else chosen_run(run)
    config = read_config(run)
    if split == "validation" and not config.data.validation:
        raise ValueError(f"{run} was trained on the validation actions; give --split test, or the run that chose them")
    options = replace(config.evaluate, **{name: value for name, value in settings.items() if value is not None})
    dataset = load_dataset(config.data.path)
    require_same_dataset(run, dataset)
    config = replace(config, evaluate=options)
    facts = facts_of("evaluate", config, dataset, split=split)
    with process_group(device, config.comm.timeout_seconds, facts, end_lost) as ranks:
        evaluation = Evaluation(options, config.data, config.model, limited(config.data, dataset), ranks)
        if line := said_of_code(run):
            tell(evaluation.said, line)
        if line := said_of_limit(config.data, evaluation.dataset):
            tell(evaluation.said, f"items: {line}")
        model = load_saved(run, ranks=ranks)
        metrics = evaluation(split, model.tower.to(ranks.device), model.sharded_rows(ranks))
        metrics |= evaluation.baselines(split)
    return metrics | {"step": model.step}


def excludes_history(rule: HistoryRule, config: DataConfig, dataset: Dataset, said: Console | None = None) -> bool:
    """Returns whether a user's history is left out of that user's ranking, in evaluation and in serving.

    Args:
        rule: evaluate.exclude_history.
        config: Says which actions are held out.
        dataset: The run's dataset.
        said: Where the reason is printed, if anywhere.
    """
    if rule == "no":
        return False
    # As without a limit.
    dataset = dataset.whole or dataset
    shares = dataset.repeated_targets
    if config.split == "time" or config.targets or config.negatives:
        # A refit must come to the decision of its run, which has a validation part.
        of = held_out(replace(config, validation=config.validation or rule == "auto"), dataset)
        shares = {split: float(ranking_users(dataset, split, 1, of).repeats().mean()) for split in of.targets}
    repeats = said_of_repeats(shares)
    if rule == "auto" and are_common(shares):
        line = "it is not left out of the ranking (--evaluate.exclude-history yes would)"
        tell(said, f"{repeats} are in their user's history: {line}")
        return False
    if limits := highest_hit_rates(shares):
        line = f"which is left out of the ranking: {limits} (--evaluate.exclude-history no would keep it)"
        tell(said, f"{repeats} are in their user's history, {line}")
    return True


class Evaluation:
    """Ranks the corpus for the users of a dataset, as a run is configured. Of a limited dataset, the items of that are
    ranked, for the users of the whole one: those whose target has no place there are missed. Counts and shares are
    those of the whole."""

    def __init__(
        self,
        options: EvaluateConfig,
        data: DataConfig,
        model: ModelConfig,
        dataset: Dataset,
        ranks: Ranks,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`check` is called by all ranks together, often; what it raises ends the ranking. ValueError for groups that
        cannot be formed."""
        self.options, self.model, self.dataset, self.ranks, self.check = options, model, dataset, ranks, check
        self.by_time = data.split == "time"
        self.whole = dataset.whole or dataset
        self.groups = features_of(options.groups, dataset)
        self._wanted = _wanted_row(options.want, model.wanted, dataset) if options.want else None
        self.said = Console(stderr=True) if ranks.rank == 0 else None
        self._of_whole = held_out(data, self.whole)
        self.held_out = within(self._of_whole, dataset)
        self.exclude_history = excludes_history(options.exclude_history, data, dataset, self.said)

    def __call__(self, split: Split, tower: Tower, tables: Mapping[str, ShardedRows]) -> dict[str, float]:
        """The metrics of a split; collective, and equal on all ranks."""
        return self.with_ranks(split, tower, tables)[0]

    def with_ranks(
        self, split: Split, tower: Tower, tables: Mapping[str, ShardedRows]
    ) -> tuple[dict[str, float], np.ndarray]:
        """The metrics of both stages over all users, and the share of them whose target is in their history; on the
        test part also the share of targets without a training action, how popular the best 10 are and, as
        at_last_action/hr@10, what a model that sees times has if the query is asked at the time of the last action, not
        of the target. Beside them the rank of each user's target [U]. Collective, and equal on all ranks."""
        everyone, num_items = self.users(split), self.dataset.num_items
        missed_U = self.held_out.targets[split][everyone.user] < 0
        best = max(SETS_AT) if self.by_time else RECOMMENDED
        best = best if split == "test" else 0
        at_N, users = self._ranked(everyone, split, best > 0)
        again = split == "test" and sees_times(tower.config.encoder, tower.schema)
        with counting(split, len(users) * (1 + again), self.ranks.rank == 0) as count:

            def advance(more: int) -> None:
                self.check()
                count(more)

            columns = self._columns(tower.schema, users)
            batch_size = self.options.batch_size
            embedder = Embedder(tower, tables, columns)
            rank = partial(rank_corpus, embedder, num_items)
            rankings = rank(users, batch_size, self.exclude_history, advance, best).among(at_N, missed_U)
            earlier = None
            if again:
                found = rank(replace(users, at_last_action=True), batch_size, self.exclude_history, advance)
                earlier = found.among(at_N, missed_U)
        metrics = metrics_of(rankings, num_items)
        metrics |= {"users": len(everyone), "corpus": num_items, "repeated_targets": float(everyone.repeats().mean())}
        if self.dataset.whole:
            metrics["targets/left_out"] = float(missed_U.mean())
        if rankings.best_UK is not None:
            metrics["targets/cold"] = self.cold_targets(split)
            best_UK = rankings.best_UK.numpy()
            if self.dataset.kept is not None:
                best_UK = np.where(best_UK >= 0, self.dataset.kept[best_UK], best_UK)
            metrics |= how_popular(best_UK[:, :RECOMMENDED], everyone.target, self.training_counts)
            if self.by_time:
                metrics |= self._of_period(best_UK, everyone)
        if earlier is not None:
            metrics |= {f"at_last_action/{name}": of for name, of in means(earlier.similarity_U.numpy()).items()}
        rank_U = rankings.similarity_U.numpy()
        return metrics | self._by_group(rank_U, everyone), rank_U

    def _ranked(self, everyone: RankingUsers, split: Split, missed: bool = False) -> tuple[Ints, RankingUsers]:
        """Those whose target has a place in the dataset, or also the `missed` ones, if they have a history there: where
        they are among these, and they in the dataset."""
        dataset, place_U = self.dataset, self.held_out.targets[split]
        asked_U = None
        if dataset.whole and missed:
            place_U = asked_places(self._of_whole.targets[split], dataset)
            asked_U = everyone.timestamps[everyone.place].astype(np.int64)
        at_N = np.flatnonzero(place_U[everyone.user] >= 0)
        user_N = everyone.user[at_N]
        return at_N, replace(
            everyone,
            items=dataset.items_flat,
            timestamps=dataset.timestamps_flat,
            user=user_N,
            first=dataset.offsets[user_N],
            place=place_U[user_N],
            asked_U=None if asked_U is None else asked_U[at_N],
        )

    def ranks_by(self, score: Score, everyone: RankingUsers, split: Split) -> Ints:
        """The ranks of the targets of some of the `users` of a split by another method's scores."""
        at_N, users = self._ranked(everyone, split)
        rank_U = np.full(len(everyone), NOT_SERVED)
        rank_U[at_N] = rank_targets(score, users, self.dataset.num_items, self.exclude_history)
        return rank_U

    def _columns(self, schema: Schema, users: RankingUsers) -> dict[Owner, Mapping[str, Column]]:
        """What the queries see; where evaluate.want names a kind of action, each asks for it."""
        columns = columns_of(self.dataset, schema, self.held_out.trained(self.dataset))
        if self._wanted is not None:
            name = WANTED + self.model.wanted
            values = columns["event"][name].values.copy()
            values[users.place - 1] = self._wanted
            columns["event"] = {**columns["event"], name: Column(values)}
        return columns

    def _of_period(self, best_UK: np.ndarray, users: RankingUsers) -> dict[str, float]:
        """As period/recall@10, the metrics of all different targets of each user in the test part, given what came
        before the first of them; as period/targets their mean number."""
        end_U, X = self.whole.offsets[users.user + 1], self.whole.num_items
        place_T, row_T = ranges(users.place, end_U - users.place), np.repeat(np.arange(len(users)), end_U - users.place)
        if self._of_whole.places is not None:
            may_T = np.isin(place_T, self._of_whole.places)
            place_T, row_T = place_T[may_T], row_T[may_T]
        pair_P = np.unique(row_T * X + self.whole.items_flat[place_T])
        count_U = np.bincount(pair_P // X, minlength=len(users))
        hit_UK = (best_UK >= 0) & np.isin(np.arange(len(users))[:, None] * X + best_UK, pair_P)
        found = means_of_sets(hit_UK, count_U) | {"targets": float(count_U.mean())}
        return {f"period/{name}": value for name, value in found.items()}

    def _by_group(self, rank_U: np.ndarray, users: RankingUsers) -> dict[str, float]:
        if not self.groups:
            return {}
        return means_by_group(self.groups, rank_U, users, self.whole, self._of_whole, self.training_counts)

    @cached_property
    def training_counts(self) -> np.ndarray:
        """How many training actions each item has [X]."""
        return self._of_whole.training_counts(self.whole)

    def baselines(self, split: Split) -> dict[str, float]:
        """The metrics of popularity and item-kNN for the same users and by the same rules, as popularity/hr@10 and
        item_knn/hr@10; none where evaluate.baselines is off. Rank 0 computes them for all; collective."""
        if not self.options.baselines:
            return {}
        return on_first_rank_at_length(lambda: self._baselines(split), self.ranks)

    def _baselines(self, split: Split) -> dict[str, float]:
        everyone, num_items = self.users(split), self.dataset.num_items
        users = everyone.sample(max(1, MOST_SCORES // num_items), SAMPLE)
        if len(users) < len(everyone):
            tell(self.said, f"the baselines are ranked for {len(users):,} of {len(everyone):,} users, a sample")
        scores: dict[str, Score] = {"popularity": popularity(target_counts(self.dataset, self.held_out))}
        if num_items > MOST_ITEMS:
            tell(self.said, f"item-kNN is left out: the corpus has more than {MOST_ITEMS:,} items")
        else:
            item_knn = ItemKNN.fit(self.dataset, self.held_out)
            if item_knn.users < item_knn.of_users:
                tell(self.said, f"item-kNN counts {item_knn.users:,} of {item_knn.of_users:,} users, a sample")
            scores["item_knn"] = item_knn
        found = dict[str, float]()
        for name, score in scores.items():
            rank_U = self.ranks_by(score, users, split)
            found |= {f"{name}/{of}": mean for of, mean in (means(rank_U) | self._by_group(rank_U, users)).items()}
        return found

    def cold_targets(self, split: Split) -> float:
        """The share of the targets that are items without a training action."""
        return float((self.training_counts[self.users(split).target] == 0).mean())

    def raw_users(self, split: Split) -> list[str]:
        """The raw ids of those that are ranked, in their order."""
        return self.dataset.raw_user_ids(self.users(split).user)

    def users(self, split: Split) -> RankingUsers:
        """Who is ranked."""
        everyone = ranking_users(self.whole, split, self.model.encoder.max_length, self._of_whole)
        return everyone.sample(self.options.users, SAMPLE)


def _wanted_row(want: str, wanted: str, dataset: Dataset) -> int:
    """Returns the row of the kind of action `want` (evaluate.want), a value of the feature `wanted` (model.wanted).
    ValueError if the dataset has none of it."""
    feature = next(of for of in dataset.schema.of("event") if of.name == wanted)
    kinds = dataset.vocabulary(feature.table)
    require_kind("evaluate.want", want, [kind for kind in kinds if kind])
    return kinds.index(want)


def how_popular(best_UK: np.ndarray, target_U: np.ndarray, count_X: np.ndarray) -> dict[str, float]:
    """The share of the corpus that is among anybody's best items (-1 is none), and the shares of the best items and of
    the targets that are among the most popular 1 and 10 % of the corpus, by counts of training actions. Empty if nobody
    has a best item, because each history has the whole corpus and is left out of its ranking."""
    items, X = best_UK[best_UK >= 0], len(count_X)
    if not len(items):
        return {}
    place_X = np.empty(X, np.int64)
    place_X[np.argsort(-count_X, kind="stable")] = np.arange(X)
    found = {f"recommended/coverage@{RECOMMENDED}": len(np.unique(items)) / X}
    for percent, (name, of) in itertools.product((1, 10), (("recommended", items), ("targets", target_U))):
        found[f"{name}/top_{percent}_percent"] = float(np.mean(place_X[of] < max(1, X * percent // 100)))
    return found


def metrics_of(rankings: Rankings, num_items: int) -> dict[str, float]:
    """All METRICS. With an h-indexer also its own, and the share of the similarity's best 10 and 100 items that it
    leaves among its own best k', for some k' below the corpus."""
    metrics = means(rankings.similarity_U.numpy())
    if rankings.hindexer_U is None or rankings.stage1_UK is None:
        return metrics
    metrics |= {f"hindexer/{name}": mean for name, mean in means(rankings.hindexer_U.numpy()).items()}
    for top, kept in itertools.product(RECALL_OF, RECALL_AT):
        if kept < num_items:
            best_UK = rankings.stage1_UK[:, :top]
            found, there = int((best_UK <= kept).sum()), int((best_UK < NOT_SERVED).sum())
            metrics[f"hindexer/recall_of_top{top}@{kept}"] = found / max(1, there)
    return metrics
