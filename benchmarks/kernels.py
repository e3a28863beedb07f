"""Triton's kernels compiled for GPUs that need not be here, and what each takes of a multiprocessor.

    python -m benchmarks.kernels [--gpus 80 90] [--only mol_triton]

A case is host code with sizes: those of the recipes, and limits of what `covers()` takes. It runs with tensors that
have shapes and no memory and say that they are on the GPU. So what is compiled is what a run there would launch: the
same constants, alignments, warps and tiles. Registers and spills are in the log of ptxas, which comes
with Triton; shared and tensor memory are in Triton's own report. No limit is checked on the way: a kernel can compile
and never start, or contain `trap`. `wrong` names what would, and what is outside the kernel's BUDGET, which stands in
its module. A budget's key is the kernel, or the kernel and a part of the case's name.
"""

import io
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import tyro
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import compiler
from triton.runtime import driver
from triton.runtime.jit import JITFunction, MockTensor

from benchmarks.launches import GPU as ON_GPU
from benchmarks.launches import as_if_on_a_gpu
from logitmix.comm import fp8, fp8_plain, fp8_triton
from logitmix.modules import noise_triton, stage1, stage1_triton
from logitmix.modules.batch import Packing
from logitmix.modules.config import HSTUConfig, MoLConfig
from logitmix.modules.encoders import hstu_triton, hstu_unit_triton
from logitmix.modules.encoders.hstu_attention import TIME_BUCKETS
from logitmix.modules.losses import dot_triton, mol_triton
from logitmix.modules.losses.blockwise import Examples
from logitmix.modules.losses.dot_loss import dot_sampled_softmax
from logitmix.modules.noise import Noise
from logitmix.modules.similarity import gated_triton, mol_scores_triton, normalize_triton
from logitmix.trainer.config import load_recipe, recipe_names


@dataclass(frozen=True)
class GPU:
    """Of a multiprocessor, and of one block of threads on it."""

    name: str
    shared: int
    """Bytes of shared memory of all blocks; each takes 1 KiB more than it asks for."""
    of_a_block: int
    multiprocessors: int


GPUS = {
    80: GPU("A100", 164 * 1024, 163 * 1024, 108),
    89: GPU("L4", 100 * 1024, 99 * 1024, 58),
    90: GPU("H100", 228 * 1024, 227 * 1024, 132),
    100: GPU("B200", 228 * 1024, 227 * 1024, 148),
    103: GPU("B300", 228 * 1024, 227 * 1024, 160),
}
"""By compute capability, for Triton's 8.0 is 80."""
LIMIT = ", limit"
"""Ends the name of a case at a limit of what the kernel covers."""
REGISTERS, WARPS, TENSOR_COLUMNS = 65536, 64, 512
"""Of a multiprocessor."""


@dataclass(frozen=True)
class Options:
    gpus: tuple[int, ...] = tuple(GPUS)
    """Compute capabilities: 80, 89, 90, 100, 103."""
    only: str = ""
    """Cases whose name contains this."""


