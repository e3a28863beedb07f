import pytest
import torch

from logitmix.modules import stage1
from logitmix.modules.stage1 import Int8Corpus, hindexer_topk


@pytest.mark.gpu
@pytest.mark.parametrize("has_triton", [True, False])
def test_a_corpus_on_cuda_gives_what_one_on_the_cpu_does(has_triton: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage1, "has_triton", lambda: has_triton)
    random = torch.Generator().manual_seed(0)
    item_XH, query_BH = torch.randn(300_000, 64, generator=random), torch.randn(20, 64, generator=random)
    corpus, on_gpu = Int8Corpus.of(item_XH), Int8Corpus.of(item_XH.cuda())
    assert on_gpu.scale == corpus.scale and torch.equal(on_gpu.blocks.cpu(), corpus.blocks)
    for allowed in (None, torch.rand(300_000, generator=random) < 0.3, torch.rand(20, 300_000, generator=random) < 0.5):
        expected = hindexer_topk(query_BH, corpus, 3000, allowed)
        found = [
            hindexer_topk(query_BH.cuda(), on_gpu, 3000, None if allowed is None else allowed.cuda()) for _ in "ab"
        ]
        assert found[0].items_BK.is_cuda
        for each in found:
            assert torch.equal(each.items_BK.cpu(), expected.items_BK)
            torch.testing.assert_close(each.scores_BK.cpu(), expected.scores_BK, rtol=1e-6, atol=0)
