"""An encoder that sees times: trained, exported and asked."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from asking import ranked_rows
from small_data import batches_of, hit_rate, small_config, trained_scores
from small_data import write_dataset as small_features
from torch import Tensor

from logitmix.modules.kinds.date import NO_DATE
from logitmix.modules.schema import Schema
from logitmix.serving.request import Request
from logitmix.serving.retriever import Retriever
from logitmix.trainer import cli
from logitmix.trainer.data.batches import RankingUsers, TrainingBatches, ranking_users
from logitmix.trainer.data.dataset import Dataset, load_dataset
from logitmix.trainer.data.writer import DatasetContents, write_dataset
from logitmix.trainer.export.export import export
from logitmix.trainer.loop import train

ITEMS, L = 12, 8


def trained(folder: Path, epochs: int) -> Path:
    """Soon after an action comes its item again, and after a long pause the next item. So who does not see times is
    right for half of the users."""
    random, users = np.random.default_rng(0), 200
    lengths = random.integers(6, 15, users)
    offsets = np.concatenate([[0], lengths.cumsum()])
    soon = random.random(offsets[-1]) < 0.5
    times = np.where(soon, random.integers(1, 8, len(soon)), random.integers(1000, 5000, len(soon))).cumsum()
    items = random.integers(0, ITEMS, len(soon))
    for start, end in pairwise(offsets):
        for action in range(start + 2, end):
            items[action] = items[action - 1] if soon[action] else (items[action - 1] + 1) % ITEMS
    names = [f"item-{item}" for item in range(ITEMS)]
    write_dataset(folder / "data", DatasetContents(offsets, items, times, names, schema=Schema.of_ids(ITEMS)), "demo")
    for name, seen in (("with", True), ("without", False)):
        settings = {
            "model.dim": 16,
            "dense.lr": 1e-2,
            "tables.lr": 1e-2,
            "train.epochs": epochs if seen else 1,
            "train.batch_size": 8,
            "evaluate.every_epochs": epochs,
            "train.precision": "fp32",
            "model.encoder.dropout": 0.0,
        }
        settings |= {"evaluate.exclude_history": "no", "model.loss.negatives": 12, "model.encoder.max_length": L}
        settings |= {"model.encoder.kind": "hstu", "model.encoder.blocks": 2, "model.encoder.times": seen}
        train(small_config(folder / "data", settings), folder / name)
        export(folder / name, folder / f"{name}.served")
    return folder


@pytest.fixture(scope="module")
def paced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("paced"), 1)


@pytest.fixture(scope="module")
def dataset(paced: Path) -> Dataset:
    return load_dataset(paced / "data")


@pytest.mark.slow
def test_a_model_learns_what_times_alone_tell(tmp_path: Path) -> None:
    assert hit_rate(trained(tmp_path, 30) / "with") > 0.75


def test_batches_have_the_times_of_actions_and_of_the_next_ones(dataset: Dataset) -> None:
    batches = batches_of(
        dataset, dataset.schema, batch_size=4, max_length=L, negatives=1, share="batch", seed=0, times=True
    )
    batch = batches.at(0)
    time_T, asked_T = batch.packing.time_T, batch.packing.asked_T
    assert time_T is not None and asked_T is not None and len(time_T) == len(asked_T) == len(batch.input_T)
    for start, end in pairwise(batch.packing.bounds):
        assert torch.equal(asked_T[start : end - 1], time_T[start + 1 : end])
        item, target = batch.id_V[batch.input_T[start:end]], batch.id_V[batch.target_T[start:end]]
        # An action that comes soon repeats the one before.
        soon = asked_T[start:end] - time_T[start:end] < 100
        assert torch.equal(item[1:][soon[1:]], target[1:][soon[1:]])


def test_in_training_dates_and_times_are_later_by_a_number_of_days_for_each_step(tmp_path: Path) -> None:
    """So that only their differences tell anything."""
    dataset = load_dataset(small_features(tmp_path / "data", features=True))

    def batches(rank: int = 0, ranks: int = 1) -> TrainingBatches:
        return batches_of(
            dataset, dataset.schema, batch_size=4, max_length=L, negatives=1, share="batch", seed=0, times=True,
            rank=rank, world_size=ranks,
        )  # fmt: skip

    shifts = set()
    plain = replace(dataset.schema, features=[of for of in dataset.schema.features if of.kind != "date"])
    without = batches_of(dataset, plain, batch_size=4, max_length=L, negatives=1, share="batch", seed=0, times=True)
    for step in range(3):
        whole, apart = batches().at(step), without.at(step)
        date_V = torch.from_numpy(dataset.item_features["released"].values[whole.id_V.numpy()])
        (shift,) = set((whole.packing.asked_T - apart.packing.asked_T).tolist())  # type: ignore[operator]
        assert set((whole.packing.time_T - apart.packing.time_T).tolist()) == {shift}  # type: ignore[operator]
        there_V = date_V != NO_DATE
        later_V = whole.features.values["released"].values
        assert torch.equal(later_V, torch.where(there_V, date_V + shift // 86_400, date_V)) and not there_V.all()
        assert shift % 86_400 == 0 and 0 <= shift < 2**15 * 86_400
        for rank in range(2):
            part = batches(rank, 2).at(step)
            places = torch.searchsorted(whole.id_V, part.id_V)
            assert torch.equal(part.features.values["released"].values, later_V[places])
        shifts.add(shift)
    assert len(shifts) == 3


def requests_of(dataset: Dataset, users: RankingUsers) -> list[Request]:
    names, requests = dataset.raw_ids(), list[Request]()
    for first, place in zip(users.first, users.place, strict=True):
        history = [names[item] for item in dataset.items_flat[first:place]]
        times = dataset.timestamps_flat[first : place + 1].tolist()
        requests.append({"history": history, "timestamps": times[:-1], "time": times[-1]})
    return requests


def scores(retriever: Retriever, requests: list[Request]) -> Tensor:
    """[B, X]."""
    found = ranked_rows(retriever.recommend(requests, ITEMS, exclude_history=False))
    by_id = [{row["id"]: row["score"] for row in rows} for rows in found]
    return torch.tensor([[of[f"item-{item}"] for item in range(ITEMS)] for of in by_id])


def test_requests_are_scored_as_in_evaluation(paced: Path, dataset: Dataset) -> None:
    """Their histories are shorter and longer than what the model sees."""
    users, retriever = ranking_users(dataset, "test", L), Retriever.load(paced / "with.served")
    requests = requests_of(dataset, users)
    assert {len(request["history"]) > L for request in requests} == {False, True}
    expected = trained_scores(paced / "with", dataset, users)
    torch.testing.assert_close(scores(retriever, requests), expected, rtol=0, atol=2e-4)
    best = [rows[0]["id"] for rows in ranked_rows(retriever.recommend(requests, 1, exclude_history=False))]
    hits = [name == f"item-{target}" for name, target in zip(best, users.target, strict=True)]
    assert np.mean(hits) == pytest.approx(hit_rate(paced / "with"), abs=1e-12)
    # Without a time of its own, a request is asked at its last action's.
    for request in requests:
        del request["time"]
    at_last = trained_scores(paced / "with", dataset, replace(users, at_last_action=True))
    assert float((at_last - expected).abs().max()) > 1e-3
    torch.testing.assert_close(scores(retriever, requests), at_last, rtol=0, atol=2e-4)
    results = json.loads((paced / "with" / "results.json").read_text())
    hits_at_last = at_last.argmax(1).numpy() == users.target
    assert hits_at_last.mean() == pytest.approx(results["at_last_action/hr@1"], abs=1e-12)
    assert "at_last_action/hr@1" not in json.loads((paced / "without" / "results.json").read_text())


def test_left_out_items_take_their_times_with_them(paced: Path) -> None:
    retriever = Retriever.load(paced / "with.served")
    plain: Request = {"history": ["item-3", "item-5", "item-1"], "timestamps": [10, 3000, 3005], "time": 3007}
    more: Request = {
        "history": ["new", "item-3", "new", "new", "item-5", "item-1", "new"],
        "timestamps": [1, 10, 11, 2999, 3000, 3005, 3006],
        "time": 3007,
    }
    torch.testing.assert_close(*(scores(retriever, [request]) for request in (more, plain)), rtol=0, atol=1e-5)
    moved = scores(retriever, [{**plain, "timestamps": [10, 11, 3005]}])
    assert float((moved - scores(retriever, [plain])).abs().max()) > 1e-4


def test_the_command_line_takes_the_time(
    paced: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal: Callable[..., str]
) -> None:
    asked: Request = {"history": ["item-1", "item-5", "item-1"], "timestamps": [10, 3000, 6000]}

    def words(model: str, time: int) -> list[str]:
        request = json.dumps({"timestamps": asked["timestamps"], "time": time})
        return [
            "retrieve",
            str(paced / f"{model}.served"),
            "--history",
            ",".join(asked["history"]),
            "--request",
            request,
        ]  # type: ignore[arg-type]

    for model in ("with", "without"):
        found = []
        for time in (6004, 9000):
            cli.main([*words(model, time), "-k", "3", "--json"])
            found.append(json.loads(capsys.readouterr().out)["items"])
            retriever = Retriever.load(paced / f"{model}.served")
            assert found[-1] == ranked_rows(retriever.recommend([{**asked, "time": time}], 3))[0]
        assert (found[0] == found[1]) == (model == "without")
    assert "the request: its time is 5999; its last action was at 6000" in refusal(*words("with", 5999))
    (tmp_path / "asked.jsonl").write_text('["item-1"]\n')
    files = ["--histories", str(tmp_path / "asked.jsonl"), "--out", str(tmp_path / "out")]
    assert "--request are for one request; beside --histories" in refusal(*words("with", 0), *files)


@pytest.mark.parametrize("time", [1.5, "now", 2**63, [5]])
def test_a_time_that_is_no_whole_number_is_refused(paced: Path, time: object) -> None:
    retriever = Retriever.load(paced / "with.served")
    for request in ({"history": ["item-1"], "time": time}, {"history": ["item-1"], "timestamps": [3], "time": time}):
        with pytest.raises(ValueError, match=r"^request 0: its time is .*; it must be a whole number of 64 bits$"):
            ranked_rows(retriever.recommend([request], 1))  # type: ignore[list-item]
