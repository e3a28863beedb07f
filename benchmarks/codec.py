"""The FP8 row-wise codec compared with other ways to send a row, and the choice of its scale.

    python -m benchmarks.codec [--megabytes 64] [--repetitions 15] [--device cpu]
    python -m benchmarks.codec --scales

Speed: GB of FP32 rows per second, both ways, on one thread or one GPU; the rows are larger than the caches. "eager" is
the row-wise cast in plain eager PyTorch (largest magnitude, divide, cast; and back), "plain" the codec's definition in
torch. Repetitions of all methods are interleaved, and ratios are those of medians. INT8 and, on CUDA, FP8 are FBGEMM's
row-wise operations; the copy of the FP32 rows shows the device's bandwidth (bytes read and written).

--scales: the relative root mean square error of a row under the codec's arithmetic with scales of other precisions.
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
    scales: bool = False
    """Measure errors by choice of the scale, not speed."""


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
    if options.scales:
        _show_errors(_errors())
    else:
        _show_speed([row for dim in (64, 128) for row in measure(dim, options)], options)


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


def _errors() -> list[dict[str, float | int | str]]:
    """Each distribution of rows, format and scale: ||received - sent|| / ||sent||, over 20,000 rows of 64."""
    generator, dim = torch.Generator().manual_seed(0), 64
    normal = torch.randn(20_000, dim, generator=generator, dtype=torch.float64)
    laplace = torch.empty(20_000, dim, dtype=torch.float64).exponential_(generator=generator) * normal.sign()
    # Student's t with 3 degrees of freedom: a few elements of a row dwarf the rest, as in gradients.
    chi = torch.randn(20_000, dim, 3, generator=generator, dtype=torch.float64).square().mean(dim=2).sqrt()
    rows = {"Gaussian": normal, "Laplace": laplace, "heavy-tailed (t, 3)": normal / chi}
    scales: dict[str, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {
        "FP32": (4, lambda amax: amax),
        "BF16, rounded up": (2, _up_to_bf16),
        "power of two, rounded up": (1, lambda amax: amax.log2().ceil().exp2()),
    }
    errors: list[dict[str, float | int | str]] = []
    for distribution, x in rows.items():
        for form, dtype in FORMATS.items():
            by_scale = {scale: _error(x, dtype, chosen) for scale, (_, chosen) in scales.items()}
            for scale, error in by_scale.items():
                row = {"rows": distribution, "format": form, "scale": scale, "bytes": dim + scales[scale][0]}
                errors.append({**row, "error": error, "ratio": error / by_scale["FP32"]})
    return errors


def _error(x: torch.Tensor, dtype: torch.dtype, chosen: Callable[[torch.Tensor], torch.Tensor]) -> float:
    largest = torch.finfo(dtype).max
    s = chosen(x.abs().amax(dim=1, keepdim=True).float()).double()
    received = (x / s * largest).clamp(-largest, largest).float().to(dtype).double() * s / largest
    return ((received - x).norm() / x.norm()).item()


def _up_to_bf16(amax: torch.Tensor) -> torch.Tensor:
    return ((amax.view(torch.int32) + 0xFFFF >> 16) << 16).view(torch.float32)


def _show_errors(errors: list[dict[str, float | int | str]]) -> None:
    heads = ("rows", "format", "scale", "bytes a row", "relative RMS error", "/ FP32 scale's")
    cells = ([*[*row.values()][:4], f"{row['error']:.5f}", f"{row['ratio']:.3f}"] for row in errors)
    print_table(heads, cells, "64 elements", 140)


def _show_speed(rows: list[Row], options: Options) -> None:
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
