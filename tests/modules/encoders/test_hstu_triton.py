import pytest
import torch


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