@dataclass(frozen=True)
class Kernel:
    """One kernel, compiled."""

    name: str
    gpu: int
    warps: int
    registers: int
    """Of a thread."""
    spilled: int
    """Bytes that a thread writes to memory for want of registers."""
    shared: int
    """Bytes of a block."""
    tensor_columns: int
    budget: tuple[int, int]
    ptx: str = field(repr=False)
    serialized: bool = False
    """Whether ptxas makes tensor instructions wait for each other, for want of registers (its remark C7512)."""

    @property
    def programs(self) -> int:
        """How many share a multiprocessor."""
        gpu, of_a_warp = GPUS[self.gpu], -(-self.registers * 32 // 256) * 256
        warps = min(WARPS, REGISTERS // of_a_warp) // self.warps
        columns = TENSOR_COLUMNS // self.tensor_columns if self.tensor_columns else warps
        return min(warps, gpu.shared // (self.shared + 1024), columns)

    @property
    def wrong(self) -> list[str]:
        programs, spilled = self.budget
        return [
            text
            for text, is_wrong in (
                ("contains `trap`", re.search(r"\btrap;", self.ptx) is not None),
                ("tensor instructions wait for each other", self.serialized),
                (f"{self.tensor_columns} columns of tensor memory", self.tensor_columns > TENSOR_COLUMNS),
                (f"{self.shared} bytes of shared memory", self.shared > GPUS[self.gpu].of_a_block),
                (f"{self.programs} programs for each multiprocessor, not {programs}", self.programs < programs),
                (f"spills {self.spilled} bytes, not {spilled}", self.spilled > spilled),
            )
            if is_wrong
        ]


Case = Callable[[], None]


@contextmanager
def as_if_on(gpu: int, launch: Callable[..., None]) -> Iterator[None]:
    """As `as_if_on_a_gpu` does, and for Triton's compiler, too."""
    target = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", gpu, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        utils=SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": GPUS[gpu].of_a_block}),
    )
    compiler.max_shared_mem.cache_clear()
    with (
        mock.patch.object(driver, "_active", target),
        as_if_on_a_gpu(launch, GPUS[gpu].multiprocessors, GPUS[gpu].of_a_block, gpu // 10),
    ):
        try:
            yield
        finally:
            compiler.max_shared_mem.cache_clear()


def compiled(name: str, gpu: int) -> list[Kernel]:
    """The kernels that a case launches, each form once; none is run."""
    kernels: dict[str, Kernel] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        self.device_caches.clear()
        log = io.StringIO()
        with redirect_stdout(log):
            kernel = run(self, *map(_mock, args), grid=grid, warmup=True, **{k: _mock(v) for k, v in kwargs.items()})
        self.device_caches.clear()
        if kernel.hash in kernels:  # from Triton's files, without a log
            return
        budget = budget_of(self.__name__, f"{name}, sm_{gpu}", self.fn.__globals__["BUDGET"])
        kernels[kernel.hash] = _measured(kernel, gpu, log.getvalue(), budget)

    with tempfile.TemporaryDirectory() as cache, knobs.nvidia.scope(), knobs.cache.scope():
        knobs.nvidia.dump_ptxas_log, knobs.cache.dir = True, cache
        with as_if_on(gpu, compile_only):
            cases()[name]()
    return list(kernels.values())


def budget_of(kernel: str, case: str, budgets: dict[str, tuple[int, int]]) -> tuple[int, int]:
    """Keys are a kernel's name and, after a comma, a part of the names of the cases that it is for; the first fits."""
    parts = ((key.partition(", "), budget) for key, budget in budgets.items())
    return next(budget for (name, _, part), budget in parts if name == kernel and part in case)


def _mock(argument: Any) -> Any:
    """A tensor of a run is aligned to 16 bytes."""
    return MockTensor(argument.dtype) if isinstance(argument, Tensor) else argument


def _measured(kernel: Any, gpu: int, log: str, budget: tuple[int, int]) -> Kernel:
    registers, spilled = re.search(r"Used (\d+) registers", log), re.search(r"(\d+) bytes spill stores", log)
    assert registers is not None and spilled is not None, log
    about = kernel.metadata
    return Kernel(
        about.name, gpu, about.num_warps, int(registers[1]), int(spilled[1]), about.shared,
        about.tmem_size or 0, budget, kernel.asm["ptx"], "C7512" in log,
    )  # fmt: skip


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=ON_GPU)


def mol_loss(U: int, I: int, C: int, H: int, dtype: torch.dtype, corrected: bool) -> None:
    """Both ways, 32 sequences of 128 positions with 128 negatives each."""
    G, L, N, V, M = 32, 128, 128, 3000, U * I
    sides = empty(G * L, U, C), empty(G * L, M), empty(V, I, C), empty(V, M)
    gate = empty(H, M), empty(H), empty(M, H), empty(M)
    place_T, negatives_GN = empty(G * L, dtype=torch.int64), empty(G, N, dtype=torch.int64)
    tensors = [tensor.requires_grad_() for tensor in (*sides, *gate)]
    assert mol_triton.covers(U, I, C, H, dtype, place_T.device)
    bounds = range(0, G * L + 1, L)
    log_q_V = empty(V) if corrected else None
    examples = Examples(place_T, place_T, bounds, negatives_GN, log_q_V)
    mol_triton.mol_sampled_softmax(dtype, examples, (Noise(1), 0.2), *tensors).backward()


def dot_loss(H: int, length: int, corrected: bool) -> None:
    """Both ways, groups of `length` positions with 512 negatives each, without and with weights of positions."""
    G, N, V = 32, 512, 3000
    place_T, negatives_GN = empty(G * length, dtype=torch.int64), empty(G, N, dtype=torch.int64)
    for weight_T in (None, empty(G * length)):
        examples = Examples(
            place_T, place_T, range(0, G * length + 1, length), negatives_GN, empty(V) if corrected else None, weight_T
        )
        sides = (empty(rows, H).requires_grad_() for rows in (G * length, V))
        dot_sampled_softmax(*sides, examples).backward()


