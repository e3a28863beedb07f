"""Explicit negatives: against those of one target after the other."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_data import batches_of, in_memory, write_dataset

from logitmix.modules.batch import Batch
from logitmix.modules.schema import Feature
from logitmix.trainer.data.batches import leave_one_out
from logitmix.trainer.data.columns import Column
from logitmix.trainer.data.dataset import Dataset, load_dataset
from logitmix.trainer.data.negatives import ExplicitNegatives
from logitmix.trainer.data.targets import target_places

ITEMS, USERS, NEGATIVES = 40, 12, 8
NAMES = ("shown", "kind = 1")


def made() -> Dataset:
    """Users with 20 actions, of which about a third are dislikes (kind 1), and with up to 6 items shown for each, among
    them unknown ones and the action's own item."""
    random = np.random.default_rng(0)
    dataset = in_memory(np.arange(USERS + 1) * 20, random.integers(0, ITEMS, USERS * 20), ITEMS)
    lengths = random.integers(0, 7, USERS * 20) * (random.random(USERS * 20) < 0.5)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    shown = random.integers(0, ITEMS + 1, offsets[-1])
    shown[offsets[:-1][lengths > 3]] = dataset.items_flat[lengths > 3]
    features = (Feature("kind", "event", "number"), Feature("shown", "event", "ids", "item"))
    schema = replace(dataset.schema, features=(*dataset.schema.features, *features))
    kind = (random.random(USERS * 20) < 0.35).astype(np.float32)
    # The end of a user and the beginning of the next one.
    kind[38:42] = 1
    return replace(dataset, schema=schema, event_features={"kind": Column(kind), "shown": Column(shown, offsets)})


def expected(dataset: Dataset, place: int) -> list[int]:
    """Of the target at this place: the dislikes directly before it, and then the items shown with it."""
    own, at = int(dataset.items_flat[place]), place - 1
    disliked: list[int] = []
    while at >= place // 20 * 20 and dataset.event_features["kind"].values[at] == 1:
        disliked.insert(0, int(dataset.items_flat[at]))
        at -= 1
    shown = dataset.event_features["shown"]
    assert shown.offsets is not None
    listed = shown.values[shown.offsets[place] : shown.offsets[place + 1]].tolist()
    return [item for item in (*disliked, *listed) if item not in (own, ITEMS)][-NEGATIVES // 2 :]


def batch_of(dataset: Dataset, share: Any, explicit: bool, rank: int = 0, world_size: int = 1, **options: int) -> Batch:
    places = target_places(dataset, (), NAMES)
    return batches_of(
        dataset,
        replace(dataset.schema, features=dataset.schema.features[:1]),
        batch_size=100,
        max_length=25,
        share=share,
        group_positions=10,
        seed=0,
        held_out=leave_one_out(dataset, places=places),
        explicit=ExplicitNegatives(dataset, NAMES, places) if explicit else None,
        rank=rank,
        world_size=world_size,
        **{"negatives": NEGATIVES, **options},  # type: ignore[arg-type]
    ).at(0)


def negatives_of(batch: Batch) -> list[list[int]]:
    """Those of each target."""
    rows = batch.id_V[batch.negatives_GN].tolist()
    return [rows[group] for group, (start, end) in enumerate(pairwise(batch.bounds)) for _ in range(start, end)]


@pytest.mark.parametrize("share", ["position", "sequence", "group", "batch"])
def test_they_take_the_place_of_sampled_ones(share: str) -> None:
    dataset = made()
    batch, plain = (batch_of(dataset, share, explicit) for explicit in (True, False))
    places = target_places(dataset, (), NAMES)
    assert (
        places is not None and batch.position_Q is not None and not dataset.event_features["kind"].values[places].any()
    )
    # Sequences are whole users, in another order: the item and what came before it tell the place.
    inputs = batch.id_V[batch.input_T].tolist()
    starts = {tuple(dataset.items_flat[of * 20 :][:20].tolist()): of * 20 for of in range(USERS)}
    found, sampled, having = negatives_of(batch), negatives_of(plain), 0
    for q, position in enumerate(batch.position_Q.tolist()):
        sequence = int(batch.packing.sequence_T[position])
        first = batch.packing.bounds[sequence]
        history = inputs[first : position + 1]
        (place,) = [
            at
            for start in starts.values()
            for at in range(start + len(history), start + 20)
            if dataset.items_flat[at - len(history) : at].tolist() == history
            and dataset.items_flat[at] == batch.id_V[batch.target_T[q]]
        ][:1]
        wanted = expected(dataset, place)
        assert found[q] == sampled[q][: NEGATIVES - len(wanted)] + wanted
        having += bool(wanted)
    assert 20 < having < len(found)
    of_ranks = [batch_of(dataset, share, True, rank, 3) for rank in range(3)]
    assert [row for part in of_ranks for row in negatives_of(part)] == found


def test_what_there_is_is_said() -> None:
    dataset = made()
    said = ExplicitNegatives(dataset, NAMES, target_places(dataset, (), NAMES)).said(7, 3, 1000)
    assert said.startswith("7 explicit ones of 3 of 1,000 targets (shown and kind = 1); ")
    assert said.endswith(" values of shown are no items of the run")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("action = type-9", "--data.negatives 'action = type-9': no action of .* fulfills this"),
        ("qery", "--data.negatives qery: no such column .did you mean query.*: action, query, rating, place"),
        ("rating", '--data.negatives rating: it must be a list of items, or a condition such as "event = dislike"'),
        ("query", "--data.negatives query: none of its values is the id of an item, such as 'item-0'"),
        (
            "rating > -100",
            "--data.targets and --data.negatives .rating > -100.: no action is left that may",
        ),
    ],
)
def test_other_negatives_are_refused(name: str, problem: str, tmp_path: Path) -> None:
    dataset = load_dataset(write_dataset(tmp_path / "data", features=True))
    with pytest.raises(ValueError, match=problem):
        ExplicitNegatives(dataset, (name,), target_places(dataset, (), (name,)))


@pytest.mark.parametrize(("name", "value"), [("in_batch", 3), ("negatives", 0)])
def test_other_losses_are_refused(name: str, value: int) -> None:
    of_start = "start.model.loss.negatives" if name == "negatives" else ""
    with pytest.raises(ValueError, match=rf"model\.loss\.{name} is {value}.*{of_start}"):
        batch_of(made(), "batch", True, **{name: value})
