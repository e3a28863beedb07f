"""Stage 1's top K against plain torch, for every set of instructions that this processor has."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from logitmix.common.compiled import plain_torch
from logitmix.modules import stage1
from logitmix.modules.stage1 import LANES, Found, Int8Corpus, hindexer_topk

library = stage1._library()
needs_library = pytest.mark.skipif(library is None, reason="no compiler has built stage1.c")
LEVELS = range(library.stage1_level() + 1 if library else 0)


@pytest.fixture(autouse=True)
def small_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small corpora have blocks that are not in it, and several threads."""
    monkeypatch.setattr(stage1, "SMALLEST_SAMPLE", 8)
    monkeypatch.setattr(stage1, "BLOCKS_OF_A_THREAD", 8)
    monkeypatch.setattr(stage1, "_sample", stage1._sample.__wrapped__)  # without what was cached of larger ones


def plain(query_BH: Tensor, corpus: Int8Corpus, k: int, allowed: Tensor | None = None) -> Found:
    with plain_torch():
        return hindexer_topk(query_BH, corpus, k, allowed)


def assert_same(found: Found, expected: Found) -> None:
    assert torch.equal(found.items_BK, expected.items_BK)
    torch.testing.assert_close(found.scores_BK, expected.scores_BK, rtol=1e-6, atol=0)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Int8Corpus, int, Tensor | None]:
    """Queries, a corpus, k and which items are allowed. Few values make many equal scores."""
    X, H, B = (draw(st.integers(1, most)) for most in (700, 70, 19))
    k, values, random = draw(st.integers(1, X + 5)), draw(st.integers(1, 127)), torch.Generator()
    random.manual_seed(draw(st.integers(0, 2**31)))
    item_XH, query_BH = (torch.randint(-values, values + 1, (n, H), generator=random).float() for n in (X, B))
    shape = draw(st.sampled_from([None, (X,), (B, X)]))
    allowed = None if shape is None else torch.rand(shape, generator=random) < draw(st.floats(0, 1))
    return query_BH, Int8Corpus.of(item_XH), k, allowed


@needs_library
@pytest.mark.parametrize("level", LEVELS)
@given(case=cases(), threads=st.integers(1, 3))
def test_every_form_is_the_definition(
    level: int, case: tuple[Tensor, Int8Corpus, int, Tensor | None], threads: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage1, "SMALLEST_SAMPLE", 8)
        patch.setattr(stage1, "BLOCKS_OF_A_THREAD", 8)
        patch.setattr(stage1, "_BEST", level)
        patch.setattr(torch, "get_num_threads", lambda: threads)
        assert_same(hindexer_topk(*case), plain(*case))


def test_the_definition_is_the_top_of_the_quantised_products() -> None:
    """Item by item, in whole numbers."""
    random = np.random.default_rng(0)
    items, queries = random.integers(-127, 128, (40, 6)), random.integers(-3, 4, (3, 6))
    items[0, 0], queries[:, 0] = 127, 127  # so that quantisation changes nothing
    found = plain(torch.from_numpy(queries).float(), Int8Corpus.of(torch.from_numpy(items).float()), 7)
    for query, item_K, score_K in zip(queries, found.items_BK.tolist(), found.scores_BK.tolist(), strict=True):
        best = sorted(range(40), key=lambda x: (-int(items[x] @ query), x))[:7]
        assert item_K == sorted(best)
        assert score_K == pytest.approx([int(items[x] @ query) for x in sorted(best)], rel=1e-6)


