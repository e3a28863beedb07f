"""Runs with a limited number of items, against a search through all actions."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import two_ranks
from asking import ranked_rows
from small_data import forget_digests, in_memory, losses_of, small_config, trained_scores, write_dataset

from logitmix.comm.process_group import process_group
from logitmix.modules.schema import Feature
from logitmix.serving.retriever import Retriever
from logitmix.trainer.config import Config
from logitmix.trainer.data import arrays
from logitmix.trainer.data.batches import ranking_users
from logitmix.trainer.data.columns import Column
from logitmix.trainer.data.dataset import Dataset, load_dataset
from logitmix.trainer.data.limited import held_out, kept_items, limited
from logitmix.trainer.evaluation.evaluate import Evaluation, evaluate_run
from logitmix.trainer.export.export import export
from logitmix.trainer.loop import train
from logitmix.trainer.metrics import NOT_SERVED
from logitmix.trainer.run.checkpoint import load_saved
from logitmix.trainer.run.results import read_ranks, read_test_users

SPLITS = [{"data.split": "leave-one-out"}, {"data.split": "time"}, {"data.targets": ["action = type-1"]}]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Users who act at the same times."""
    path = forget_digests(write_dataset(tmp_path_factory.mktemp("limited") / "data", weighted=True))
    (file,) = (path / "sequences").glob("*.parquet")
    table, random = pq.read_table(file), np.random.default_rng(0)
    times = pa.array([sorted(random.integers(0, 10**6, len(of)).tolist()) for of in table["timestamps"]])
    pq.write_table(table.set_column(table.schema.get_field_index("timestamps"), "timestamps", times), file)
    return path


def actions_of(dataset: Dataset) -> list[tuple[Any, ...]]:
    """All actions: raw id, time and features."""
    ids = dataset.raw_ids()
    found = [[ids[item] for item in dataset.items_flat], dataset.timestamps_flat.tolist()]
    for column in (*dataset.event_features.values(), dataset.recency):
        bounds = np.arange(len(column.values) + 1) if column.offsets is None else column.offsets
        for values in (column.values, *column.parallel.values()):
            found.append([of.tolist() for of in np.split(values, bounds[1:-1])])
    return list(zip(*found, strict=True))


def order_of(config: Config, dataset: Dataset) -> list[tuple[int, int, int]]:
    """Of each item: its latest training action and their number, negated, and its index."""
    ends, order = held_out(config.data, dataset).train_end, []
    for item in range(dataset.num_items):
        times = [
            int(dataset.timestamps_flat[at])
            for user, end in enumerate(ends)
            for at in range(int(dataset.offsets[user]), int(end))
            if dataset.items_flat[at] == item
        ]
        order.append((-max(times, default=-1), -len(times), item))
    return order


