"""The exchange of embedding rows between ranks, in a precision of its own in each direction (section 4.4).

Everything is one all-to-all of bytes. Forward, the ranks that own rows (the owner side) send them to the ranks that
asked (the asker side), and what arrives is decoded to FP32; backward, the gradients go the other way. Where several
owners hold parts of one sum (a pooled table sharded by rows) the parts travel encoded and are added in FP32 on
arrival: encoded bytes cannot be added on the way. Both directions run while the caller computes, until `wait`.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.types import Awaitable, NoWait

from logitmix.comm.config import BackwardPrecision, WireConfig
from logitmix.comm.fp8 import BACKWARD_FP8, FORWARD_FP8, SCALE_BYTES, dequantize_rowwise, quantize_rowwise

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


class Column(NamedTuple):
    """One feature's place in a wire row: FP8 gives it a scale of its own."""

    table: str
    width: int


Columns = tuple[Column, ...]
Rows = tuple[int, Columns]
"""How many rows, and what stands in each."""


class Part(NamedTuple):
    """Rows that are encoded together: where they lie in a tensor, in elements."""

    rows: int
    columns: Columns
    start: int
    stride: int

    def of(self, tensor: Tensor) -> Tensor:
        """The part as a matrix [rows, sum of widths], without a copy."""
        shape = (self.rows, _width(self.columns))
        return tensor.as_strided(shape, (self.stride, 1), tensor.storage_offset() + self.start)


class Side(NamedTuple):
    """One end of an exchange: what goes to or comes from each rank, and how all of it lies in memory."""

    shares: Sequence[Sequence[Rows]]
    parts: Sequence[Part]


def stacked(shares: Sequence[Sequence[Rows]]) -> Side:
    """A flat tensor, the ranks' shares one after the other."""
    parts, start = [], 0
    for columns, run in groupby((rows for share in shares for rows in share), key=lambda rows: rows[1]):
        count, width = sum(rows for rows, _ in run), _width(columns)
        parts.append(Part(count, columns, start, width))
        start += count * width
    return Side(shares, parts)


def side_by_side(rows: int, columns_per_rank: Sequence[Columns]) -> Side:
    """A matrix of `rows` rows in which each rank's columns stand next to one another."""
    stride = sum(map(_width, columns_per_rank))
    parts, start = [], 0
    for columns in columns_per_rank:
        parts.append(Part(rows, columns, start, stride))
        start += _width(columns)
    return Side([[(rows, columns)] for columns in columns_per_rank], parts)


def _width(columns: Columns) -> int:
    return sum(column.width for column in columns)


