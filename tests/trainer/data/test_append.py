"""Later actions behind those of a dataset: the same histories as of both prepared together."""

import io
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from rich.console import Console

from logitmix.trainer.data.append import append
from logitmix.trainer.data.config import PrepareOptions
from logitmix.trainer.data.dataset import Dataset, load_dataset
from logitmix.trainer.data.prepare import prepare

Rows = list[tuple[str, str, int, str, float]]
"""User, item, time, brand, price."""


def prepared(folder: Path, name: str, rows: Rows, **options: Any) -> Path:
    folder.mkdir(exist_ok=True)
    source = folder / f"{name}.csv"
    source.write_text("user,item,timestamp,brand,price\n" + "".join(f"{','.join(map(str, row))}\n" for row in rows))
    schema = folder / "schema.toml"
    schema.write_text('[features.brand]\nkind = "id"\n[features.price]\nkind = "number"\n')
    usual: dict[str, Any] = {"min_user_actions": 0, "keep_duplicates": True, "schema": str(schema)}
    prepare(
        PrepareOptions("table", str(source), str(folder / name), **usual | options), Console(file=io.StringIO())
    )
    return folder / name


def told(dataset: Dataset) -> dict[str, list[tuple[str, int, str, float]]]:
    """What a dataset says of each user, in terms of the source."""
    ids, brands = dataset.raw_ids(), dataset.vocabulary("brand")
    found = {}
    for user, raw in enumerate(dataset.raw_user_ids(range(dataset.num_users))):
        actions = range(dataset.offsets[user], dataset.offsets[user + 1])
        found[raw] = [
            (
                ids[dataset.items_flat[at]],
                int(dataset.timestamps_flat[at]),
                brands[dataset.event_features["brand"].values[at]],
                float(dataset.event_features["price"].values[at]),
            )
            for at in actions
        ]
    return found


rows_of = st.lists(
    st.tuples(
        st.sampled_from(["b", "a", "d", "c"]),
        st.sampled_from(["z", "y", "x", "w"]),
        st.integers(1, 9),
        st.sampled_from(["one", "two", "three"]),
        st.sampled_from([0.5, 2.0]),
    ),
    min_size=1,
    max_size=8,
)


@given(parts=st.lists(rows_of, min_size=2, max_size=4))
def test_histories_are_those_of_all_actions_together(
    parts: list[Rows], tmp_path_factory: pytest.TempPathFactory
) -> None:
    # Two texts of one file, or one of two, are the same file.
    folder = tmp_path_factory.mktemp("made")
    parts = [[(u, i, 1_700_000_000 + 10 * at + t, b, p) for u, i, t, b, p in part] for at, part in enumerate(parts)]
    path = prepared(folder, "0", parts[0])
    before = path
    for at, part in enumerate(parts[1:], 1):
        later, whole = prepared(folder, str(at), part), folder / f"whole-{at}"
        append(before, later, whole)
        before = whole
    dataset = load_dataset(before)
    expected = defaultdict(list)
    for part in parts:
        for user, *action in sorted(part, key=lambda row: row[2]):
            expected[user].append(tuple(action))
    assert told(dataset) == expected
    # What was there has its numbers.
    first = load_dataset(path)
    assert dataset.raw_ids()[: first.num_items] == first.raw_ids()
    assert dataset.vocabulary("brand")[: len(first.vocabulary("brand"))] == first.vocabulary("brand")
    together = load_dataset(prepared(folder, "together", [row for part in parts for row in part]))
    assert dataset.repeated_targets == together.repeated_targets