def mol_scores(U: int, I: int, C: int, H: int, stored: torch.dtype) -> None:
    """8 queries with 100,000 candidates each."""
    B, K, X, M, weights = 8, 100_000, 1_000_000, U * I, torch.bfloat16 if stored == torch.int8 else stored
    query, item = (empty(B, U, C), empty(B, M)), (empty(X, I, C, dtype=stored), empty(X, M, dtype=weights))
    gate = empty(H, M), empty(H), empty(M, H), empty(M)
    assert mol_scores_triton.covers(U, I, C, H, item)
    mol_scores_triton.mol_scores(query, item, gate, empty(B * K, dtype=torch.int64), range(0, B * K + 1, K))


def stage_1(queries: int, width: int, filtered: bool) -> None:
    """The sample, then the corpus of 10 million items."""
    X, groups = 10_000_000, -(-width // 4)
    blocks = empty(X // stage1.LANES, groups, stage1.LANES, 4, dtype=torch.uint8)
    bits = empty(queries, X // 8, dtype=torch.uint8) if filtered else None
    scan = stage1_triton._Scan(empty(queries, groups * 4, dtype=torch.int8), blocks, X, bits)
    scan.of_sample(empty(4096, dtype=torch.int64))
    scan.of_corpus(empty(queries, dtype=torch.int32), 200_000)
    key, ordered = (empty(queries, 200_000, dtype=torch.int64) for _ in range(2))
    tiles = (empty(queries, 2500, dtype=torch.int32) for _ in range(3))
    stage1_triton._order[(40, queries)](
        key, *tiles, ordered, 2500, 200_000, 100_000, TILES=stage1_triton.TILES, SLOTS=stage1_triton.SLOTS
    )


def attention(heads: int, d: int, dtype: torch.dtype, times: bool) -> None:
    """Both ways, 32 sequences of 200."""
    B, L = 32, 200
    packing = Packing(torch.full((B,), L)).to(ON_GPU)
    if times:
        packing.time_T = packing.asked_T = empty(B * L, dtype=torch.int64)
    packed, time_K = empty(B * L, 3, heads, d, dtype=dtype), empty(TIME_BUCKETS) if times else None
    assert hstu_triton.covers(d, dtype)
    inputs = [of.requires_grad_() for of in (packed, empty(L), time_K) if of is not None]
    hstu_triton.attend(inputs[0], inputs[1], inputs[2] if times else None, packing).sum().backward()


def unit(heads: int, d: int, dtype: torch.dtype) -> None:
    """A block's norms and its unit, both ways, 32 sequences of 200; with the attention of four parts."""
    B, L, D = 32, 200, heads * d
    packing = Packing(torch.full((B,), L)).to(ON_GPU)
    packing.row_T = empty(B * L, dtype=torch.int64)
    x, raw = empty(B * L, D).requires_grad_(), empty(B * L, 4, heads, d, dtype=dtype).requires_grad_()
    normed, past = hstu_unit_triton.normed(x, 1e-6, dtype)
    gated = hstu_unit_triton.unit(raw, empty(L).requires_grad_(), None, packing, 1e-6, (1, 9))
    (normed.sum() + past.sum() + gated.sum()).backward()


def codec(width: int, groups: int, dtype: torch.dtype, forward: bool) -> None:
    """Encoding to nearest for the forward exchange, at random for the backward one; and decoding."""
    R, widths = 10_000, [width] * groups
    values, kind = empty(R, width * groups, dtype=dtype), fp8.FORWARD_FP8 if forward else fp8.BACKWARD_FP8
    wire = empty(R, (width + fp8_plain.SCALE_BYTES) * groups, dtype=torch.uint8)
    fp8_triton.quantize(values, kind, widths, None if forward else 3, wire)
    fp8_triton.dequantize(wire, kind, widths, empty(R, width * groups))


def dropout(width: int, dtype: torch.dtype) -> None:
    """By itself, after relu, and added to FP32 numbers."""
    x, row_R = empty(10_000, width, dtype=dtype), empty(10_000, dtype=torch.int64)
    noise_triton.dropped(x, row_R, (1, 0), 2, 1.25)
    noise_triton.dropped(x, row_R, (1, 0), 2, 1.25, relu=x)
    noise_triton.dropped(x, row_R, (1, 0), 2, 1.25, empty(10_000, width))
    noise_triton.dropped(empty(10_000, width), row_R, (1, 0), 2, 1.25, dtype=dtype)


def normalization(width: int, dtype: torch.dtype) -> None:
    """Both ways, of components or vectors."""
    x = empty(10_000, width, dtype=dtype).requires_grad_()
    normalize_triton.l2_normalize(x, 20.0, dtype, 1e-6).backward(empty(10_000, width, dtype=dtype))


def gated_units(hidden: int, dtype: torch.dtype) -> None:
    """Both ways."""
    both = empty(10_000, 2 * hidden, dtype=dtype).requires_grad_()
    gated_triton.gated(both).backward(empty(10_000, hidden, dtype=dtype))


@cache
def cases() -> dict[str, Case]:
    """By name: the kernels' module, and sizes."""
    full, half = torch.float32, torch.bfloat16
    models = [load_recipe(name).model for name in recipe_names()]
    mixtures = {
        ((of.query_components, of.item_components, of.component_dim, of.gate_hidden), model.loss.in_batch > 0)
        for model in models
        if isinstance(of := model.similarity, MoLConfig)
    }
    heads = {(of.heads, model.dim // of.heads) for model in models if isinstance(of := model.encoder, HSTUConfig)}
    widest = (8, 8, 32, 128)
    named: dict[str, Case] = {}

    def add(module: Any, sizes: str, case: Callable[..., None], *arguments: Any) -> None:
        named[f"{module.__name__.rpartition('.')[2]}: {sizes}"] = partial(case, *arguments)

    def add_mixture(
        module: Any, case: Callable[..., None], shape: tuple[int, ...], dtype: torch.dtype, *corrected: bool
    ) -> None:
        add(module, f"{shaped(shape, dtype)}{', corrected' * any(corrected)}", case, *shape, dtype, *corrected)

    def shaped(shape: tuple[int, ...], dtype: torch.dtype) -> str:
        return f"{' x '.join(map(str, shape))}, {_short(dtype)}"

    for shape, corrected in sorted(mixtures):
        add_mixture(mol_triton, mol_loss, shape, half, corrected)
    for shape, dtype in (
        ((16, 4, 128, 128), half), ((4, 16, 128, 128), half), ((4, 4, 32, 64), full), ((8, 8, 64, 128), full),
        ((16, 4, 64, 128), half), ((4, 16, 64, 128), half), ((8, 8, 64, 128), half),
    ):  # fmt: skip
        add(mol_triton, shaped(shape, dtype) + LIMIT, mol_loss, *shape, dtype, True)
    for H, length, corrected in product((16, 64, 128, 256, dot_triton.WIDEST), (1, 128), (False, True)):
        add(dot_triton, f"{H}, groups of {length}{', corrected' * corrected}", dot_loss, H, length, corrected)
    for dtype in (half, torch.float16, torch.int8, full):
        for shape in (widest, (8, 8, 64, 128), *([(16, 8, 128, 128)] if dtype != full else [])):
            add_mixture(mol_scores_triton, mol_scores, shape, dtype)
    for queries, width, filtered in ((8, 64, False), (8, 64, True), (64, 64, True), (8, 256, True), (1, 4, False)):
        add(stage1_triton, f"{queries} x {width}{', filtered' * filtered}", stage_1, queries, width, filtered)
    for (G, d), times in product(sorted(heads), (False, True)):
        add(hstu_triton, f"{G} x {d}{', times' * times}, bfloat16", attention, G, d, half, times)
    for d, dtype in ((128, half), (64, full)):
        add(hstu_triton, f"1 x {d}, times, {_short(dtype)}{LIMIT}", attention, 1, d, dtype, True)
    for G, d in sorted(heads):
        for dtype in (half, full):
            add(hstu_unit_triton, f"{G} x {d}, {_short(dtype)}", unit, G, d, dtype)
    for (groups, width), dtype, forward in product(((3, 64), (1, 1024)), (full, half), (True, False)):
        sizes = f"{groups} x {width}, {_short(dtype)}, {'forward' if forward else 'backward'}"
        add(fp8_triton, sizes, codec, width, groups, dtype, forward)
    for width, dtype in product((1, 64, 4096), (full, half)):
        add(noise_triton, f"{width}, {_short(dtype)}", dropout, width, dtype)
    for width, dtype in product((32, 64, 1024), (full, half)):
        add(normalize_triton, f"{width}, {_short(dtype)}", normalization, width, dtype)
    for hidden, dtype in product((128, 512), (full, half)):
        add(gated_triton, f"{hidden}, {_short(dtype)}", gated_units, hidden, dtype)
    return named


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main(options: Options) -> None:
    wrong = []
    print("kernel, sizes, GPU, warps, registers, spilled, shared KiB, tensor columns, programs")
    for name in cases():
        if options.only not in name:
            continue
        module, _, sizes = name.partition(": ")
        for gpu in options.gpus:
            for kernel in compiled(name, gpu):
                wrong += [f"{name} on {gpu}: {kernel.name} {what}" for what in kernel.wrong]
                taken = kernel.warps, kernel.registers, kernel.spilled, round(kernel.shared / 1024)
                taken = *taken, kernel.tensor_columns, kernel.programs, *kernel.wrong
                named = f"{module}.{kernel.name.lstrip('_')}", sizes, GPUS[gpu].name
                print(*named, *taken, sep=", ", flush=True)
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main(tyro.cli(Options))