class Codec:
    """Rows as bytes and back, by a cast to FP32, BF16 or FP16. FP16 turns what it cannot hold into infinity."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def row_bytes(self, columns: Columns) -> int:
        return self.dtype.itemsize * _width(columns)

    def encode(self, values_RW: Tensor, columns: Columns, wire: Tensor, seed: int | None) -> None:
        wire.view(self.dtype).copy_(values_RW)

    def decode(self, wire: Tensor, columns: Columns, values_RW: Tensor) -> None:
        values_RW.copy_(wire.view(self.dtype))

    def clipped(self, values_RW: Tensor, wire: Tensor, columns: Columns) -> Tensor:
        """Which finite values [R, W] the format cannot hold."""
        return values_RW.isfinite() & ~wire.view(self.dtype).isfinite()


class Fp8Codec(Codec):
    """One byte an element, and a scale for each feature of a row."""

    def row_bytes(self, columns: Columns) -> int:
        return _width(columns) + SCALE_BYTES * len(columns)

    def encode(self, values_RW: Tensor, columns: Columns, wire: Tensor, seed: int | None) -> None:
        quantize_rowwise(values_RW, self.dtype, _widths(columns), seed, out=wire)

    def decode(self, wire: Tensor, columns: Columns, values_RW: Tensor) -> None:
        dequantize_rowwise(wire, self.dtype, _widths(columns), out=values_RW)

    def clipped(self, values_RW: Tensor, wire: Tensor, columns: Columns) -> Tensor:
        scales = [
            part[:, -SCALE_BYTES:].contiguous().view(torch.bfloat16)
            for part in wire.split([width + SCALE_BYTES for width in _widths(columns)], dim=1)
        ]
        limit_RW = torch.cat(
            [scale.float().expand(-1, width) for scale, width in zip(scales, _widths(columns), strict=True)], dim=1
        )
        return values_RW.isfinite() & (values_RW.abs() > limit_RW)


def _widths(columns: Columns) -> list[int]:
    return [column.width for column in columns]


def codec_for(precision: BackwardPrecision, direction: Direction) -> Codec:
    if precision in ("fp8", "fp8_stochastic"):
        return Fp8Codec(FORWARD_FP8 if direction == "forward" else BACKWARD_FP8)
    return Codec({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision])


_SAMPLED_ROWS = 4096
QUALITY = ("values", "saturated", "flushed", "squared_error", "squares")


class Wire:
    """What crosses the wire of one model, counted by table and direction.

    Counted at the owner of a row: forward what it sends, backward what it receives; what a rank keeps for itself
    crosses no wire and is left out. The sums over all ranks are the bytes that all ranks sent.
    """

    def __init__(self, config: WireConfig, seed: int = 0) -> None:
        self.config = config
        self.codecs = {
            "forward": codec_for(config.forward, "forward"),
            "backward": codec_for(config.backward, "backward"),
        }
        self.seed = seed
        self.sampling = False
        self._step = self._calls = 0
        self._place: dict[str, int] = {}
        self._clear()

    def begin(self, step: int, sampling: bool = False) -> None:
        """Says that a training step begins. `sampling` measures its rounding; alike on all ranks.

        The step seeds stochastic rounding, so that a run that is continued rounds as it would have.
        """
        self._step, self._calls, self.sampling = step, 0, sampling

    @property
    def tables(self) -> list[str]:
        return list(self._place)

    def take(self) -> Tensor:
        """Counts since the last call, float64 [tables, 2 directions, 2 + 5]: bytes, FP32 bytes, and the sums named by
        QUALITY over what was sampled. To be added up over the ranks."""
        for direction, columns, rows_T in self._late:
            for column, rows in zip(columns, rows_T.tolist(), strict=True):
                self.count(direction, (column,), rows)
        taken = torch.zeros(len(self._place), len(DIRECTIONS), 2 + len(QUALITY), dtype=torch.float64)
        taken[..., :2] = torch.tensor(self._bytes).view(-1, 2, 2)
        for (table, direction), sums in self._quality.items():
            taken[self._place[table], DIRECTIONS.index(direction), 2:] = sums.cpu()
        self._clear()
        return taken

    def register(self, table: str) -> None:
        self._place.setdefault(table, len(self._place))
        self._clear()

    def count(self, direction: Direction, columns: Columns, rows: int | Tensor) -> None:
        """Rows that crossed: a number, or one for each of the columns where only the device knows it yet."""
        if isinstance(rows, Tensor):
            self._late.append((direction, columns, rows))
            return
        codec = self.codecs[direction]
        for column in columns:
            count = self._bytes[self._place[column.table]][DIRECTIONS.index(direction)]
            count[0] += rows * codec.row_bytes((column,))
            count[1] += rows * column.width * 4

    def sample(self, direction: Direction, values_RW: Tensor, wire: Tensor, columns: Columns) -> None:
        """Adds what encoding did to these rows, or to some thousands of them spread evenly."""
        stride = max(1, len(values_RW) // _SAMPLED_ROWS)
        values_RW, wire = values_RW[::stride].contiguous(), wire[::stride].contiguous()
        codec = self.codecs[direction]
        received_RW = torch.empty(values_RW.shape, device=values_RW.device)
        codec.decode(wire, columns, received_RW)
        finite = values_RW.isfinite()
        exact = torch.where(finite, values_RW, 0.0).double()
        error = torch.where(finite & received_RW.isfinite(), received_RW - exact, 0.0)
        clipped = codec.clipped(values_RW, wire, columns)
        flushed = (exact != 0) & (received_RW == 0)
        each = torch.stack([finite.double(), clipped.double(), flushed.double(), error**2, exact**2]).sum(1)
        for column, sums in zip(columns, each.split(_widths(columns), dim=1), strict=True):
            place = column.table, direction
            self._quality[place] = self._quality.get(place, 0.0) + sums.sum(1)

    def next_seed(self, direction: Direction, rank: int) -> int | None:
        """The seed of one exchange, a function of the step and of what came before in it; None rounds to nearest."""
        if direction == "forward" or self.config.backward != "fp8_stochastic":
            return None
        self._calls += 1
        key = repr((self.seed, self._step, self._calls, rank)).encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 2

    def _clear(self) -> None:
        self._bytes = [[[0, 0], [0, 0]] for _ in self._place]
        self._quality: dict[tuple[str, Direction], Tensor] = {}
        self._late: list[tuple[Direction, Columns, Tensor]] = []


@dataclass
class Exchange:
    """One collective, there and back.

    `owner` and `asker` are its two ends, `asker_shape` the shape of what arrives. With `summed`, what arrives from the
    ranks are addends, stacked along a new first axis and summed. `order` is the order [R] in which the wire takes the
    owner's rows. `crossing` is what is counted for each direction: columns and rows that leave this owner.
    """

    wire: Wire
    group: dist.ProcessGroup
    owner: Side
    asker: Side
    asker_shape: Sequence[int]
    summed: bool = False
    order: Tensor | None = None
    crossing: Sequence[tuple[Columns, int | Tensor]] = ()
    _flying: tuple[Tensor, Tensor, list[dist.Work]] | None = field(default=None, repr=False)
    _owner_like: tuple[torch.Size, torch.dtype] | None = field(default=None, repr=False)

    def start(self, values: Tensor) -> Awaitable[Tensor]:
        """Sends the owner's values on their way; differentiable, collective."""
        if self.group.size() == 1 and not self.wire.config.emulate:
            return NoWait(values.view(tuple(self.asker_shape)))
        return _Arriving(self, _Depart.apply(self, values))

    def depart(self, values: Tensor) -> None:
        self._owner_like = values.shape, values.dtype
        values = values if self.order is None else values.index_select(0, self.order)
        self._fly("forward", self._encode("forward", values, self.owner), self.owner.shares, self.asker.shares)

    def arrive(self) -> Tensor:
        shape = (self.group.size(), *self.asker_shape) if self.summed else self.asker_shape
        values = self._decode("forward", self.asker, shape)
        return values.sum(0) if self.summed else values

    def depart_back(self, gradient: Tensor) -> None:
        if not self.summed:
            encoded = self._encode("backward", gradient, self.asker)
        else:
            # Every addend has the same gradient: encoded once, sent to each.
            encoded = self._encode("backward", gradient, stacked(self.asker.shares[:1])).repeat(self.group.size())
        self._fly("backward", encoded, self.asker.shares, self.owner.shares)

    def arrive_back(self) -> Tensor:
        assert self._owner_like is not None
        shape, dtype = self._owner_like
        gradient = self._decode("backward", self.owner, shape)
        if get_gradient_division():
            gradient.div_(self.group.size())
        if self.order is not None:
            gradient = torch.empty_like(gradient).index_copy_(0, self.order, gradient)
        return gradient.to(dtype)

    def _encode(self, direction: Direction, values: Tensor, side: Side) -> Tensor:
        codec, values = self.wire.codecs[direction], values.detach().contiguous()
        if _as_it_is(codec, side) and values.dtype == torch.float32 and values.numel():
            encoded = values.view(-1).view(torch.uint8)
        else:
            encoded = self._encode_parts(direction, values, side)
        if self.wire.sampling:
            for part, rows in _wire_rows(codec, encoded, side):
                self.wire.sample(direction, part.of(values), rows, part.columns)
        return encoded

    def _encode_parts(self, direction: Direction, values: Tensor, side: Side) -> Tensor:
        codec = self.wire.codecs[direction]
        size = sum(part.rows * codec.row_bytes(part.columns) for part in side.parts)
        encoded = torch.empty(size, dtype=torch.uint8, device=values.device)
        seed = self.wire.next_seed(direction, self.group.rank())
        for number, (part, rows) in enumerate(_wire_rows(codec, encoded, side)):
            codec.encode(part.of(values), part.columns, rows, None if seed is None else seed + number)
        return encoded

    def _decode(self, direction: Direction, side: Side, shape: Sequence[int]) -> Tensor:
        assert self._flying is not None
        encoded, _, under_way = self._flying
        for work in under_way:
            work.wait()
        self._flying = None
        if encoded.is_cuda:
            encoded.record_stream(torch.cuda.current_stream())
        codec = self.wire.codecs[direction]
        if _as_it_is(codec, side) and encoded.numel():
            return encoded.view(torch.float32).view(tuple(shape))
        values = torch.empty(tuple(shape), dtype=torch.float32, device=encoded.device)
        for part, rows in _wire_rows(codec, encoded, side):
            codec.decode(rows, part.columns, part.of(values))
        return values

    def _fly(self, direction: Direction, encoded: Tensor, to: Any, from_: Any) -> None:
        if self.group.size() == 1:
            self._flying = encoded, encoded, []
            return
        send, receive = (
            [sum(rows * self.wire.codecs[direction].row_bytes(columns) for rows, columns in share) for share in shares]
            for shares in (to, from_)
        )
        arriving = torch.empty(sum(receive), dtype=torch.uint8, device=encoded.device)
        # What departs must live until it has gone.
        self._flying = arriving, encoded, _all_to_all(arriving, encoded, receive, send, self.group)
        for columns, rows in self.crossing:
            self.wire.count(direction, columns, rows)


