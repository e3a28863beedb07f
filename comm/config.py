"""What the wire can be told. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

from logitmix.common.mappings import require

Precision = Literal["fp32", "bf16", "fp16", "fp8"]
BackwardPrecision = Literal["fp32", "bf16", "fp16", "fp8", "fp8_stochastic"]
DensePrecision = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class WireConfig:
    """The all-to-all that switches between model and data parallelism (section 4.4)."""

    forward: Precision = "fp8"
    """Embeddings on their way to the ranks that asked; fp8 is E4M3 with one scale per row."""
    backward: BackwardPrecision = "fp8"
    """Gradients on their way back; fp8 is E5M2 with one scale per row. fp8_stochastic rounds up or down by chance, a
    function of seed and step, so that the mean is exact; each error may be twice as large."""
    dense: DensePrecision = "fp32"
    """The tower's gradients on their way through DDP's all-reduce; bf16 halves them and adds them up in BF16."""
    parts: int = 1
    """Parts in which rows and their gradients cross: while one is under way, another is looked up, encoded, decoded or
    updated. A few pay where many rows cross a slow link."""
    emulate: bool = False
    """At world size 1, where nothing is sent, apply the rounding all the same."""
    timeout_seconds: int = 600
    """How long a collective waits for the other ranks."""

    def __post_init__(self) -> None:
        for name in ("parts", "timeout_seconds"):
            require(getattr(self, name) >= 1, f"comm.{name}", getattr(self, name), "at least 1")
