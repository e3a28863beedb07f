"""Which value has which row of a table that has fewer rows than there are values (tables.NAME.capacity).

The rows are divided into buckets of at most WAYS, and a value can have a row of one bucket only, by its id: a
set-associative cache. So what happens in a bucket depends on no other, and buckets can be divided among any number of
ranks with the same result. Ids are dense, so consecutive ones are in different buckets, and no bucket overflows while
there are no more values than rows.

Axes: B buckets held here, K rows of a bucket, U unique ids, N of them that are known values, M of these without a row.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

WAYS = 64
"""Rows of a bucket, at most: an id is compared with as many."""
EMPTY, NONE = 0, -1
"""In place of an id: a slot without a value, and a place behind the slots of a shorter bucket. 0 is the id of unknown
values, which have row 0 and no slot."""
_FREE, _TAKEN = np.iinfo(np.int64).min, np.iinfo(np.int64).max


@dataclass(frozen=True)
class Layout:
    """How the rows 1 to `capacity` of a table are divided into buckets. Row 0 is for values without a row."""

    capacity: int

    @property
    def buckets(self) -> int:
        return -(-self.capacity // WAYS)

    @property
    def ways(self) -> int:
        """K: rows of the largest buckets; others have one less."""
        return -(-self.capacity // self.buckets)

    def bucket(self, id_U: Ints) -> Ints:
        """Returns the buckets of ids above 0."""
        return (id_U - 1) % self.buckets

    def first_row(self, bucket: Ints) -> Ints:
        """Returns the first row of each bucket; that of `buckets` is one behind the last row."""
        least, longer = divmod(self.capacity, self.buckets)
        return 1 + bucket * least + np.minimum(bucket, longer)


def map_bytes(capacity: int, admit_after: int) -> int:
    """Bytes of a RowMap of all buckets."""
    layout = Layout(capacity)
    return 3 * 8 * layout.buckets * layout.ways * (2 if admit_after > 1 else 1)


class Named(NamedTuple):
    """Some ids, each with the step that named it last and the number of steps that have named it: int64 [N]."""

    id: Ints
    last: Ints
    steps: Ints


class Slots:
    """Ids in buckets, each with the step that named it last and the number of steps that have named it: int64 [B, K]"""

    def __init__(self, layout: Layout, start: int, stop: int) -> None:
        """Those of the buckets from `start` to `stop`, excluded; all empty."""
        size_B1 = np.diff(layout.first_row(np.arange(start, stop + 1)))[:, None]
        self.id = np.where(np.arange(layout.ways) < size_B1, EMPTY, NONE).astype(np.int64)
        self.last, self.count = np.zeros_like(self.id), np.zeros_like(self.id)

    def find(self, bucket_U: Ints, id_U: Ints) -> Ints:
        """Returns the place of each id in its bucket, or -1."""
        found_UK = self.id[bucket_U] == id_U[:, None]
        return np.where(found_UK.any(1), found_UK.argmax(1), -1)

    def name(self, bucket: Ints, place: Ints, step: int) -> None:
        """Notes that a step has named the ids at these places."""
        self.last[bucket, place] = step
        self.count[bucket, place] += 1

    def fill(self, bucket_N: Ints, known: Named, frequency: bool) -> None:
        """Gives ids slots, all of which are empty, in their order; where a bucket has too few, not those that `insert`
        would evict first."""
        place_N = np.arange(len(bucket_N))
        last_first = np.lexsort((-place_N, -known.last, -known.steps if frequency else place_N * 0, bucket_N))
        size_B, bucket = (self.id != NONE).sum(1), bucket_N[last_first]
        kept = np.sort(last_first[_place_in_run(bucket) < size_B[bucket]])
        kept = kept[np.argsort(bucket_N[kept], kind="stable")]
        at = bucket_N[kept], _place_in_run(bucket_N[kept])
        self.id[at], self.last[at], self.count[at] = (of[kept] for of in known)

    def insert(self, bucket_M: Ints, id_M: Ints, count_M: Ints, step: int, since: int, frequency: bool) -> Ints:
        """Gives ids slots of their buckets, in the order of the ids; returns the places, or -1 where there was none.

        First those that are empty, then those of the ids that were named longest ago, or with `frequency` by the fewest
        steps, and of these longest ago; never one that was named in step `since` or later."""
        place_M = np.full(len(id_M), -1)
        left = np.lexsort((id_M, bucket_M))
        while len(left):
            # The next id of each bucket.
            bucket_T, first = np.unique(bucket_M[left], return_index=True)
            at = left[first]
            id_TK, last_TK = self.id[bucket_T], self.last[bucket_T]
            key_TK = (self.count[bucket_T] << 32) + last_TK if frequency else last_TK
            key_TK = np.where(id_TK == EMPTY, _FREE, np.where((id_TK == NONE) | (last_TK >= since), _TAKEN, key_TK))
            best_T = key_TK.argmin(1)
            free = key_TK[np.arange(len(best_T)), best_T] < _TAKEN
            at, bucket, place = at[free], bucket_T[free], best_T[free]
            self.id[bucket, place], self.last[bucket, place], self.count[bucket, place] = id_M[at], step, count_M[at]
            place_M[at] = place
            left = np.delete(left, first)
            left = left[~np.isin(bucket_M[left], bucket_T[~free])]
        return place_M


def _place_in_run(bucket_N: Ints) -> Ints:
    """Returns the place of each of sorted numbers among its equals."""
    return np.arange(len(bucket_N)) - np.searchsorted(bucket_N, bucket_N)


class Placed(NamedTuple):
    """The rows [U] of some ids, and the values that have got a row: their rows and ids [N]."""

    row: Ints
    new_row: Ints
    new_id: Ints


class RowMap:
    """The rows of the values whose buckets are held here."""

    def __init__(
        self,
        capacity: int,
        admit_after: int = 1,
        evict: Literal["last_use", "frequency"] = "last_use",
        part: tuple[int, int] | None = None,
    ) -> None:
        """`part`: the buckets, first and last (excluded); all by default."""
        self.layout, self.admit_after, self.evict = Layout(capacity), admit_after, evict
        self.start, stop = part or (0, self.layout.buckets)
        self.rows = Slots(self.layout, self.start, stop)
        self.candidates = Slots(self.layout, self.start, stop) if admit_after > 1 else None
        """Values that have no row yet: at most as many as there are rows, those named last."""

    def adopt(self, rows: Named, candidates: Named) -> None:
        """Goes on, as an empty map of all buckets, from another one, whose ids had rows or were candidates."""
        self.rows.fill(self.layout.bucket(rows.id), rows, self.evict == "frequency")
        if self.candidates:
            self.candidates.fill(self.layout.bucket(candidates.id), candidates, frequency=False)

    def find(self, id_U: Ints) -> Ints:
        """Returns the rows of ids; 0 for those that have none."""
        row_U = np.zeros_like(id_U)
        known = np.flatnonzero(id_U)
        bucket_N = self.layout.bucket(id_U[known]) - self.start
        row_U[known] = self._rows_at(bucket_N, self.rows.find(bucket_N, id_U[known]))
        return row_U

    def advance(self, id_U: Ints, step: int) -> Placed:
        """Returns the rows of the ids that a step names, unique and sorted. A value gets a row in the `admit_after`-th
        step that names it, and another one loses its row to it if there is none left; but not one that this step or the
        one before names, because its gradients are on their way."""
        known = np.flatnonzero(id_U)
        id_N, bucket_N = id_U[known], self.layout.bucket(id_U[known]) - self.start
        place_N = self.rows.find(bucket_N, id_N)
        there, missing = place_N >= 0, np.flatnonzero(place_N < 0)
        self.rows.name(bucket_N[there], place_N[there], step)
        count_M = self._sightings(bucket_N[missing], id_N[missing], step)
        due = missing[count_M >= self.admit_after]
        counts = count_M[count_M >= self.admit_after]
        place_N[due] = self.rows.insert(bucket_N[due], id_N[due], counts, step, step - 1, self.evict == "frequency")
        new = due[place_N[due] >= 0]
        if self.candidates:
            at = self.candidates.find(bucket_N[new], id_N[new])
            self.candidates.id[bucket_N[new][at >= 0], at[at >= 0]] = EMPTY
        row_U = np.zeros_like(id_U)
        row_U[known] = self._rows_at(bucket_N, place_N)
        return Placed(row_U, row_U[known[new]], id_N[new])

    def _rows_at(self, bucket_N: Ints, place_N: Ints) -> Ints:
        """Returns the rows at places of buckets held here; 0 for place -1."""
        return np.where(place_N >= 0, self.layout.first_row(bucket_N + self.start) + place_N, 0)

    def _sightings(self, bucket_M: Ints, id_M: Ints, step: int) -> Ints:
        """Returns how many steps have named each of these ids, with this one; those that there is no room to count have
        1."""
        if self.candidates is None:
            return np.ones_like(id_M)
        place_M = self.candidates.find(bucket_M, id_M)
        new = place_M < 0
        self.candidates.name(bucket_M[~new], place_M[~new], step)
        ones = np.ones(int(new.sum()), np.int64)
        place_M[new] = self.candidates.insert(bucket_M[new], id_M[new], ones, step, step, frequency=False)
        return np.where(place_M >= 0, self.candidates.count[bucket_M, place_M], 1)
