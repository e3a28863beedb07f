"""SASRec's attention: which kernels a GPU has for it, and that they agree."""

from collections.abc import Callable
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
from test_encoders import NOISE, new, rows
from test_hstu import packing
from torch import Tensor

from logitmix.modules.batch import Packing
from logitmix.modules.encoders.sasrec import attend_jagged, attend_padded


def attended(attend: Callable[[Tensor, Packing], Tensor], packed: Tensor, packing: Packing) -> list[Tensor]:
    """Output and gradient."""
    leaf = packed.detach().requires_grad_()
    out = attend(leaf, packing)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    (gradient,) = torch.autograd.grad((out * weights).sum(), leaf)
    return [out.detach(), gradient]


def packed_of(lengths: list[int], heads: int, width: int) -> Tensor:
    return torch.randn(sum(lengths), 3, heads, width, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("dim", "heads", "lengths", "dtype", "kernel"),
    [
        (64, 1, [3, 1, 6], torch.bfloat16, "flash"),
        (64, 8, [3, 1, 6], torch.float32, "efficient"),
        (256, 1, [3, 1, 6], torch.bfloat16, "flash"),
        (512, 1, [3, 1, 6], torch.bfloat16, "efficient"),
        # Widths that are no multiples of 8, empty sequences and no sequence at all.
        (8, 2, [3, 1], torch.float32, "padded"),
        (52, 1, [2], torch.float32, "padded"),
        (8, 1, [3, 0, 1], torch.float32, "padded"),
        (8, 1, [], torch.float32, "padded"),
    ],
)
def test_a_gpu_has_a_kernel_for_attention(
    dim: int, heads: int, lengths: list[int], dtype: torch.dtype, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = {name: Mock(side_effect=RuntimeError(name)) for name in ("flash", "efficient")}
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr("logitmix.modules.noise._is_compiled_for", lambda _: False)
    for name, instead in called.items():
        monkeypatch.setattr(torch.ops.aten, f"_{name}_attention_forward", instead)
    encoder, item_TD = new("sasrec", dim, heads=heads), rows(sum(lengths), dim).float().requires_grad_()
    chosen = pytest.raises(RuntimeError, match=kernel) if kernel != "padded" else nullcontext()
    with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16), chosen:
        assert encoder(item_TD, packing(lengths), NOISE).shape == item_TD.shape


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_jagged_attention_is_padded_attention(dtype: torch.dtype) -> None:
    lengths = [3, 1, 200, 7, 64]
    packed = packed_of(lengths, heads=2, width=32)
    exact = attended(attend_padded, packed, packing(lengths))
    got = attended(attend_jagged, packed.to("cuda", dtype), packing(lengths).to(torch.device("cuda")))
    for jagged, padded in zip(got, exact, strict=True):
        bound = 2e-5 if dtype == torch.float32 else 2**-6
        assert (jagged.float().cpu() - padded).norm() <= bound * padded.norm()
