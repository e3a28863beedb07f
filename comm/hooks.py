"""Which collective gets which codec (section 4.4, «FP8 Quantized Communication»).

For any TorchRec model, three lines beside the plan that it is sharded by:

    meter = WireMeter(rank)
    codecs = codecs_registry(WireConfig(), common_row_dim(plan), meter)
    sharder = EmbeddingCollectionSharder(qcomm_codecs_registry=codecs)

Two collectives carry the codecs: the all-to-all of sequence embeddings (EmbeddingCollection, sharded
row-wise, table-wise or column-wise) and that of pooled embeddings (EmbeddingBagCollection, table-wise
or column-wise). A pooled table sharded row-wise goes through a reduce-scatter instead, which sums what it
carries; bytes of FP8 cannot be summed, so such a table is refused at its first batch, never sent in
another precision unasked. At world size 1 TorchRec sends nothing and calls no codec: see `roundtrip`.

TorchRec hands a codec flat tensors without their shape, so that the length of a wire row is agreed beforehand:
`row_dim` divides the width of every shard. It is the embedding dimension where all tables share one and none is
split by columns. A row costs 4 bytes for its scale: dimensions with a large common divisor travel best.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torchrec.distributed.types import CommOp, ParameterSharding, QuantizedCommCodecs, ShardingPlan

from logitmix.comm.config import Precision, WireConfig
from logitmix.comm.fp8 import BACKWARD_FP8, FORWARD_FP8, HALVES, SCALE_BYTES, dequantize_rowwise, quantize_rowwise

Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class WireBytes:
    """Bytes that left this rank, and what FP32 would have sent in their place."""

    forward_bytes: int = 0
    backward_bytes: int = 0
    forward_fp32_bytes: int = 0
    backward_fp32_bytes: int = 0


@dataclass
class WireMeter:
    """Counts the bytes that leave this rank; what a rank keeps for itself crosses no wire and is left out.

    `rank` is the place in the group that the tables are sharded over.
    """

    rank: int
    forward_bytes: int = 0
    backward_bytes: int = 0
    forward_fp32_bytes: int = 0
    backward_fp32_bytes: int = 0

    def add(self, direction: Direction, sent: int, fp32: int) -> None:
        if direction == "forward":
            self.forward_bytes += sent
            self.forward_fp32_bytes += fp32
        else:
            self.backward_bytes += sent
            self.backward_fp32_bytes += fp32

    def take(self) -> WireBytes:
        """What was counted since the last call."""
        taken = WireBytes(self.forward_bytes, self.backward_bytes, self.forward_fp32_bytes, self.backward_fp32_bytes)
        self.forward_bytes = self.backward_bytes = self.forward_fp32_bytes = self.backward_fp32_bytes = 0
        return taken


def codecs_registry(
    wire: WireConfig, row_dim: int, meter: WireMeter | None = None
) -> dict[str, QuantizedCommCodecs] | None:
    """What TorchRec's sharders take as `qcomm_codecs_registry`; None where there is nothing to do.

    `row_dim`: elements that share a scale, see `common_row_dim`; only FP8 heeds it. Each direction has its own
    precision. A meter counts FP32 as well, which is sent as it is.

    Raises ValueError for a row_dim below 1.
    """
    if row_dim < 1:
        raise ValueError(f"row_dim is {row_dim}; it must be at least 1, such as the embedding dimension")
    if wire.forward == wire.backward == "fp32" and meter is None:
        return None
    codecs = QuantizedCommCodecs(
        forward=_codec(wire.forward, "forward", row_dim, meter),
        backward=_codec(wire.backward, "backward", row_dim, meter),
    )
    registry = {
        CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL.name: codecs,
        CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name: codecs,
    }
    if not wire.forward == wire.backward == "fp32":
        refusal = QuantizedCommCodecs(forward=RefusingCodec("forward"), backward=RefusingCodec("backward"))
        registry[CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER.name] = refusal
    return registry


def common_row_dim(plan: ShardingPlan | Mapping[str, ParameterSharding]) -> int:
    """The largest number of columns that divides every shard of a plan, or of one module's part of it.

    1 for a plan that shards nothing, such as a purely data-parallel one.
    """
    modules = plan.plan.values() if isinstance(plan, ShardingPlan) else [plan]
    widths = [
        shard.shard_sizes[1]
        for module in modules
        for table in module.values()
        for shard in (table.sharding_spec.shards if table.sharding_spec is not None else [])
    ]
    return math.gcd(*widths) or 1


@dataclass
class WireContext:
    """One collective's state between its `encode` and its `calc_quantized_size` calls."""

    sizes_asked: int = 0
    element_size: int = 1
    # TorchRec reads both to undo its own padding, of which there is none.
    padded_dim_sum_per_rank: list[int] | None = None
    row_dim: int = 0


