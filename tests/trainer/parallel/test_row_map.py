"""Which values have rows, against a plain reference."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitmix.trainer.parallel import row_map
from logitmix.trainer.parallel.row_map import Named, RowMap


@dataclass
class Known:
    id: int
    last: int
    count: int


@dataclass
class Reference:
    """One bucket after another, one id after another."""

    capacity: int
    admit_after: int
    evict: str
    rows: dict[int, Known] = field(default_factory=dict)
    candidates: dict[tuple[int, int], Known] = field(default_factory=dict)
    """By bucket and place."""

    def rows_of(self, bucket: int, buckets: int) -> range:
        sizes = [self.capacity // buckets + (number < self.capacity % buckets) for number in range(buckets)]
        first = 1 + sum(sizes[:bucket])
        return range(first, first + sizes[bucket])

    def row_of(self, value: int) -> int:
        return next((row for row, known in self.rows.items() if known.id == value), 0)

    def advance(self, named: Sequence[int], step: int) -> tuple[list[int], dict[int, int]]:
        buckets = -(-self.capacity // row_map.WAYS)
        waiting, new = [], {}
        for value in named:
            if row := self.row_of(value):
                self.rows[row].last, self.rows[row].count = step, self.rows[row].count + 1
            elif value:
                waiting.append(value)
        sightings = {value: self.sighted(value, named, step, buckets) for value in waiting}
        for value in waiting:
            if sightings[value] < self.admit_after:
                continue
            mine = self.rows_of((value - 1) % buckets, buckets)
            row = next((row for row in mine if row not in self.rows), 0)
            if not row:
                known = [(self.priority(self.rows[row]), row) for row in mine if self.rows[row].last < step - 1]
                row = min(known)[1] if known else 0
            if row:
                self.rows[row] = Known(value, step, sightings[value])
                new[row] = value
                self.candidates = {at: known for at, known in self.candidates.items() if known.id != value}
        return [self.row_of(value) for value in named], new

    def priority(self, known: Known) -> Any:
        return (known.count, known.last) if self.evict == "frequency" else known.last

    def sighted(self, value: int, named: Sequence[int], step: int, buckets: int) -> int:
        if self.admit_after == 1:
            return 1
        bucket = (value - 1) % buckets
        places = [(bucket, place) for place in range(len(self.rows_of(bucket, buckets)))]
        for at in places:
            if at in self.candidates and self.candidates[at].id == value:
                self.candidates[at].last, self.candidates[at].count = step, self.candidates[at].count + 1
                return self.candidates[at].count
        at = next((at for at in places if at not in self.candidates), None)
        if at is None:
            # Those that this step names, earlier or later in its order, keep their places.
            old = [(self.candidates[at].last, at) for at in places if self.candidates[at].id not in named]
            at = min(old)[1] if old else None
        if at is not None:
            self.candidates[at] = Known(value, step, 1)
        return 1


STREAMS = st.lists(st.lists(st.integers(0, 30), max_size=12).map(lambda ids: sorted(set(ids))), max_size=25)


@given(
    stream=STREAMS,
    capacity=st.integers(1, 17),
    ways=st.sampled_from([1, 3, 64]),
    admit_after=st.integers(1, 3),
    evict=st.sampled_from(["last_use", "frequency"]),
)
def test_rows_are_given_and_taken_as_by_the_reference(
    stream: list[list[int]], capacity: int, ways: int, admit_after: int, evict: Any
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_map, "WAYS", ways)
        fast, plain = RowMap(capacity, admit_after, evict), Reference(capacity, admit_after, evict)
        for step, named in enumerate(stream, 1):
            placed = fast.advance(np.array(named, np.int64), step)
            rows, new = plain.advance(named, step)
            assert placed.row.tolist() == rows
            assert dict(zip(placed.new_row.tolist(), placed.new_id.tolist(), strict=True)) == new
            everything = np.arange(31)
            assert fast.find(everything).tolist() == [plain.row_of(value) for value in range(31)]


@given(
    stream=STREAMS, later=STREAMS, capacity=st.integers(1, 17), ways=st.sampled_from([1, 3, 64]),
    evict=st.sampled_from(["last_use", "frequency"]), fewer=st.integers(0, 5),
)  # fmt: skip
def test_a_map_goes_on_from_another(
    stream: list[list[int]], later: list[list[int]], capacity: int, ways: int, evict: Any, fewer: int
) -> None:
    """As if it were that one. Where it has fewer rows, each bucket keeps the ids that would have been evicted last."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_map, "WAYS", ways)
        first, none = RowMap(capacity, 1, evict), np.empty(0, np.int64)
        for step, named in enumerate(stream, 1):
            first.advance(np.array(named, np.int64), step)
        there = first.rows.id > 0
        known = Named(first.rows.id[there], first.rows.last[there] - len(stream) - 1, first.rows.count[there])
        second, small = RowMap(capacity, 1, evict), RowMap(max(1, capacity - fewer), 1, evict)
        second.adopt(known, Named(none, none, none))
        small.adopt(known, Named(none, none, none))
        of_bucket: dict[int, list[tuple[Any, int]]] = {}
        for place, (value, last, count) in enumerate(zip(*(of.tolist() for of in known), strict=True)):
            key = (count if evict == "frequency" else 0, last, place)
            of_bucket.setdefault((value - 1) % small.layout.buckets, []).append((key, value))
        sizes = (small.rows.id >= 0).sum(1)
        kept = [value for bucket, of in of_bucket.items() for _, value in sorted(of)[-sizes[bucket] :]]
        assert sorted(small.rows.id[small.rows.id > 0].tolist()) == sorted(kept)
        everything = np.arange(31)
        for step, named in enumerate([[], *later]):
            if step:
                second.advance(np.array(named, np.int64), step)
                first.advance(np.array(named, np.int64), step + len(stream) + 1)
            assert first.find(everything).tolist() == second.find(everything).tolist()