def _all_to_all(
    arriving: Tensor, departing: Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup
) -> list[dist.Work]:
    """Bytes, by rank. Begun, not waited for."""
    if dist.get_backend(group) != "gloo":
        work = dist.all_to_all_single(arriving, departing, receive, send, group=group, async_op=True)
        return [work]
    # gloo's own all-to-all sends before it receives, and then a link mostly carries one direction at a time.
    theirs, ours = arriving.split(receive), departing.split(send)
    mine, W = group.rank(), group.size()
    others = [(mine + shift) % W for shift in range(1, W)]
    under_way = [group.recv([theirs[rank]], rank, 0) for rank in others if receive[rank]]
    under_way += [group.send([ours[rank]], rank, 0) for rank in others if send[rank]]
    theirs[mine].copy_(ours[mine])
    return under_way


def _as_it_is(codec: Codec, side: Side) -> bool:
    """Whether the wire's bytes are the tensor's own."""
    return codec.dtype == torch.float32 and len(side.parts) == 1


def _wire_rows(codec: Codec, encoded: Tensor, side: Side) -> list[tuple[Part, Tensor]]:
    """Each part with its rows of the wire [rows, bytes]; parts without any are left out."""
    sizes = [part.rows * codec.row_bytes(part.columns) for part in side.parts]
    pieces = encoded.split(sizes) if sizes else []
    pairs = zip(side.parts, pieces, strict=True)
    return [(part, piece.view(part.rows, -1)) for part, piece in pairs if piece.numel()]


