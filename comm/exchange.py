"""The exchange of embedding rows between ranks, in a precision of its own in each direction (section 4.4).

Everything is one all-to-all of bytes. Forward, the ranks that own rows (the owner end) send them to the ranks that
asked for them (the requester end), which decode them to FP32; backward, the gradients go the other way. If several
owners hold parts of one sum (a pooled table sharded by rows), they send the encoded parts, which are added in FP32 on
arrival: encoded bytes cannot be added on the way. Both directions run while the caller computes, until `wait`.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.types import Awaitable, NoWait

from logitmix.comm.codec import DIRECTIONS, FP32, Codec, RowLayout, width_of
from logitmix.comm.config import CODECS, Direction, WireConfig


class RowSpan(NamedTuple):
    """Consecutive rows of one layout."""

    rows: int
    layout: RowLayout


class CodedRows(NamedTuple):
    """Rows that are encoded together, and their place in a tensor, in elements."""

    rows: int
    layout: RowLayout
    start: int
    stride: int

    def view_in(self, tensor: Tensor) -> Tensor:
        """Returns the block as a matrix [rows, width of the layout], without a copy."""
        shape = (self.rows, width_of(self.layout))
        return tensor.as_strided(shape, (self.stride, 1), tensor.storage_offset() + self.start)


class End(NamedTuple):
    """One end of an exchange: the spans of rows that go to or come from each rank, and how all lie in memory."""

    spans_by_rank: Sequence[Sequence[RowSpan]]
    blocks: Sequence[CodedRows]


def stacked(spans_by_rank: Sequence[Sequence[RowSpan]]) -> End:
    """Returns a flat tensor of the ranks' spans, one after the other."""
    blocks, start = [], 0
    for layout, alike in groupby((span for spans in spans_by_rank for span in spans), key=lambda span: span.layout):
        rows, width = sum(span.rows for span in alike), width_of(layout)
        blocks.append(CodedRows(rows, layout, start, width))
        start += rows * width
    return End(spans_by_rank, blocks)


def side_by_side(rows: int, layout_by_rank: Sequence[RowLayout]) -> End:
    """Returns a matrix of `rows` rows in which each rank's segments stand next to one another."""
    stride = sum(map(width_of, layout_by_rank))
    blocks, start = [], 0
    for layout in layout_by_rank:
        blocks.append(CodedRows(rows, layout, start, stride))
        start += width_of(layout)
    return End([[RowSpan(rows, layout)] for layout in layout_by_rank], blocks)


_SAMPLED_ROWS = 4096
QUALITY = ("squared_error", "squares")


