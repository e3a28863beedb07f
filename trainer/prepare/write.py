"""The numbered actions -> sequences/ of a dataset directory, a part of the users after the other."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from logitmix.modules.schema import Schema
from logitmix.trainer.data.columns import Column
from logitmix.trainer.data.repeats import count_repeats, shares
from logitmix.trainer.data.writer import LAST, USERS_PER_FILE, DatasetContents, find_last, write_part


@dataclass(frozen=True)
class PartWriter:
    """Writes parts of sequences/."""

    directory: Path
    schema: Schema
    user_ids: pa.Array
    users: Mapping[str, Column]
    """Features of users."""
    events: Mapping[str, tuple[str, pa.Array, Column]]
    """Features of actions: the column of the keys of their values, all of these, and the feature of each."""
    users_per_file: int = USERS_PER_FILE

    @property
    def parts(self) -> int:
        """How many files sequences/ has."""
        return -(-len(self.user_ids) // self.users_per_file)

    def __call__(self, part: int, rows: pa.Table) -> "Counted":
        """Writes a part and counts it, given its actions in order, as those of `Numbered.kept`."""
        first = part * self.users_per_file
        stop = min(first + self.users_per_file, len(self.user_ids))
        of_user, items, times, fractions = (
            rows[name].to_numpy() for name in ("user_index", "item_index", "time", "fraction")
        )
        offsets = np.searchsorted(of_user, np.arange(first, stop + 1))
        columns = {name: column.take(np.arange(first, stop)) for name, column in self.users.items()}
        for name, (column, keys, feature) in self.events.items():
            columns[name] = feature.take(pc.index_in(rows[column].combine_chunks(), value_set=keys).to_numpy())
        ids = self.user_ids[first:stop]
        contents = DatasetContents(offsets, items, times, pa.nulls(0), ids, None, self.schema, columns)
        write_part(self.directory, part, contents, 0, stop - first, first)
        return Counted.of(offsets, items, times, fractions)


@dataclass
class Counted:
    """What is counted of some users."""

    actions: int = 0
    with_targets: int = 0
    repeats: dict[str, int] = field(default_factory=lambda: {"validation": 0, "test": 0})
    first: int = 2**63 - 1
    last: int = -(2**63)
    tied: int = 0
    end_tied: int = 0
    last_actions: dict[int, tuple[int, np.ndarray]] = field(default_factory=dict)
    """For each of LAST, how many actions there are if each user has so many, and which items they are of."""

    @classmethod
    def of(cls, offsets: np.ndarray, items: np.ndarray, times: np.ndarray, fractions: np.ndarray) -> "Counted":
        with_targets, repeats = count_repeats(offsets, items)
        same = (times[1:] == times[:-1]) & (fractions[1:] == fractions[:-1])
        ends = offsets[1:][np.diff(offsets) > 0] - 1
        same[ends[:-1]] = False
        tied = np.append(same, False) | np.append(False, same)
        return cls(
            len(items),
            with_targets,
            repeats,
            int(times.min(initial=2**63 - 1)),
            int(times.max(initial=-(2**63))),
            int(tied.sum()),
            int(tied[ends].sum()),
            {count: find_last(offsets, items, count) for count in LAST},
        )

    def add(self, other: "Counted") -> None:
        """Adds what is counted of other users."""
        self.actions += other.actions
        self.with_targets += other.with_targets
        self.repeats = {split: count + other.repeats[split] for split, count in self.repeats.items()}
        self.first, self.last = min(self.first, other.first), max(self.last, other.last)
        self.tied += other.tied
        self.end_tied += other.end_tied
        for count, (actions, there) in other.last_actions.items():
            before, seen = self.last_actions.get(count, (0, np.zeros(0, bool)))
            size = max(len(seen), len(there))
            both = np.pad(seen, (0, size - len(seen))) | np.pad(there, (0, size - len(there)))
            self.last_actions[count] = before + actions, both

    def entries(self) -> dict[str, Any]:
        """Those of dataset.json that are counted of the sequences."""
        return {
            "actions": self.actions,
            "repeated_targets": shares(self.with_targets, self.repeats),
            "last_actions": {
                str(count): {"actions": actions, "items": int(np.count_nonzero(there))}
                for count, (actions, there) in self.last_actions.items()
            },
        }

    def times(self) -> dict[str, int]:
        """The entries of `times` in dataset.json."""
        return {
            "first": self.first,
            "last": self.last,
            "tied_actions": self.tied,
            "users_that_end_tied": self.end_tied,
        }


def write_sequences(writer: PartWriter, batches: Iterable[pa.RecordBatch]) -> Counted:
    """Writes sequences/ of actions in the order of the dataset, the users of each of its files at a time."""
    (writer.directory / "sequences").mkdir(parents=True)
    counted, held, part = Counted(), list[pa.RecordBatch](), 0
    for batch in batches:
        held.append(batch)
        while len(batch) and batch["user_index"][-1].as_py() >= (stop := (part + 1) * writer.users_per_file):
            rows = pa.Table.from_batches(held)
            cut = int(np.searchsorted(rows["user_index"].to_numpy(), stop))
            counted.add(writer(part, rows[:cut].combine_chunks()))
            held, part = rows[cut:].to_batches(), part + 1
    counted.add(writer(part, pa.Table.from_batches(held).combine_chunks()))
    return counted
