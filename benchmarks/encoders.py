"""Time per FLOP of one block of each sequence model, forward and backward, on one thread.

    python -m benchmarks.encoders

The shape is that of a batch of MovieLens-1M: 32 sequences of 20 to 200 positions. FLOPs are those of the matrix
products that the definition needs, two for each multiply-add: a linear layer takes every position, attention each
position with itself and those before it; backward takes twice as many. What a form computes beyond that, such as
products with what lies ahead of a position or behind a sequence, adds to its time alone.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.measure import machine, milliseconds, spread
from logitmix.modules.batch import Packing
from logitmix.modules.config import EncoderConfig, HSTUConfig, SASRecConfig
from logitmix.modules.encoders import hstu
from logitmix.modules.encoders.build import build_encoder
from logitmix.modules.encoders.hstu_attention import attend_plain
from logitmix.modules.noise import Noise

ENCODERS: dict[str, EncoderConfig] = {
    "SASRec": SASRecConfig(heads=2),
    "HSTU": HSTUConfig(heads=2),
    "HSTU, times": HSTUConfig(heads=2, times=True),
}


@dataclass(frozen=True)
class Options:
    dim: int = 64
    sequences: int = 32
    repetitions: int = 50


def main(options: Options) -> None:
    torch.set_num_threads(1)
    packing = batch(options.sequences)
    methods, flops = {}, {}
    for name, config in ENCODERS.items():
        block, count = block_of(options.dim, config), 3 * forward_flops(options.dim, config, packing)
        for dtype in (torch.float32, torch.bfloat16):
            arm = f"{name}, {'FP32' if dtype == torch.float32 else 'BF16'}"
            step = partial(step_of, block, packing, options.dim, dtype)
            methods[arm], flops[arm] = step, count
            if name != "SASRec":
                methods[f"{arm}, plain torch"], flops[f"{arm}, plain torch"] = partial(plainly, step), count
    times = milliseconds(methods, options.repetitions)
    positions = int(packing.offset_B[-1])
    table = Table("block", "MFLOP", "ms", "ps per FLOP", title=f"{positions} positions, D = {options.dim}, 2 heads")
    for name, of in times.items():
        each = statistics.median(of) * 1e9 / flops[name]
        table.add_row(name, f"{flops[name] / 1e6:.0f}", spread(of, 2), f"{each:.1f}")
    Console(width=120).print(table)
    print(f"Median of {options.repetitions} (range), 1 thread; {machine()}.")


def batch(sequences: int) -> Packing:
    generator = torch.Generator().manual_seed(0)
    lengths_B = torch.randint(20, 201, (sequences,), generator=generator)
    gap_T = 2 ** torch.randint(25, (int(lengths_B.sum()) + 1,), generator=generator)
    time_T = gap_T.cumsum(0)
    return Packing(lengths_B, 0, time_T[:-1].contiguous(), time_T[1:].contiguous())


def block_of(dim: int, config: EncoderConfig) -> nn.Module:
    encoder = build_encoder(dim, config)
    encoder.reset_parameters(torch.Generator().manual_seed(0))
    return encoder.blocks[0]


def forward_flops(dim: int, config: EncoderConfig, packing: Packing) -> int:
    """Of a block, for all positions."""
    squares = 6 if isinstance(config, SASRecConfig) else 5
    lengths_B = packing.lengths_B
    pairs = int((lengths_B * (lengths_B + 1) // 2).sum())
    return 2 * (squares * dim**2 * int(lengths_B.sum()) + 2 * dim * pairs)


def step_of(block: nn.Module, packing: Packing, dim: int, dtype: torch.dtype) -> Tensor:
    """Forward and backward of a step of training."""
    x_TD = torch.ones(int(packing.offset_B[-1]), dim).cumsum(0).sin().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        out_TD = block(x_TD, packing, Noise(1))
    out_TD.float().square().sum().backward()
    assert x_TD.grad is not None
    return x_TD.grad


def plainly(step: Callable[[], Tensor]) -> Tensor:
    with patch.object(hstu, "attend", attend_plain):
        return step()


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
