"""The FP8 row-wise codec compared with other ways to send a row.

    python -m benchmarks.codec [--megabytes 64] [--repetitions 15] [--device cpu]

Speed: GB of FP32 rows per second, both ways, on one thread or one GPU; the rows are larger than the caches. "eager" is
the row-wise cast in plain eager PyTorch (largest magnitude, divide, cast; and back), "plain" the codec's definition in
torch. Repetitions of all methods are interleaved, and ratios are those of medians. INT8 and, on CUDA, FP8 are FBGEMM's
row-wise operations; the copy of the FP32 rows shows the device's bandwidth (bytes read and written).
"""

import ctypes
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import fbgemm_gpu
import torch
import tyro

from benchmarks.measure import machine, milliseconds, print_table
from logitmix.comm import fp8, fp8_plain

FORMATS = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
Step = Callable[[], object]


@dataclass(frozen=True)
class Options:
    megabytes: int = 64
    """Size of the FP32 rows."""
    repetitions: int = 15
    device: str = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Row:
    dim: int
    format: str
    way: str
    name: str
    wire_bytes: int
    """Bytes of a row relative to FP32."""
    gb_per_second: float
    slowest: float
    fastest: float
    ratio: float
    """Speed relative to eager, same direction and format (E4M3 if there is none)."""
    of_copy: float
    """Speed relative to copying the same number of bytes."""


def main(options: Options) -> None:
    torch.set_num_threads(1)
    _keep_freed_memory()
    _show([row for dim in (64, 128) for row in measure(dim, options)], options)


def measure(dim: int, options: Options) -> list[Row]:
    x = torch.randn(options.megabytes * 2**20 // 4 // dim, dim, device=options.device)
    steps, wire_bytes = _steps(x)
    # CPU time, so that a busy machine does not count, or a GPU's time.
    clock = time.perf_counter if x.is_cuda else time.process_time
    found = milliseconds(steps, options.repetitions, clock, torch.cuda.synchronize if x.is_cuda else lambda: None)
    megabytes = x.numel() * 4 / 1e6
    copy = megabytes * 2 / statistics.median(found["", "", "copy"])
    rows = []
    for (form, way, name), times in found.items():
        if name == "copy":
            continue
        speeds = [megabytes / t for t in times]
        median = megabytes / statistics.median(times)
        eager = megabytes / statistics.median(found[form or "E4M3", way, "eager"])
        moved = 1 + wire_bytes[name] / (4 * dim)
        spread = (min(speeds), max(speeds))
        rows.append(Row(dim, form, way, name, wire_bytes[name], median, *spread, median / eager, median * moved / copy))
    return sorted(rows, key=lambda row: (row.way != "quantize", row.format or "~"))


def _steps(x: torch.Tensor) -> tuple[dict[tuple[str, str, str], Step], dict[str, int]]:
    """(format, way, name) -> what to time; and bytes of a row on the wire by name."""
    dim, device, ops = x.shape[1], x.device, torch.ops.fbgemm
    target = torch.empty_like(x)
    wire = torch.empty(len(x), dim + fp8.SCALE_BYTES, dtype=torch.uint8, device=device)
    steps: dict[tuple[str, str, str], Step] = {("", "", "copy"): lambda: target.copy_(x)}
    wire_bytes = {"eager": dim + 4, "codec": dim + 2, "codec, at random": dim + 2, "plain": dim + 2}
    for form, dtype in FORMATS.items():
        steps[form, "quantize", "eager"] = partial(_eager_quantize, x, dtype)
        payload, scale = _eager_quantize(x, dtype)
        steps[form, "dequantize", "eager"] = lambda p=payload, s=scale: p.float() * s  # type: ignore[misc]
        steps[form, "quantize", "codec"] = partial(fp8.quantize_rowwise, x, dtype)
        steps[form, "quantize", "codec, at random"] = partial(fp8.quantize_rowwise, x, dtype, seed=1)
        sent = fp8.quantize_rowwise(x, dtype)
        steps[form, "dequantize", "codec"] = partial(fp8.dequantize_rowwise, sent, dtype, [dim])
        steps[form, "quantize", "plain"] = partial(fp8_plain.quantize, x, dtype, [dim], None, wire)
        if x.is_cuda:
            wire_bytes["FBGEMM FP8"] = -(-dim // 4) * 4 + 8
            forward = form == "E4M3"
            packed = ops.FloatToFP8RowwiseQuantized(x, forward)
            steps[form, "quantize", "FBGEMM FP8"] = partial(ops.FloatToFP8RowwiseQuantized, x, forward)
            steps[form, "dequantize", "FBGEMM FP8"] = partial(ops.FP8RowwiseQuantizedToFloat, packed, forward)
    wire_bytes |= {"FBGEMM INT8": dim + 8, "FP16": 2 * dim}
    int8, half = ops.FloatToFused8BitRowwiseQuantized(x), x.half()
    steps["", "quantize", "FBGEMM INT8"] = partial(ops.FloatToFused8BitRowwiseQuantized, x)
    steps["", "dequantize", "FBGEMM INT8"] = partial(ops.Fused8BitRowwiseQuantizedToFloat, int8)
    steps["", "quantize", "FP16"] = x.half
    steps["", "dequantize", "FP16"] = half.float
    return steps, wire_bytes


def _eager_quantize(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    scale = x.abs().amax(dim=1, keepdim=True) / torch.finfo(dtype).max
    return (x / scale).to(dtype), scale


def _keep_freed_memory() -> None:
    """Fresh pages would cost every method more than its arithmetic; in training, buffers of such sizes are reused."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)  # M_MMAP_MAX
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def _show(rows: list[Row], options: Options) -> None:
    heads = ("D", "way", "format", "", "bytes a row", "GB/s of FP32 (range)", "/ eager", "of copy's bytes/s")
    cells = []
    for row in rows:
        speed = f"{row.gb_per_second:.2f} ({row.slowest:.2f} to {row.fastest:.2f})"
        names = (row.dim, row.way, row.format, row.name, row.wire_bytes)
        cells.append((*names, speed, f"{row.ratio:.2f}", f"{row.of_copy:.2f}"))
    print_table(heads, cells, _setting(options), 140)


def _setting(options: Options) -> str:
    cuda = options.device.startswith("cuda")
    return (
        f"{options.megabytes} MiB of FP32, {options.repetitions} repetitions, "
        f"{torch.cuda.get_device_name(options.device) if cuda else '1 thread'}, codec in "
        f"{fp8.backend(options.device.partition(':')[0]).__name__}; fbgemm {fbgemm_gpu.__version__}, {machine()}"
    )


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