class WireCodec:
    """TorchRec's `QuantizedCommCodec`, counting; this one sends tensors as they are."""

    def __init__(self, direction: Direction, meter: WireMeter | None) -> None:
        self.direction = direction
        self.meter = meter

    @property
    def quantized_dtype(self) -> torch.dtype:
        return torch.float32

    def create_context(self) -> WireContext:
        return WireContext()

    def padded_size(
        self, input_tensor: torch.Tensor, dim_per_rank: list[int], my_rank: int, qcomm_ctx: WireContext
    ) -> tuple[int, int]:
        """(columns, padding) of a pooled tensor [B, columns]; there is never any padding."""
        return input_tensor.shape[-1], 0

    def encode(self, input_tensor: torch.Tensor, ctx: WireContext | None = None) -> torch.Tensor:
        """Any shape to a flat wire tensor, the pieces for the ranks one after the other."""
        sent = self._to_wire(input_tensor)
        if self.meter is not None:
            self.meter.add(self.direction, sent.numel() * sent.element_size(), input_tensor.numel() * 4)
        if ctx is not None:
            ctx.element_size = sent.element_size()
        return sent

    def decode(self, input_grad: torch.Tensor, ctx: WireContext | None = None) -> torch.Tensor:
        """A received wire tensor to flat FP32 values."""
        return input_grad

    def calc_quantized_size(self, input_len: int, ctx: WireContext | None = None) -> int:
        """Wire elements that `input_len` values take; asked once for every rank's piece."""
        size = self._wire_len(input_len)
        if self.meter is not None and ctx is not None:
            # TorchRec asks for what goes to each rank and for what comes from each, in an order of
            # its own; a rank's piece for itself stands at the same place in both.
            if ctx.sizes_asked == self.meter.rank:
                self.meter.add(self.direction, -size * ctx.element_size, -input_len * 4)
            ctx.sizes_asked += 1
        return size

    def _to_wire(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous()

    def _wire_len(self, input_len: int) -> int:
        return input_len


class HalfCodec(WireCodec):
    """BF16 or FP16, sent as bytes since not every backend knows both. FP16 turns what it cannot hold into infinity."""

    def __init__(self, dtype: torch.dtype, direction: Direction, meter: WireMeter | None) -> None:
        super().__init__(direction, meter)
        self.dtype = dtype

    @property
    def quantized_dtype(self) -> torch.dtype:
        return torch.uint8

    def decode(self, input_grad: torch.Tensor, ctx: WireContext | None = None) -> torch.Tensor:
        return input_grad.view(self.dtype).float()

    def _to_wire(self, tensor: torch.Tensor) -> torch.Tensor:
        _refuse_autograd(tensor)
        # A fresh flat tensor: an empty one with other strides could not be viewed as bytes.
        flat = torch.empty(tensor.numel(), dtype=self.dtype, device=tensor.device)
        return flat.copy_(tensor.reshape(-1)).view(torch.uint8)

    def _wire_len(self, input_len: int) -> int:
        return input_len * 2


class Fp8Codec(WireCodec):
    """Rows of `row_dim` elements, each one byte, and a scale per row."""

    def __init__(self, dtype: torch.dtype, row_dim: int, direction: Direction, meter: WireMeter | None) -> None:
        super().__init__(direction, meter)
        self.dtype = dtype
        self.row_dim = row_dim

    @property
    def quantized_dtype(self) -> torch.dtype:
        return torch.uint8

    def padded_size(
        self, input_tensor: torch.Tensor, dim_per_rank: list[int], my_rank: int, qcomm_ctx: WireContext
    ) -> tuple[int, int]:
        # Here every rank knows every rank's columns, so that all raise together and none waits.
        for columns in dim_per_rank:
            self._check(columns)
        return super().padded_size(input_tensor, dim_per_rank, my_rank, qcomm_ctx)

    def decode(self, input_grad: torch.Tensor, ctx: WireContext | None = None) -> torch.Tensor:
        rows = input_grad.view(-1, self.row_dim + SCALE_BYTES)
        return dequantize_rowwise(rows, self.row_dim, self.dtype).view(-1)

    def _to_wire(self, tensor: torch.Tensor) -> torch.Tensor:
        _refuse_autograd(tensor)
        self._check(tensor.shape[-1])
        return quantize_rowwise(tensor.reshape(-1, self.row_dim), self.dtype).view(-1)

    def _wire_len(self, input_len: int) -> int:
        self._check(input_len)
        return input_len // self.row_dim * (self.row_dim + SCALE_BYTES)

    def _check(self, elements: int) -> None:
        if elements % self.row_dim:
            raise ValueError(
                f"row_dim ({self.row_dim}) does not divide a piece of {elements} embedding elements; "
                "give codecs_registry the common_row_dim of the plan that the model is sharded by"
            )


class RefusingCodec(WireCodec):
    """Stands where a sum is taken on the way."""

    def __init__(self, direction: Direction) -> None:
        super().__init__(direction, None)

    def _to_wire(self, tensor: torch.Tensor) -> torch.Tensor:
        raise ValueError(
            "a pooled table sharded row-wise is sent by reduce-scatter, which no codec here can carry; shard it "
            "table_wise or column_wise, or set comm.forward and comm.backward to fp32"
        )


def _codec(precision: Precision, direction: Direction, row_dim: int, meter: WireMeter | None) -> WireCodec:
    if precision == "fp32":
        return WireCodec(direction, meter)
    if precision == "fp8":
        return Fp8Codec(FORWARD_FP8 if direction == "forward" else BACKWARD_FP8, row_dim, direction, meter)
    return HalfCodec(HALVES[precision], direction, meter)


def _refuse_autograd(tensor: torch.Tensor) -> None:
    """TorchRec's synchronous collectives encode in the open graph, where a gradient would end at the bytes."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "TorchRec's synchronous collectives have no backward codec; leave the sharded tables uncompiled"
        )