class _Depart(torch.autograd.Function):
    """Forward, what owners send departs; backward, the gradient has arrived."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, values: Tensor) -> Tensor:
        ctx.exchange = exchange
        exchange.depart(values)
        # Ties the two halves together in the graph; it carries nothing.
        return values.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, Tensor]:
        return None, ctx.exchange.arrive_back()


class _Arrive(torch.autograd.Function):
    """Forward, what askers receive has arrived; backward, its gradient departs."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, tie: Tensor) -> Tensor:
        ctx.exchange = exchange
        return exchange.arrive()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        ctx.exchange.depart_back(gradient)
        return None, gradient.new_empty(0)


class _Arriving(Awaitable[Tensor]):
    def __init__(self, exchange: Exchange, tie: Tensor) -> None:
        super().__init__()
        self.exchange, self.tie = exchange, tie

    def _wait_impl(self) -> Tensor:
        arrived: Tensor = _Arrive.apply(self.exchange, self.tie)
        return arrived


def departure(arrived: Tensor) -> GradientEdge:
    """Where the backward of rows that have arrived comes to a wait: `torch.autograd.grad` with respect to it sends
    their gradient, `torch.autograd.backward` from it waits for what the other ranks have sent. Rows that crossed
    nothing depart at themselves."""
    edge = get_gradient_edge(arrived)
    node: Node | None = edge.node
    while node and node.name() != f"{_Depart.__name__}Backward":
        node = node.next_functions[0][0] if node.next_functions else None
    return GradientEdge(node, 0) if node else edge
