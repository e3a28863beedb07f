"""Holds stage 1 in Triton to its definition."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from hypothesis import given, settings
from test_stage1 import assert_same, cases, plain
from torch import Tensor
from triton.runtime import interpreter

from logitmix.modules import stage1
from logitmix.modules.stage1 import LANES, Found, Int8Corpus


def found(query_BH: Tensor, corpus: Int8Corpus, k: int, allowed: Tensor | None, device: str) -> Found:
    query, scale_B = stage1._quantized(query_BH, corpus)
    bits = None if allowed is None else stage1._bits(allowed, len(query), corpus.num_items).to(device)
    moved = Int8Corpus(corpus.blocks.to(device), corpus.scale, corpus.num_items)
    result = stage1._in_triton(query.to(device), scale_B.to(device), moved, min(k, corpus.num_items), bits)
    return Found(result.items_BK.cpu(), result.scores_BK.cpu())


def check(query_BH: Tensor, corpus: Int8Corpus, k: int, allowed: Tensor | None, device: str) -> None:
    assert_same(found(query_BH, corpus, k, allowed, device), plain(query_BH, corpus, k, allowed))


@contextmanager
def backwards() -> Iterator[None]:
    """The interpreter runs the last program first, as a GPU may."""
    builder = interpreter.interpreter_builder
    forwards = builder.set_grid_idx

    def turned(x: int, y: int, z: int) -> None:
        forwards(builder.grid_dim[0] - 1 - x, y, z)

    with mock.patch.object(builder, "set_grid_idx", turned):
        yield


def check_cases(device: str, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, database=None, derandomize=True)
    @given(case=cases())
    def is_the_definition(case: tuple[Tensor, Int8Corpus, int, Tensor | None]) -> None:
        check(*case, device)

    is_the_definition()


def check_sizes(device: str, few: bool) -> None:
    """Widths beside those that are multiplied at once, and more queries than are."""
    random = torch.Generator().manual_seed(0)
    for X, H, B, k in ((400, 65, 3, 40), (200, 1, 70, 13), (1000, 64, 1, 7), (300, 130, 9, 300))[: 2 if few else 4]:
        item_XH, query_BH = (torch.randn(n, H, generator=random) for n in (X, B))
        check(query_BH, Int8Corpus.of(item_XH), k, torch.rand(B, X, generator=random) < 0.7, device)


def check_order(device: str) -> None:
    """Programs in another order, and many candidates, of which one tile has most."""
    random = torch.Generator().manual_seed(0)
    item_XH = torch.randn(6000, 8, generator=random)
    item_XH[1000:1100] = 3.0
    corpus, query_BH = Int8Corpus.of(item_XH), torch.ones(2, 8)
    forwards = found(query_BH, corpus, 150, None, device)
    with backwards():
        turned = found(query_BH, corpus, 150, None, device)
    assert_same(forwards, plain(query_BH, corpus, 150))
    assert torch.equal(forwards.items_BK, turned.items_BK) and torch.equal(forwards.scores_BK, turned.scores_BK)


def check_misleading_samples(device: str) -> None:
    """A sample of the best items alone has too high a threshold; the second query's is right."""
    item_XH = torch.randn(400 * LANES, 8, generator=torch.Generator().manual_seed(0)).abs()
    sample_S = stage1._sample(400, torch.device("cpu"))
    item_XH.view(400, LANES, 8)[sample_S] += 100
    query_BH = torch.ones(2, 8)
    query_BH[1] = -1
    check(query_BH, Int8Corpus.of(item_XH), 400, None, device)
    # So little too high that the second threshold is right.
    item_XH = torch.rand(400 * LANES, 8, generator=torch.Generator().manual_seed(0))
    item_XH.view(400, LANES, 8)[sample_S] += 0.05
    check(torch.ones(1, 8), Int8Corpus.of(item_XH), 800, None, device)


def check_equal_scores(device: str, few: bool) -> None:
    """More than a buffer holds: the lowest indices."""
    item_XH = torch.ones(400 * LANES, 4)
    item_XH[5000] = 2.0
    corpus = Int8Corpus.of(item_XH)
    allowed = torch.arange(400 * LANES) % 3 > 0
    for mask in (allowed,) if few else (allowed, None):
        check(torch.ones(3, 4), corpus, 30, mask, device)


def check_few_allowed(device: str) -> None:
    random = torch.Generator().manual_seed(0)
    item_XH = torch.randn(3000, 5, generator=random)
    allowed = torch.zeros(3, 3000, dtype=torch.bool)
    allowed[1, [3, 2999]] = True
    allowed[2, 1000:1020] = True
    corpus, query_BH = Int8Corpus.of(item_XH), torch.randn(3, 5, generator=random)
    for k in (1, 10, 1000):
        check(query_BH, corpus, k, allowed, device)


def check_all(device: str, few: bool = False) -> None:
    with mock.patch.object(stage1, "SMALLEST_SAMPLE", 8):
        stage1._sample.cache_clear()
        check_sizes(device, few)
        if device == "cpu":
            check_order(device)
        check_equal_scores(device, few)
        check_few_allowed(device)
        if not few:
            check_misleading_samples(device)
            check_cases(device, 100 if device == "cpu" else 10)  # a GPU compiles each
        stage1._sample.cache_clear()