@needs_library
@pytest.mark.parametrize("level", LEVELS)
def test_a_sample_of_the_best_items_alone_misleads_nobody(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The threshold is then above nearly all items, so the query is scanned again."""
    monkeypatch.setattr(stage1, "_BEST", level)
    item_XH = torch.randn(100 * LANES, 8, generator=torch.Generator().manual_seed(0)).abs()
    sample_S = stage1._sample(100, torch.device("cpu"))
    item_XH.view(100, LANES, 8)[sample_S] += 100
    corpus, query_BH = Int8Corpus.of(item_XH), torch.ones(2, 8)
    query_BH[1] = -1  # for which the sample has the worst items
    assert_same(hindexer_topk(query_BH, corpus, 400), plain(query_BH, corpus, 400))


@needs_library
@pytest.mark.parametrize("level", LEVELS)
def test_rising_scores_fill_a_buffer_again_and_again(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage1, "_BEST", level)
    monkeypatch.setattr(stage1, "DEVIATIONS", 0.0)
    item_XH = torch.arange(5000.0)[:, None] / 5000 + torch.zeros(1, 4)
    corpus, query_BH = Int8Corpus.of(item_XH), torch.ones(1, 4)
    assert_same(hindexer_topk(query_BH, corpus, 30), plain(query_BH, corpus, 30))
    assert_same(hindexer_topk(-query_BH, corpus, 30), plain(-query_BH, corpus, 30))


def test_quantisation_keeps_what_is_best() -> None:
    """Unit vectors of 64 dimensions: the recall of the exact top 1 %."""
    random = torch.Generator().manual_seed(0)
    item_XH, query_BH = (
        torch.nn.functional.normalize(torch.randn(n, 64, generator=random), dim=1) for n in (50_000, 8)
    )
    found = hindexer_topk(query_BH, Int8Corpus.of(item_XH), 500).ordered()
    exact = (query_BH @ item_XH.T).topk(500)
    same = [len(set(a) & set(b)) for a, b in zip(found.items_BK.tolist(), exact.indices.tolist(), strict=True)]
    assert sum(same) / (8 * 500) > 0.97
    assert (found.scores_BK.diff(dim=1) <= 0).all()
    torch.testing.assert_close(found.scores_BK, exact.values, rtol=0, atol=0.01)


def test_fewer_items_than_k_and_none() -> None:
    corpus = Int8Corpus.of(torch.eye(20)[:, :4])
    allowed = torch.zeros(20, dtype=torch.bool)
    allowed[[3, 19]] = True
    found = hindexer_topk(torch.ones(1, 4), corpus, 4, allowed)
    assert found.items_BK.tolist() == [[3, 19, -1, -1]]
    assert found.scores_BK[0, 2:].tolist() == [-math.inf] * 2
    assert found.ordered().items_BK.tolist() == [[3, 19, -1, -1]]
    assert hindexer_topk(torch.ones(1, 4), corpus, 100).items_BK.tolist() == [list(range(20))]
    assert hindexer_topk(torch.ones(0, 4), corpus, 5).items_BK.shape == (0, 5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"k": 0}, "k is 0; it must be at least 1"),
        ({"query_BH": torch.ones(1, 9)}, "the queries are 9 wide, the corpus 8"),
        ({"query_BH": torch.full((1, 8), math.nan)}, "the queries have values that are not finite"),
        ({"allowed": torch.ones(2, 3, dtype=torch.uint8)}, "allowed is torch.uint8"),
        ({"query_BH": torch.ones(1, 8, device="meta")}, "must be on cpu, where the corpus is"),
        ({"allowed": torch.ones(3, dtype=torch.uint8, device="meta")}, "must be on cpu, where the corpus is"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, object], said: str) -> None:
    arguments = {"query_BH": torch.ones(1, 8), "corpus": Int8Corpus.of(torch.ones(20, 8)), "k": 3} | changes
    with pytest.raises(ValueError, match=said):
        hindexer_topk(**arguments)  # type: ignore[arg-type]


def test_vectors_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        Int8Corpus.of(torch.tensor([[1.0, math.inf]]))


@pytest.mark.parametrize("counts", [[50], [32, 16, 9], [5, 40, 1, 16, 2]])
def test_parts_join_to_one_corpus(counts: list[int]) -> None:
    """Of any lengths, whole blocks or not."""
    item_XH = torch.randn(sum(counts), 6, generator=torch.Generator().manual_seed(0))
    whole = Int8Corpus.of(item_XH)
    parts = []
    for part_RH in item_XH.split(counts):
        part = Int8Corpus.empty(*part_RH.shape, whole.scale)
        part.fill(0, part_RH)
        parts.append((part.blocks, len(part_RH)))
    joined = Int8Corpus.joined(parts, whole.scale)
    assert joined.num_items == whole.num_items and torch.equal(joined.blocks, whole.blocks)
