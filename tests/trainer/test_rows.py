from itertools import chain

import torch
from hypothesis import given
from hypothesis import strategies as st

from logitmix.trainer.rows import slices_of


@given(
    ids=st.lists(st.integers(0, 40)),
    beyond=st.integers(1, 20),
    owners=st.integers(1, 5),
    parts=st.integers(1, 6),
)
def test_parts_take_every_id_once_and_of_each_owner_an_equal_share(
    ids: list[int], beyond: int, owners: int, parts: int
) -> None:
    items, id_V = 40 + beyond, torch.tensor(sorted(ids), dtype=torch.int64)
    slices = slices_of(id_V, items, owners, parts)
    taken = [torch.cat([id_V[each] for each in part]).tolist() for part in slices]
    assert len(slices) == parts and sorted(chain(*taken)) == id_V.tolist()
    # TorchRec's ranges: as many rows to each owner, but to the last.
    owned = -(-items // owners)
    for number, part in enumerate(taken):
        # Sorted, so that the owners' ranges follow each other.
        assert part == sorted(part)
        assert all(abs((i % owned + 0.5) * parts / owned - number - 0.5) <= 0.5 + parts / owned for i in part)
