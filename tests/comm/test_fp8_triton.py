import importlib.util

import pytest
import torch

from logitmix.comm import fp8, fp8_plain


def test_triton_serves_cuda_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fp8.backend("cuda").__name__ == "logitmix.comm.fp8_triton"
    assert fp8.backend("meta") is fp8_plain
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    fp8.has_triton.cache_clear()
    try:
        assert fp8.backend("cuda") is fp8_plain
    finally:
        fp8.has_triton.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [None, 3])
def test_the_device_gives_the_same_bytes(seed: int | None) -> None:
    rows = torch.randn(1000, 192, generator=torch.Generator().manual_seed(0))
    for dtype in (fp8.FORWARD_FP8, fp8.BACKWARD_FP8):
        wire = fp8.quantize_rowwise(rows, dtype, [64, 128], seed)
        on_device, plain = fp8.quantize_rowwise(rows.cuda(), dtype, [64, 128], seed), torch.empty_like(wire).cuda()
        fp8_plain.quantize(rows.cuda(), dtype, [64, 128], seed, plain)
        assert torch.equal(on_device.cpu(), wire) and torch.equal(plain.cpu(), wire)
        received = fp8.dequantize_rowwise(on_device, dtype, [64, 128])
        assert torch.equal(received.cpu(), fp8.dequantize_rowwise(wire, dtype, [64, 128]))
