"""Several targets of a user: against a loop over the users, torchmetrics, and the ranking itself."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from small_data import in_memory

from logitmix.comm.process_group import process_group
from logitmix.modules.config import ModelConfig, SASRecConfig
from logitmix.modules.schema import ITEM, Schema
from logitmix.modules.towers import Tower
from logitmix.trainer.config import Config, DataConfig, EvaluateConfig
from logitmix.trainer.data import limited
from logitmix.trainer.data.lookups import columns_of
from logitmix.trainer.evaluation.embed import Embedder
from logitmix.trainer.evaluation.evaluate import Evaluation
from logitmix.trainer.parallel.sharded_rows import ShardedRows

ITEMS = 120


@pytest.mark.parametrize("targets", [(), ("event = 1",)])
@pytest.mark.parametrize("exclude", ["yes", "no"])
def test_the_targets_of_a_period_are_all_that_a_user_does_in_it(
    targets: tuple[str, ...], exclude: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """30 users with 20 actions each at equal times, the last four of them in the test part; of even places are targets
    where these are conditioned."""
    random = np.random.default_rng(1)
    dataset = in_memory(np.arange(0, 601, 20), random.integers(0, ITEMS, 600), ITEMS)
    dataset = replace(dataset, timestamps_flat=np.tile(np.arange(20), 30))
    places = np.arange(0, 600, 2) if targets else None
    monkeypatch.setattr(limited, "target_places", lambda *_: places)
    model = ModelConfig(dim=8, encoder=SASRecConfig(blocks=1, max_length=6))
    tower = Tower(model, Schema.of_ids(ITEMS))
    tower.reset_parameters(torch.Generator().manual_seed(0))
    data = DataConfig(split="time", held_out=0.2, targets=targets)
    config = Config(data=data, model=model, evaluate=EvaluateConfig(exclude_history=exclude))  # type: ignore[arg-type]
    item_XD = torch.randn(ITEMS, 8, generator=torch.Generator().manual_seed(1))
    with process_group("cpu", 60) as ranks:
        tables = {ITEM: ShardedRows.of_ranges(ITEMS, item_XD, ranks)}
        evaluation = Evaluation(config.evaluate, config.data, config.model, dataset, ranks)
        found = evaluation("test", tower, tables)
        users = evaluation.users("test")
        embedder = Embedder(tower, tables, columns_of(dataset, tower.schema))
        with torch.no_grad():
            queries = tower.query_sides(embedder.queries(users)).similarity
            items = tower.item_sides(embedder.items(np.arange(ITEMS))).similarity
            score_UX = tower.similarity.all_pairs(queries, items).numpy()
        alone = []
        for user, first, scores in zip(users.user, users.place, score_UX, strict=True):
            own = [at for at in range(first, (user + 1) * 20) if places is None or at % 2 == 0]
            wanted = {int(dataset.items_flat[at]) for at in own}
            seen = set(dataset.items_flat[user * 20 : first].tolist()) if exclude == "yes" else set()
            order = [item for item in np.argsort(-scores, kind="stable") if item not in seen]
            alone.append([[item in wanted for item in order[:100]], len(wanted)])
    recall, ndcg, precision = [], [], []
    for hits, count in alone:
        gains = [1 / np.log2(at + 2) for at, hit in enumerate(hits[:10]) if hit]
        recall.append(sum(hits[:10]) / count)
        ndcg.append(sum(gains) / sum(1 / np.log2(at + 2) for at in range(min(10, count))))
        at_hits = [sum(hits[: at + 1]) / (at + 1) for at, hit in enumerate(hits[:10]) if hit]
        precision.append(np.mean(at_hits or [0]))
    assert found["period/recall@10"] == pytest.approx(np.mean(recall))
    assert found["period/ndcg@10"] == pytest.approx(np.mean(ndcg))
    assert found["period/map@10"] == pytest.approx(np.mean(precision))
    assert found["period/recall@100"] == pytest.approx(np.mean([sum(hits) / count for hits, count in alone]))
    assert found["period/targets"] == np.mean([count for _, count in alone]) > (1.5 if targets else 3)
