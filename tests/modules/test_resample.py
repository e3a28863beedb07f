"""Negatives that a dot product draws: the sum over them is, in the mean, that over all."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from logitmix.modules.losses.blockwise import Examples
from logitmix.modules.noise import Noise
from logitmix.modules.resample import resampled

T, V, D, N, COUNT = 30, 50, 8, 40, 12
BOUNDS = [0, 12, 13, 30]


def examples(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, Examples]:
    generator = torch.Generator().manual_seed(seed)
    query_TD, item_VD = (torch.randn(count, D, generator=generator) for count in (T, V))
    target_T, negatives_GN = (torch.randint(V, shape, generator=generator) for shape in ((T,), (len(BOUNDS) - 1, N)))
    return query_TD, item_VD, Examples(torch.arange(T) + 100, target_T, BOUNDS, negatives_GN)


@pytest.mark.parametrize("corrected", [False, True])
def test_the_sum_over_what_is_drawn_is_that_over_all_in_the_mean(corrected: bool) -> None:
    query_TD, item_VD, given = examples()
    if corrected:
        given = replace(given, log_q_V=torch.linspace(-3, 0, V))
    score_TV, times = torch.randn(T, V, generator=torch.Generator().manual_seed(1)), 600
    lowered_TV = score_TV if given.log_q_V is None else score_TV - given.log_q_V
    sum_RT, all_T = torch.zeros(times, T), torch.zeros(T)
    for key in range(times):
        place_S, drawn = resampled(query_TD, item_VD, given, COUNT, Noise(key))
        assert drawn.log_q_V is not None and drawn.negatives_GN.shape == (len(BOUNDS) - 1, COUNT)
        assert place_S[drawn.target_T].equal(given.target_T)
        log_q_V = torch.zeros(V) if given.log_q_V is None else given.log_q_V
        assert drawn.log_q_V[drawn.target_T].equal(log_q_V[given.target_T])
        for (start, end), negative_n in zip(pairwise(BOUNDS), drawn.negatives_GN, strict=True):
            sum_RT[key, start:end] = (score_TV[start:end, place_S[negative_n]] - drawn.log_q_V[negative_n]).exp().sum(1)
    for (start, end), negative_N in zip(pairwise(BOUNDS), given.negatives_GN, strict=True):
        others_N = negative_N[~torch.isin(negative_N, given.target_T[start:end])]
        all_T[start:end] = lowered_TV[start:end, others_N].exp().sum(1)
    assert ((sum_RT.mean(0) - all_T).abs() < 4 * sum_RT.std(0) / times**0.5).all()
    assert (sum_RT.std(0) < 3 * all_T).all()


def test_a_group_draws_the_same_on_whichever_rank_it_is() -> None:
    """The last group as part of a whole batch, and alone on a rank."""
    query_TD, item_VD, given = examples()
    first = BOUNDS[-2]
    alone = replace(
        given,
        row_T=given.row_T[first:],
        target_T=given.target_T[first:],
        bounds=[0, T - first],
        negatives_GN=given.negatives_GN[-1:],
    )
    for key in range(20):
        whole_S, whole = resampled(query_TD, item_VD, given, COUNT, Noise(key))
        own_S, own = resampled(query_TD[first:], item_VD, alone, COUNT, Noise(key))
        assert torch.equal(own_S[own.negatives_GN[0]], whole_S[whole.negatives_GN[-1]])


def test_where_all_negatives_are_targets_they_are_drawn_all_the_same() -> None:
    query_TD, item_VD, given = examples()
    given = replace(given, negatives_GN=given.target_T[12].expand(3, N).contiguous())
    place_S, drawn = resampled(query_TD, item_VD, given, COUNT, Noise(0))
    assert (place_S[drawn.negatives_GN] == given.target_T[12]).all()
    assert drawn.log_q_V is not None and drawn.log_q_V.isfinite().all()


def test_a_rank_without_positions_draws_nothing() -> None:
    empty = Examples(torch.arange(0), torch.arange(0), [0], torch.zeros(0, N, dtype=torch.int64))
    place_S, drawn = resampled(torch.empty(0, D), torch.ones(V, D), empty, COUNT, Noise(0))
    assert not len(place_S) and drawn is empty
