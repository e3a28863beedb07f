"""The numbered actions -> sequences/ of a dataset directory, a part of the users after the other."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from logitmix.modules.schema import ITEM, Schema
from logitmix.trainer.data.columns import Column
from logitmix.trainer.data.writer import USERS_PER_FILE, Counted, DatasetContents, write_part


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
        """Returns how many files sequences/ has."""
        return -(-len(self.user_ids) // self.users_per_file)

    def __call__(self, part: int, rows: pa.Table) -> Counted:
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
        return Counted.of(offsets, items, times, fractions, self.schema.table(ITEM).rows - 1)


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