class Wire:
    """What crosses the wire of one model, counted by table and direction.

    Counted at the owner of a row: what it sends forward, and what it receives backward. Rows that stay on their rank
    are not counted. The sums over all ranks are the bytes that all ranks sent.
    """

    def __init__(self, config: WireConfig, seed: int = 0) -> None:
        self.config = config
        self.codecs: dict[Direction, Codec] = {of: CODECS[of].find(getattr(config, of)) for of in DIRECTIONS}
        self.seed = seed
        self.sampling = False
        self._step = self._exchanges = 0
        self._index: dict[str, int] = {}
        self._clear()

    def begin_step(self, step: int, sampling: bool = False) -> None:
        """Begins a training step. `sampling` measures its rounding; it must be the same on all ranks.

        The step seeds stochastic rounding, so that a resumed run rounds as an uninterrupted one.
        """
        self._step, self._exchanges, self.sampling = step, 0, sampling

    @property
    def tables(self) -> list[str]:
        return list(self._index)

    def pop_counts(self) -> Tensor:
        """Counts since the last call, float64 [tables, 2 directions, 2 + 2]: bytes, FP32 bytes, and the sums named by
        QUALITY over the sampled rows. To be summed over the ranks."""
        for direction, layout, rows_by_segment in self._on_device:
            for segment, rows in zip(layout, rows_by_segment.tolist(), strict=True):
                self.count(direction, (segment,), rows)
        counts = torch.zeros(len(self._index), len(DIRECTIONS), 2 + len(QUALITY), dtype=torch.float64)
        counts[..., :2] = torch.tensor(self._bytes).view(-1, 2, 2)
        for (table, direction), sums in self._quality.items():
            counts[self._index[table], DIRECTIONS.index(direction), 2:] = sums.cpu()
        self._clear()
        return counts

    def register(self, table: str) -> None:
        self._index.setdefault(table, len(self._index))
        self._clear()

    def count(self, direction: Direction, layout: RowLayout, rows: int | Tensor) -> None:
        """Counts sent rows: a number, or a tensor with one number per segment while only the device knows it."""
        if isinstance(rows, Tensor):
            self._on_device.append((direction, layout, rows))
            return
        codec = self.codecs[direction]
        for segment in layout:
            count = self._bytes[self._index[segment.table]][DIRECTIONS.index(direction)]
            count[0] += rows * codec.row_bytes((segment,))
            count[1] += rows * segment.width * 4

    def sample(self, direction: Direction, values_RW: Tensor, encoded: Tensor, layout: RowLayout) -> None:
        """Adds the rounding errors of these rows, or of some thousands of them spread evenly."""
        stride = max(1, len(values_RW) // _SAMPLED_ROWS)
        values_RW, encoded = values_RW[::stride].contiguous(), encoded[::stride].contiguous()
        codec = self.codecs[direction]
        received_RW = torch.empty(values_RW.shape, device=values_RW.device)
        codec.decode(encoded, layout, received_RW)
        finite = values_RW.isfinite()
        exact = torch.where(finite, values_RW, 0.0).double()
        error = torch.where(finite & received_RW.isfinite(), received_RW - exact, 0.0)
        each = torch.stack([error**2, exact**2]).sum(1)
        widths = [segment.width for segment in layout]
        for segment, sums in zip(layout, each.split(widths, dim=1), strict=True):
            key = segment.table, direction
            self._quality[key] = self._quality.get(key, 0.0) + sums.sum(1)

    def next_seed(self, direction: Direction, rank: int) -> int | None:
        """Returns the seed of one exchange, a function of the step and of the exchange's number in it; None rounds to
        nearest."""
        if not self.codecs[direction].stochastic:
            return None
        self._exchanges += 1
        key = repr((self.seed, self._step, self._exchanges, rank)).encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 2

    def _clear(self) -> None:
        self._bytes = [[[0, 0], [0, 0]] for _ in self._index]
        self._quality: dict[tuple[str, Direction], Tensor] = {}
        self._on_device: list[tuple[Direction, RowLayout, Tensor]] = []


@dataclass
class Exchange:
    """One collective: rows forward, gradients backward.

    `requester_shape` is the shape of the received tensor. With `summed`, the ranks send addends of it, which are
    stacked along a new first axis and summed. `order` is the order [R] in which the owner's rows are sent. `counted`
    are the rows that leave this owner; they are counted in both directions.
    """

    wire: Wire
    group: dist.ProcessGroup
    owner: End
    requester: End
    requester_shape: Sequence[int]
    summed: bool = False
    order: Tensor | None = None
    counted: Sequence[tuple[RowLayout, int | Tensor]] = ()
    owner_like: tuple[torch.Size, torch.dtype] | None = None
    """Of the owner's values, where gradients are received of rows that were not sent."""
    _in_flight: "_InFlight | None" = None

    def start(self, values: Tensor) -> Awaitable[Tensor]:
        """Sends the owner's values; differentiable, collective."""
        if self.group.size() == 1 and not self.wire.config.emulate:
            return NoWait(values.view(tuple(self.requester_shape)))
        return _RowsInFlight(self, _SendRows.apply(self, values))

    def send_rows(self, values: Tensor) -> None:
        self.owner_like = values.shape, values.dtype
        values = values if self.order is None else values.index_select(0, self.order)
        self._send("forward", self._encode("forward", values, self.owner), self.owner, self.requester)

    def receive_rows(self) -> Tensor:
        shape = (self.group.size(), *self.requester_shape) if self.summed else self.requester_shape
        values = self._decode("forward", self.requester, shape)
        return values.sum(0) if self.summed else values

    def send_gradients(self, gradient: Tensor) -> None:
        if not self.summed:
            encoded = self._encode("backward", gradient, self.requester)
        else:
            # Every addend has the same gradient: encoded once, sent to each.
            addend = stacked(self.requester.spans_by_rank[:1])
            encoded = self._encode("backward", gradient, addend).repeat(self.group.size())
        self._send("backward", encoded, self.requester, self.owner)

    def receive_gradients(self) -> Tensor:
        assert self.owner_like is not None
        shape, dtype = self.owner_like
        gradient = self._decode("backward", self.owner, shape)
        if get_gradient_division():
            gradient.div_(self.group.size())
        if self.order is not None:
            gradient = torch.empty_like(gradient).index_copy_(0, self.order, gradient)
        return gradient.to(dtype)

    def _encode(self, direction: Direction, values: Tensor, end: End) -> Tensor:
        codec, values = self.wire.codecs[direction], values.detach().contiguous()
        if _sent_as_is(codec, end) and values.dtype == torch.float32 and values.numel():
            encoded = values.view(-1).view(torch.uint8)
        else:
            size = sum(block.rows * codec.row_bytes(block.layout) for block in end.blocks)
            encoded = torch.empty(size, dtype=torch.uint8, device=values.device)
            seed = self.wire.next_seed(direction, self.group.rank())
            for number, (block, rows) in enumerate(_wire_rows(codec, encoded, _merged(end))):
                codec.encode(block.view_in(values), block.layout, rows, None if seed is None else seed + number)
        if self.wire.sampling:
            for block, rows in _wire_rows(codec, encoded, end):
                self.wire.sample(direction, block.view_in(values), rows, block.layout)
        return encoded

    def _decode(self, direction: Direction, end: End, shape: Sequence[int]) -> Tensor:
        assert self._in_flight is not None
        encoded, self._in_flight = self._in_flight.wait(), None
        codec = self.wire.codecs[direction]
        if _sent_as_is(codec, end) and encoded.numel():
            return encoded.view(torch.float32).view(tuple(shape))
        values = torch.empty(tuple(shape), dtype=torch.float32, device=encoded.device)
        for block, rows in _wire_rows(codec, encoded, end):
            codec.decode(rows, block.layout, block.view_in(values))
        return values

    def _send(self, direction: Direction, encoded: Tensor, sender: End, receiver: End) -> None:
        codec = self.wire.codecs[direction]
        send, receive = (
            [sum(span.rows * codec.row_bytes(span.layout) for span in spans) for spans in end.spans_by_rank]
            for end in (sender, receiver)
        )
        self._in_flight = _all_to_all(encoded, send, receive, self.group)
        for layout, rows in self.counted:
            self.wire.count(direction, layout, rows)


ALIGNMENT = {"gloo": 1}
"""Bytes that a rank's segment begins at a multiple of, by backend; with others it is 16: NCCL copies a segment that
begins elsewhere byte by byte."""


def _padded(sizes: list[int], group: dist.ProcessGroup) -> list[int]:
    """Returns the bytes of segments of these sizes on the wire."""
    step = ALIGNMENT.get(dist.get_backend(group), 16)
    return [-(-size // step) * step for size in sizes]


@dataclass
class _InFlight:
    """Bytes on their way: from each rank so many, padded on the wire. `sent` must live until they have arrived."""

    received: Tensor
    sent: Tensor
    pending: list[dist.Work]
    sizes: list[int]
    padded: list[int]

    def wait(self) -> Tensor:
        for work in self.pending:
            work.wait()
        if self.received.is_cuda:
            self.received.record_stream(torch.cuda.current_stream())
        if self.padded == self.sizes:
            return self.received
        compact = self.received.new_empty(sum(self.sizes))
        _copy_segments(compact.split(self.sizes), self.received.split(self.padded), self.sizes)
        return compact


def _copy_segments(targets: Sequence[Tensor], sources: Sequence[Tensor], sizes: Sequence[int]) -> None:
    """Copies the first bytes of each segment, in few kernels whatever the number of ranks."""
    there = [rank for rank, size in enumerate(sizes) if size]
    torch._foreach_copy_(
        [targets[rank][: sizes[rank]] for rank in there], [sources[rank][: sizes[rank]] for rank in there]
    )


def _all_to_all(encoded: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> _InFlight:
    """Starts an all-to-all of bytes, of which each rank gets and sends so many, without waiting for it."""
    if group.size() == 1:
        return _InFlight(encoded, encoded, [], send, send)
    sent, to_send, to_receive = encoded, _padded(send, group), _padded(receive, group)
    if to_send != send:
        sent = encoded.new_empty(sum(to_send))
        _copy_segments(sent.split(to_send), encoded.split(send), send)
    received = torch.empty(sum(to_receive), dtype=torch.uint8, device=encoded.device)
    if dist.get_backend(group) != "gloo":
        work = dist.all_to_all_single(received, sent, to_receive, to_send, group=group, async_op=True)
        return _InFlight(received, sent, [work], receive, to_receive)
    # gloo's own all-to-all sends before it receives, so a link mostly carries one direction at a time.
    theirs, ours = received.split(to_receive), sent.split(to_send)
    mine, W = group.rank(), group.size()
    others = [(mine + shift) % W for shift in range(1, W)]
    pending = [group.recv([theirs[rank]], rank, 0) for rank in others if receive[rank]]
    pending += [group.send([ours[rank]], rank, 0) for rank in others if send[rank]]
    theirs[mine].copy_(ours[mine])
    return _InFlight(received, sent, pending, receive, to_receive)


def _sent_as_is(codec: Codec, end: End) -> bool:
    """Returns whether the wire's bytes are the tensor's own."""
    return codec == FP32 and len(end.blocks) == 1


def _merged(end: End) -> End:
    """Returns the end with one block in place of several that differ in the names of tables alone. These are told apart
    only to be sampled, which must not change what is rounded at random."""
    merged: list[CodedRows] = []
    for block in end.blocks:
        last = merged[-1] if merged else None
        widths = [segment.width for segment in block.layout]
        follows = last and block.start == last.start + last.rows * last.stride and block.stride == last.stride
        if last and follows and widths == [segment.width for segment in last.layout]:
            merged[-1] = last._replace(rows=last.rows + block.rows)
        else:
            merged.append(block)
    return end._replace(blocks=merged)


def _wire_rows(codec: Codec, encoded: Tensor, end: End) -> list[tuple[CodedRows, Tensor]]:
    """Returns each block with its rows of the wire [rows, bytes]; blocks without any are left out."""
    sizes = [block.rows * codec.row_bytes(block.layout) for block in end.blocks]
    pieces = encoded.split(sizes) if sizes else []
    pairs = zip(end.blocks, pieces, strict=True)
    return [(block, piece.view(block.rows, -1)) for block, piece in pairs if piece.numel()]


class _SendRows(torch.autograd.Function):
    """Forward, the owner sends its rows; backward, it waits for their gradient."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, values: Tensor) -> Tensor:
        ctx.exchange = exchange
        exchange.send_rows(values)
        # An empty tensor that connects the two halves in the graph.
        return values.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, Tensor]:
        return None, ctx.exchange.receive_gradients()


class _ReceiveRows(torch.autograd.Function):
    """Forward, the requester waits for its rows; backward, it sends their gradient."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, tie: Tensor) -> Tensor:
        ctx.exchange = exchange
        return exchange.receive_rows()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        ctx.exchange.send_gradients(gradient)
        return None, gradient.new_empty(0)


class _RowsInFlight(Awaitable[Tensor]):  # type: ignore[misc]
    def __init__(self, exchange: Exchange, tie: Tensor) -> None:
        super().__init__()
        self.exchange, self.tie = exchange, tie

    def _wait_impl(self) -> Tensor:
        return _ReceiveRows.apply(self.exchange, self.tie)


def split_backward(received: Tensor) -> GradientEdge:
    """Returns the edge that divides the backward of received rows into sending and waiting: `torch.autograd.grad` with
    respect to it sends their gradient, `torch.autograd.backward` from it waits for the gradients that the other ranks
    sent. For rows that were not exchanged it is their own edge."""
    edge = get_gradient_edge(received)
    node: Node | None = edge.node
    while node and node.name() != f"{_SendRows.__name__}Backward":
        node = node.next_functions[0][0] if node.next_functions else None
    return GradientEdge(node, 0) if node else edge
