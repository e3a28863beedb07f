"""Settings of the wire. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from logitmix.common.mappings import require_from
from logitmix.common.plugins import Registry

Direction = Literal["forward", "backward"]
_CODEC, _NEEDS = "logitmix.comm.codec", ("stochastic", "row_bytes", "encode", "decode")
_CASTS = {"fp32": f"{_CODEC}:FP32", "bf16": f"{_CODEC}:BF16", "fp16": f"{_CODEC}:FP16"}
CODECS: Mapping[Direction, Registry[Any]] = {
    "forward": Registry("codec", {**_CASTS, "fp8": f"{_CODEC}:ROWS_FP8"}, _NEEDS, instances=True),
    "backward": Registry(
        "codec",
        {**_CASTS, "fp8": f"{_CODEC}:GRADIENTS_FP8", "fp8_stochastic": f"{_CODEC}:GRADIENTS_FP8_STOCHASTIC"},
        _NEEDS,
        instances=True,
    ),
}
"""Codecs (comm/codec.py) by direction and name. Reading settings imports none."""
DensePrecision = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class WireConfig:
    """The all-to-all that switches between model and data parallelism (section 4.4)."""

    forward: str = "fp8"
    """Precision of embeddings sent to the ranks that asked; fp8 is E4M3 with one scale per row."""
    backward: str = "fp8"
    """Precision of the gradients sent back; fp8 is E5M2 with one scale per row. fp8_stochastic rounds up or down at
    random, as a function of seed and step, so that the mean is exact; each error may be twice as large."""
    dense: DensePrecision = "fp32"
    """Precision of the tower's gradients where the ranks sum them; bf16 halves their bytes and sums them in BF16."""
    parts: int = 1
    """Number of parts in which rows and their gradients are exchanged: while one is in flight, another is looked up,
    encoded, decoded or updated. A few parts pay off when many rows cross a slow link."""
    emulate: bool = False
    """Apply the wire's rounding at world size 1 too, where nothing is sent."""
    timeout_seconds: int = 600
    """How long a collective waits for the other ranks."""

    def __post_init__(self) -> None:
        require_from(1, 1024, "comm.parts", self.parts)
        require_from(1, 7 * 86_400, "comm.timeout_seconds", self.timeout_seconds)


for _direction, _codecs in CODECS.items():
    _codecs.offer(WireConfig, _direction)
