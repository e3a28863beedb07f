from itertools import product
from operator import itemgetter

import pytest
import torch
from gpu_targets import EACH, OF_A_BLOCK, compiled
from sampling import one_of_each

from logitmix.modules import stage1
from logitmix.modules.stage1 import Int8Corpus, hindexer_topk


@EACH
@pytest.mark.parametrize(("filtered", "queries"), one_of_each(product((False, True), (8, 16, 64)), itemgetter(0)))
def test_the_kernels_fit_gpus_that_are_not_here(compute_capability: int, filtered: bool, queries: int) -> None:
    """Width 64: the corpus is read 16 bytes at a time, and scored by tensor cores."""
    from logitmix.modules import stage1_triton

    pointers = {"blocks": "*u8", "query": "*i8", "sample": "*i64", "allowed": "*u8", "key": "*i64"}
    pointers |= dict.fromkeys(("score", "least", "count", "tile_start", "tile_count"), "*i32")
    types = pointers | dict.fromkeys(("allowed_stride", "X", "S", "B", "R"), "i32")
    blocks = stage1_triton.SCORES // queries // stage1.LANES
    constants = {"LANES": 16, "GROUP": 4, "G": 16, "GROUPS": 16, "QUERIES": queries, "BLOCKS": blocks}
    constants |= {"FILTERED": filtered, "ASSEMBLY": True}
    for sampled in (False, True):
        done = compiled(
            stage1_triton._scan,
            types,
            {**constants, "SAMPLED": sampled},
            compute_capability,
            num_warps=stage1_triton.WARPS,
        )
        assert done.metadata.shared <= OF_A_BLOCK[compute_capability]
        assert "mma" in done.asm["ptx"] and ".s32.s8.s8" in done.asm["ptx"]
        assert done.asm["ptx"].count("ld.global.v4.b32") >= blocks * 1024 // (stage1_triton.WARPS * 32 * 16)


@pytest.mark.gpu
def test_triton_finds_what_the_definition_does_on_the_device() -> None:
    from stage1_triton_checks import check_all

    check_all("cuda")


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
