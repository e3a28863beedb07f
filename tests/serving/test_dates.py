"""How old the items are at each request decides, exactly: of an export, and of items that update-items adds."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from math import cos, pi
from pathlib import Path

import numpy as np
import pytest
import torch
from asking import ranked_rows
from small_models import SmallModel, export_small, raw_ids

from logitmix.modules.config import DotConfig, HIndexerConfig, ModelConfig, SASRecConfig
from logitmix.modules.kinds.date import NO_DATE, PERIODS
from logitmix.modules.schema import ITEM, ITEM_FEATURE, Feature, Schema, Table
from logitmix.modules.towers import Tower
from logitmix.serving.request import Request
from logitmix.serving.retriever import Retriever
from logitmix.trainer import cli
from logitmix.trainer.data.columns import Column

X, D = 30, 2 * len(PERIODS)
DAY = 86_400
DATES = np.where(np.arange(X) % 10 == 9, np.float32(NO_DATE), 19_000 + 3 * np.arange(X, dtype=np.float32))


def of_age(days: float) -> float:
    """What the model below adds for an item of that age."""
    return sum(cos(2 * pi * days / period) / (1 + k) for k, period in enumerate(PERIODS)) / len(PERIODS)


@pytest.fixture(scope="module", params=[True, False], ids=["cached", "computed"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows nothing but ages: all weights are zero but those of dates and times."""
    released = Feature("released", "item", "date", unit="ms")
    schema = Schema((ITEM_FEATURE, released), (Table(ITEM, X + 1),))
    config = ModelConfig(
        dim=D,
        encoder=SASRecConfig(blocks=1, heads=1, max_length=5),
        similarity=DotConfig(normalize=False, temperature=1.0),
        hindexer=HIndexerConfig(weight=0.0),
    )
    tower = Tower(config, schema)
    with torch.no_grad():
        for weight in tower.parameters():
            weight.zero_()
        assert isinstance(tower.query_tower.time, torch.nn.Linear)
        weight_K = 1 / (1 + torch.arange(len(PERIODS)))
        tower.query_tower.time.weight.copy_(torch.diag(torch.cat([weight_K, weight_K])))
        tower.item_tower.features.maps[0].weight.copy_(torch.eye(D))
    model = SmallModel(config, torch.zeros(X, D), tower.eval(), features={"released": Column(DATES)})
    return export_small(model, tmp_path_factory.mktemp("dates") / "served", item_cache=request.param)


def test_scores_are_those_of_the_age_at_each_request(served: Path) -> None:
    retriever, names = Retriever.load(served), raw_ids(X)
    requests: list[Request] = [
        {"history": names[:2], "timestamps": [0, 5 * DAY * 1000], "time": 19_001 * DAY * 1000},
        {"history": names[:1], "time": 19_050 * DAY * 1000 + 7_200_000},
        {"history": names[3:5], "timestamps": [0, 19_060 * DAY * 1000]},
        {"history": names[:1]},
    ]
    found = ranked_rows(retriever.recommend(requests, X, exclude_history=False))
    for rows, now in zip(found, (19_001, 19_050 + 1 / 12, 19_060, None), strict=True):
        expected = [0.0 if now is None or date == NO_DATE else of_age(now - float(date)) for date in DATES]
        assert [{row["id"]: row["score"] for row in rows}[name] for name in names] == pytest.approx(expected, abs=2e-6)
        assert now is None or rows[0]["id"] == names[int(np.argmax(expected))]
    assert len({rows[0]["id"] for rows in found}) == 4


def test_items_are_added_with_dates_in_any_form(served: Path, tmp_path: Path, refusal: Callable[..., str]) -> None:
    export, table, old = tmp_path / "export", tmp_path / "new.csv", raw_ids(X)[4]
    shutil.copytree(served, export)
    table.write_text(f"item,released\na,2022-03-01\nb,\nc,31.03.2022\n{old},2022-03-20\n")
    cli.main(["update-items", str(export), "--items", str(table)])
    asked: Request = {"history": [old], "time": 19_085 * DAY * 1000}
    (rows,) = ranked_rows(Retriever.load(export).recommend([asked], X + 3, exclude_history=False))
    score = {row["id"]: row["score"] for row in rows}
    # Days 19,052, none, 19,082 and 19,071.
    expected = [of_age(33), 0.0, of_age(3), of_age(14)]
    assert [score[name] for name in ("a", "b", "c", old)] == pytest.approx(expected, abs=2e-6)
    manifest = (export / "manifest.json").read_bytes()
    for dates, problem in (("soon", "'soon', which is no date"), ("01/02/2022", "which of the first two numbers")):
        table.write_text(f"item,released\na,{dates}\n")
        said = refusal("update-items", str(export), "--items", str(table))
        assert problem in said and "released" in said and (export / "manifest.json").read_bytes() == manifest


def test_a_user_without_a_history_is_asked_at_the_time(tmp_path: Path) -> None:
    country = Feature("country", "user", "id", "country")
    schema = Schema((ITEM_FEATURE, Feature("released", "item", "date", unit="s"), country),
                    (Table(ITEM, X + 1), Table("country", 2)))  # fmt: skip
    tower = Tower(replace(ModelConfig(dim=8), hindexer=HIndexerConfig(weight=0.0)), schema).eval()
    tower.reset_parameters(torch.Generator().manual_seed(0))
    model = SmallModel(
        tower.config, torch.randn(X, 8), tower, {"country": torch.randn(2, 8)}, {"released": Column(DATES)}
    )
    retriever = Retriever.load(export_small(model, tmp_path / "served"))
    at = [
        ranked_rows(retriever.recommend([{"user": {}, "time": time * DAY}], X))[0] for time in (19_000, 19_000, 19_050)
    ]
    assert at[0] == at[1] != at[2]