@pytest.mark.parametrize("settings", SPLITS)
def test_the_latest_items_are_kept(data: Path, settings: dict[str, Any]) -> None:
    """Of equally late ones those with more actions; those that training never sees come last."""
    dataset = load_dataset(data)
    # Few times, so that many are equal.
    dataset = replace(dataset, timestamps_flat=dataset.timestamps_flat * 6 // dataset.timestamps_flat.max())
    order = order_of(small_config(data, settings), dataset)
    for count in (1, 7, 49):
        kept = kept_items(small_config(data, settings | {"data.items": count}).data, dataset)
        assert kept is not None and kept.tolist() == sorted(item for *_, item in sorted(order)[:count])
    for count in (0, 50, 51):
        config = small_config(data, settings | {"data.items": count})
        assert kept_items(config.data, dataset) is None and limited(config.data, dataset) is dataset


def test_items_with_few_training_actions_come_after_all_others(data: Path) -> None:
    dataset = load_dataset(data)
    order = order_of(small_config(data), dataset)
    after = sorted(-actions for _, actions, _ in order)[25]
    few = [(-actions < after, last, actions, item) for last, actions, item in order]
    for count in (7, 25, 40):
        config = small_config(data, {"data.items": count, "data.items_after": after})
        kept = kept_items(config.data, dataset)
        assert kept is not None and kept.tolist() == sorted(item for *_, item in sorted(few)[:count])
        assert kept.tolist() != sorted(item for *_, item in sorted(order)[:count])
    with pytest.raises(ValueError, match=r"data.items_after is 2, but data.items is 0, which keeps all items; set"):
        small_config(data, {"data.items_after": 2})


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("settings", SPLITS)
def test_a_limited_dataset_is_what_is_left(
    data: Path, settings: dict[str, Any], large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Actions, features and ids of the kept items, and what is held out of them."""
    if large:
        monkeypatch.setattr(arrays, "LARGE", 0)
    whole, config = load_dataset(data), small_config(data, settings | {"data.items": 12})
    dataset = limited(config.data, whole)
    if large:
        dataset = limited(config.data, whole)
        assert isinstance(dataset.items_flat.base, np.memmap)
    assert dataset.kept is not None and dataset.num_items == dataset.schema.num_items == 12
    ids = [whole.raw_ids()[item] for item in dataset.kept]
    assert dataset.raw_ids() == ids and dataset.vocabulary("item") == [*ids, ""]
    assert dataset.vocabulary_column("item").to_pylist() == [*ids, None]
    for name, column in whole.item_features.items():
        expected, found = column.take(dataset.kept), dataset.item_features[name]
        assert expected.values.tolist() == found.values.tolist()
    assert dataset.user_features.keys() == whole.user_features.keys()
    before, now = held_out(config.data, whole), held_out(config.data, dataset)
    assert now.targets.keys() == before.targets.keys()
    of_whole, of_kept, misses = actions_of(whole), actions_of(dataset), 0
    for user, (first, last) in enumerate(pairwise(whole.offsets)):
        start = dataset.offsets[user]

        def left(until: int, first: int = first) -> list[tuple[Any, ...]]:
            return [of for of in of_whole[first:until] if of[0] in ids]

        assert of_kept[start : dataset.offsets[user + 1]] == left(last)
        assert of_kept[start : now.train_end[user]] == left(before.train_end[user])
        for split, place_U in before.targets.items():
            place, at = place_U[user], now.targets[split][user]
            if place < 0 or of_whole[place][0] not in ids or not left(place):
                misses += place >= 0
                assert at == -1
            else:
                assert of_kept[start:at] == left(place) and of_kept[at] == of_whole[place]
    assert misses
    if before.places is not None and now.places is not None:
        may = [whole.timestamps_flat[at] for at in before.places if whole.items_flat[at] in dataset.kept]
        assert dataset.timestamps_flat[now.places].tolist() == may


def test_features_whose_values_are_items_name_kept_ones() -> None:
    whole = in_memory(np.array([0, 5, 10]), np.array([0, 1, 2, 3, 4, 5, 2, 4, 1, 3]), 6)
    page, seen = Column(np.array([6, 0, 1, 2, 3, 4, 5, 0, 0, 1])), Column(np.array([5, 2, 6]), np.array([0, 3, 3]))
    schema = replace(
        whole.schema,
        features=(
            *whole.schema.features,
            Feature("page", "event", "id", "item"),
            Feature("seen", "user", "ids", "item"),
        ),
    )
    whole = replace(whole, schema=schema, event_features={"page": page}, user_features={"seen": seen})
    dataset = limited(small_config(Path(), {"data.items": 3}).data, whole)
    # Of user 0 the first three actions are trained on, of user 1 likewise, and these are later.
    assert dataset.kept is not None and dataset.kept.tolist() == [2, 4, 5]
    assert dataset.items_flat.tolist() == [0, 1, 2, 0, 1]
    assert dataset.event_features["page"].values.tolist() == [3, 3, 1, 2, 3]
    assert dataset.user_features["seen"].values.tolist() == [2, 0, 3]


def limit(data: Path, items: int, settings: dict[str, Any] = {}) -> Config:  # noqa: B006 (not changed)
    common = {"train.epochs": 1, "data.items": items, "model.features": ["brand", "recency"]}
    exact = {"train.precision": "fp32", "comm.forward": "fp32", "comm.backward": "fp32"}
    return small_config(data, common | exact | settings)


@pytest.fixture(scope="module")
def run(data: Path) -> Path:
    """A run with 12 of the 50 items."""
    settings = {"data.split": "time", "evaluate.groups": ["brand", "action"], "evaluate.exclude_history": "yes"}
    train(limit(data, 12, settings), data.parent / "run")
    return data.parent / "run"


def test_targets_without_a_row_or_a_history_are_misses(
    data: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others have the rank that their scores give, in a ranking without their histories."""
    whole, config = load_dataset(data), load_saved(run).config
    dataset, before = limited(config.data, whole), held_out(config.data, whole)
    assert dataset.kept is not None
    everyone, served = (ranking_users(of, "test", 12, held_out(config.data, of)) for of in (whole, dataset))
    assert read_test_users(run) == whole.raw_user_ids(everyone.user) and 0 < len(served) < len(everyone)
    expected = dict.fromkeys(everyone.user.tolist(), NOT_SERVED)
    for number, scores in enumerate(trained_scores(run, dataset, served)):
        of = served.of(slice(number, number + 1))
        (target,) = of.target
        if target not in of.seen:
            above = {int(item) for item in np.flatnonzero(~(scores < scores[target]))} - {int(target), *of.seen}
            expected[int(of.user[0])] = 1 + len(above)
    rank_U = read_ranks(run)
    assert rank_U.tolist() == [*expected.values()]
    capsys.readouterr()
    found = evaluate_run(run, "test", "cpu", 1)
    missed = len(everyone) - len(served)
    assert (found["users"], found["corpus"], found["targets/left_out"]) == (len(everyone), 12, missed / len(everyone))
    assert found["hr@10"] == (rank_U <= 10).mean() and found["popularity/hr@500"] <= len(served) / len(everyone)
    # All kept items are among the best 50 but for those of the history, if any of that are kept, whatever the target.
    recalls, of_missed = [], 0
    for user, first, place in zip(everyone.user, everyone.first, everyone.place, strict=True):
        history, period = whole.items_flat[first:place], {*whole.items_flat[place : whole.offsets[user + 1]].tolist()}
        kept = {*dataset.kept.tolist()}
        found_of = (period & kept) - {*history.tolist()} if kept & {*history.tolist()} else {}
        of_missed += bool(found_of) and user not in served.user
        recalls.append(len(found_of) / len(period))
    assert found["period/recall@50"] == pytest.approx(np.mean(recalls)) and of_missed
    # Whose target has no place is asked at its time all the same, given the kept actions before it.
    with process_group("cpu", 60) as ranks:
        at_N, users = Evaluation(config.evaluate, config.data, config.model, dataset, ranks)._ranked(
            everyone, "test", missed=True
        )
    assert len(served) < len(at_N)
    assert users.times[1][users.lengths.cumsum() - 1].tolist() == whole.timestamps_flat[everyone.place[at_N]].tolist()
    for user, seen in zip(at_N, np.split(users.seen, users.seen_lengths.cumsum()[:-1]), strict=True):
        history = whole.items_flat[everyone.first[user] : everyone.place[user]]
        assert dataset.kept[seen].tolist() == [item for item in history if item in dataset.kept]
    # Groups are those of the whole dataset, by features of targets that are left out, too.
    groups = [of for name, of in found.items() if name.startswith("groups/brand=") and name.endswith("/users")]
    assert sum(groups) == len(everyone)
    actions = [len(of.items_flat) for of in (whole, dataset)]
    said = " ".join(capsys.readouterr().err.split())
    assert "items: the 12 with the latest training actions, of 50 (data.items); the others are left" in said
    assert f"are left out with {actions[0] - actions[1]:,} of {actions[0]:,} actions" in said
    assert f"and {missed} of {len(everyone)} test targets count as misses: no row, or none before them" in said
    assert (before.targets["test"] >= 0).sum() == len(everyone)


def test_two_ranks_and_a_restart_on_one_do_what_one_process_does(data: Path, tmp_path: Path) -> None:
    config, half = (limit(data, 12, {"train.epochs": 2, "train.stop_after_epochs": of}) for of in (0.0, 1.0))
    two_ranks.run(train, half, tmp_path / "both")
    train(config, tmp_path / "both")
    train(config, tmp_path / "alone")
    assert losses_of(tmp_path / "both") == pytest.approx(losses_of(tmp_path / "alone"), rel=1e-4)
    with pytest.raises(ValueError, match=r"was started with other settings: data.items was 12, is 13"):
        train(limit(data, 13, {"train.epochs": 2}), tmp_path / "both")


def test_too_few_items_to_rank_anybody_are_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^data.items is 1, but no validation target in .* raise data.items$"):
        train(limit(data, 1), tmp_path / "run")


def test_an_export_has_the_kept_items(run: Path, data: Path, tmp_path: Path) -> None:
    """Histories that hold others are answered without these."""
    kept = limited(load_saved(run).config.data, load_dataset(data)).raw_ids()
    export(run, tmp_path / "base")
    retriever = Retriever.load(tmp_path / "base")
    gone = next(name for name in load_dataset(data).raw_ids() if name not in kept)
    known, more = ranked_rows(retriever.recommend([{"history": kept[:2]}, {"history": [kept[0], gone, kept[1]]}], k=50))
    assert {row["id"] for row in known} == {*kept[2:]} and known == more
