import pytest
import torch
from gpu_targets import EACH, OF_A_BLOCK, compiled

POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}


@EACH
@pytest.mark.parametrize(
    ("dtype", "width"), [pytest.param(torch.float32, 64, marks=pytest.mark.slow), (torch.bfloat16, 128)]
)
def test_the_kernels_fit_gpus_that_are_not_here(compute_capability: int, dtype: torch.dtype, width: int) -> None:
    """The widest heads that are covered."""
    from logitmix.modules.encoders import hstu_triton

    assert hstu_triton.covers(width, dtype) and not hstu_triton.covers(129, dtype)
    types = dict.fromkeys(("bound", "asked", "time"), "*i64") | dict.fromkeys(("packed", "d_out"), POINTERS[dtype])
    constants = {"G": 2, "L": 200, "K": 129, "d": width, "DP": width, "N": hstu_triton.TILE}
    constants |= {"TIMES": True, "EMULATED": False}
    for kernel in (hstu_triton._forward, hstu_triton._queries_backward, hstu_triton._keys_backward):
        more = {"COPIES": hstu_triton.COPIES} if "COPIES" in kernel.arg_names else {}
        done = compiled(kernel, types, constants | more, compute_capability, num_warps=hstu_triton.WARPS, num_stages=1)
        assert done.metadata.shared <= OF_A_BLOCK[compute_capability]
        assert ("mma" in done.asm["ptx"]) == (dtype == torch.bfloat16)


@pytest.mark.gpu
def test_triton_gives_the_plain_form_on_the_device() -> None:
    from hstu_triton_checks import check_all

    check_all("cuda")


@pytest.mark.gpu
def test_cuda_tensors_go_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    from test_hstu import inputs, packing

    from logitmix.modules.encoders import hstu_attention

    packed_T3Gd, position_L, time_K = (of.cuda() for of in inputs([200, 7], 2, 32, 200, True))
    packed = packing([200, 7]).to(torch.device("cuda"))
    found = hstu_attention.attend(packed_T3Gd, position_L, time_K, packed)
    monkeypatch.setattr(hstu_attention, "has_triton", lambda: False)
    plain = hstu_attention.attend(packed_T3Gd, position_L, time_K, packed)
    assert not torch.equal(plain, found)
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)
