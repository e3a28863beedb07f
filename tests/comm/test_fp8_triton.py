import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from logitmix.comm import fp8, fp8_plain

CHECKS = Path(__file__).with_name("triton_checks.py")


def test_triton_gives_the_bytes_of_the_plain_path_in_the_interpreter() -> None:
    done = subprocess.run([sys.executable, "-W", "error", str(CHECKS)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("compute_capability", [80, 90])
def test_the_kernels_compile_for_gpus_that_are_not_here(
    compute_capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget

    from logitmix.comm import fp8_triton

    shared = {"stride": "i64", "wire": "*u8", "wire_stride": "i64", "ends": "*i64", "R": "i32"}
    more = {"values": "*bf16", "W": "i32", "first_place": "i64", "seed_low": "i64", "seed_high": "i64"}
    constants = {"MANTISSA": 3, "LARGEST": 448.0, "ROWS": 16, "BLOCK": 128}
    for kernel, signature, values in (
        (fp8_triton._quantize_kernel, {**shared, **more}, {**constants, "RANDOM": True}),
        (fp8_triton._dequantize_kernel, {**shared, "values": "*fp32"}, constants),
    ):
        source = triton.compiler.ASTSource(
            fn=kernel,
            signature={**signature, **dict.fromkeys(values, "constexpr")},
            constexprs={(kernel.arg_names.index(name),): value for name, value in values.items()},
        )
        target = GPUTarget("cuda", compute_capability, 32)
        ptx = triton.compile(source, target=target, options={"enable_fp_fusion": False}).asm["ptx"]
        # Rounded one by one, and subnormal numbers kept.
        assert "div.rn.f32" in ptx
        assert not re.search(r"\bfma\.|\.ftz|\.approx|div\.full", ptx)


def test_triton_serves_cuda_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fp8.backend("cuda") == "triton"
    assert fp8.backend("meta") == "torch"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    fp8.has_triton.cache_clear()
    try:
        assert fp8.backend("cuda") == "torch"
    finally:
        fp8.has_triton.cache_clear()


def test_the_codec_loads_no_triton_on_the_cpu() -> None:
    words = "import sys, torch; from logitmix.comm import fp8; before = 'triton' in sys.modules; "
    words += (
        "fp8.quantize_rowwise(torch.ones(2, 2), fp8.FORWARD_FP8); sys.exit('logitmix.comm.fp8_triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", words]).returncode == 0


@pytest.mark.gpu
def test_triton_gives_the_bytes_of_the_plain_path_on_the_device() -> None:
    from triton_checks import check_all

    check_all("cuda", examples=200)


@pytest.mark.gpu
def test_the_codec_on_the_device() -> None:
    rows = torch.randn(1000, 192, generator=torch.Generator().manual_seed(0))
    for dtype in (fp8.FORWARD_FP8, fp8.BACKWARD_FP8):
        for seed in (None, 3):
            wire = fp8.quantize_rowwise(rows, dtype, [64, 128], seed)
            on_device = fp8.quantize_rowwise(rows.cuda(), dtype, [64, 128], seed)
            assert torch.equal(on_device.cpu(), wire)
            received = fp8.dequantize_rowwise(on_device, dtype, [64, 128])
            assert torch.equal(received.cpu(), fp8.dequantize_rowwise(wire, dtype, [64, 128]))


@pytest.mark.gpu
def test_plain_torch_on_the_device_gives_the_same_bytes() -> None:
    rows = torch.randn(1000, 64, generator=torch.Generator().manual_seed(0))
    for seed in (None, 3):
        wire = torch.empty(1000, 66, dtype=torch.uint8, device="cuda")
        fp8_plain.quantize(rows.cuda(), fp8.FORWARD_FP8, [64], seed, wire)
        assert torch.equal(wire.cpu(), fp8.quantize_rowwise(rows, fp8.FORWARD_FP8, seed=seed))
