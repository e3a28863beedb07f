import torch
import two_ranks
from torch import Tensor

from logitmix.comm import exchange
from logitmix.comm.codec import Segment
from logitmix.comm.config import WireConfig
from logitmix.comm.exchange import Exchange, RowSpan, Wire, stacked
from logitmix.comm.process_group import Ranks, process_group

SENT = ((1, 3), (0, 2))
"""Rows that each rank sends to each."""
LAYOUT = (Segment("t", 5),)
ROW = 5 + 2


def exchanged() -> list[tuple[Tensor, Tensor, Tensor]]:
    with process_group("cpu", 60) as ranks:
        compact = _exchanged(ranks)
        exchange.ALIGNMENT["gloo"] = 16  # as for NCCL
        return [compact, _exchanged(ranks)]


def _exchanged(ranks: Ranks) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, gradients and counts of a rank."""
    mine, wire = ranks.rank, Wire(WireConfig())
    wire.register("t")
    sent, received = SENT[mine], [of_rank[mine] for of_rank in SENT]
    random = torch.Generator().manual_seed(mine)
    values = torch.randn(sum(sent), 5, generator=random, requires_grad=True)
    rows = Exchange(
        wire,
        ranks.group,
        owner=stacked([[RowSpan(rows, LAYOUT)] for rows in sent]),
        requester=stacked([[RowSpan(rows, LAYOUT)] for rows in received]),
        requester_shape=(sum(received), 5),
        counted=[(LAYOUT, sent[1 - mine])],
    ).start(values)
    got = rows.wait()
    got.backward(torch.randn(got.shape, generator=random))
    assert values.grad is not None
    return got.detach(), values.grad, wire.pop_counts()[0, :, 0]


def test_segments_that_are_padded_for_nccl_bring_the_same_rows() -> None:
    for sent, (compact, padded) in zip(SENT, two_ranks.run(exchanged), strict=True):
        assert len(compact[0]) and all(torch.equal(a, b) for a, b in zip(compact[:2], padded[:2], strict=True))
        away = sent[1] if sent is SENT[0] else sent[0]
        assert compact[2].tolist() == padded[2].tolist() == [away * ROW] * 2
