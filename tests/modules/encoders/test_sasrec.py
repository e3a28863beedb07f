"""SASRec's attention: which kernels a GPU has for it, and that they agree."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_encoders import WITH_NOISE, make, new, rows
from test_hstu import packing
from torch import Tensor

from logitmix.modules.batch import Packing
from logitmix.modules.config import SASRecConfig
from logitmix.modules.encoders.sasrec import attend_jagged, attend_padded
from logitmix.modules.noise import Noise
from logitmix.trainer.config import load_recipe, recipe_names


@pytest.mark.parametrize("lengths", [[50, 1, 0, 7, 3, 20, 2], [0, 50, 0], [9]])
def test_attention_of_groups_is_that_of_each_sequence(lengths: list[int]) -> None:
    packed = packed_of(lengths, heads=2, width=8).requires_grad_()
    together = attend_padded(packed, packing(lengths))
    parts = [part for part in packed.split(lengths) if len(part)]
    alone = torch.cat([together.detach()[:0], *(attend_padded(part, packing([len(part)])) for part in parts)])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)
    gradients = [torch.autograd.grad(out.square().sum(), packed)[0] for out in (together, alone)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


def attended(attend: Callable[[Tensor, Packing], Tensor], packed: Tensor, packing: Packing) -> list[Tensor]:
    """Output and gradient."""
    leaf = packed.detach().requires_grad_()
    out = attend(leaf, packing)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    (gradient,) = torch.autograd.grad((out * weights).sum(), leaf)
    return [out.detach(), gradient]


def packed_of(lengths: list[int], heads: int, width: int) -> Tensor:
    return torch.randn(sum(lengths), 3, heads, width, generator=torch.Generator().manual_seed(0))


class _Chosen(Exception):
    """Raised in place of a kernel."""


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our code takes tensors for a GPU's."""

    def chosen(name: str) -> Callable[..., None]:
        def called(*_: Any) -> None:
            raise _Chosen(name)

        return called

    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr("logitmix.modules.noise._is_compiled_for", lambda _: False)
    for name in ("flash", "efficient"):
        monkeypatch.setattr(torch.ops.aten, f"_{name}_attention_forward", chosen(name))


def widths() -> list[tuple[int, int]]:
    """Of models and numbers of heads: those of the recipes, the narrowest and wide ones."""
    models = [load_recipe(name).model for name in recipe_names()]
    ours = {(of.dim, of.encoder.heads) for of in models if isinstance(of.encoder, SASRecConfig)}
    return sorted(ours | {(8, 1), (64, 8), (256, 1), (512, 1)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("dim", "heads"), widths())
@WITH_NOISE
def test_a_gpu_has_a_fused_kernel_for_attention(
    dtype: torch.dtype, dim: int, heads: int, noise: Noise | None, on_gpu: None
) -> None:
    encoder, lengths = new("sasrec", dim, heads=heads), [3, 1, 6]
    with pytest.raises(_Chosen) as chosen, torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        encoder(rows(sum(lengths), dim).float().requires_grad_(), packing(lengths), noise)
    flash = dtype == torch.bfloat16 and dim // heads <= 256
    assert chosen.value.args == ("flash" if flash else "efficient",)


@pytest.mark.parametrize(("dim", "heads", "lengths"), [(8, 2, [3, 1]), (52, 1, [2]), (8, 1, [3, 0, 1]), (8, 1, [])])
def test_a_gpu_takes_padded_attention_where_there_is_no_jagged_one(
    dim: int, heads: int, lengths: list[int], on_gpu: None
) -> None:
    """Widths that are no multiples of 8, empty sequences and no sequence at all. Dense attention has a plain form for
    whatever the fused ones do not take."""
    encoder, item_TD = make("sasrec", dim, heads=heads), rows(sum(lengths), dim)
    assert encoder(item_TD, packing(lengths), None).shape == (sum(lengths), dim)


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
