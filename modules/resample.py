"""Fewer negatives for a similarity that is slow: of those of each group, some are drawn by a dot product.

Axes: T positions, G groups of consecutive positions, N shared negatives of a group, n of these that are drawn, P
positions of a group that are asked, V unique items of the batch, S items of the loss, D width.
"""

from dataclasses import replace

import torch
from torch import Tensor

from .losses.blockwise import Examples
from .noise import Noise, derive_key
from .similarity.dot import l2_normalize
from .transfer import on_device

TEMPERATURE = 0.05
"""Of the dot product's softmax, by which negatives are drawn: that of the similarities, by default."""
UNIFORM = 0.1
"""What is added to the probability of all negatives together, so that none weighs too much."""
POSITIONS = 32
"""Most positions of a group whose softmax decides, evenly spaced."""
_GOLDEN = 0x9E3779B1


def resampled(
    query_TD: Tensor, item_VD: Tensor, examples: Examples, count: int, noise: Noise
) -> tuple[Tensor, Examples]:
    """The examples with `count` of each group's negatives instead of all, for sampled softmax, and the places among the
    V items of theirs [S]: the targets', and those of each group's negatives.

    A negative x is drawn with a probability q(x) in proportion to the mean over the group's positions of the softmax of
    cos(query, x) / TEMPERATURE over its negatives, and a uniform share. Its score is lowered by log(n q(x)), so that
    the sum over negatives in the softmax has the expected value of that over all N (importance sampling). Targets of
    the group are not drawn; so they are no negatives of its other positions either.

    Draws are systematic: at equal steps through the cumulated probabilities, from a random beginning, which is a
    function of the noise and the number of the group's first position, whatever the number of ranks. query_TD, item_VD:
    the vectors that the similarity's towers get; no gradient passes through the draws.
    """
    target_T, negative_GN, V = examples.target_T, examples.negatives_GN, len(item_VD)
    (G, N), T, device = negative_GN.shape, len(target_T), target_T.device
    if T == 0:
        return target_T, examples
    with torch.no_grad():
        bound_G = on_device(torch.tensor(examples.bounds), device)
        start_G, length_G = bound_G[:-1], bound_G.diff()
        place_GP = start_G[:, None] + torch.arange(POSITIONS, device=device) * length_G[:, None] // POSITIONS
        query_GPD = l2_normalize(query_TD, 1 / TEMPERATURE)[place_GP]
        item_GND = l2_normalize(item_VD)[negative_GN]
        q_GN = torch.bmm(query_GPD, item_GND.transpose(1, 2)).float().softmax(2).mean(1) + UNIFORM / N
        # Items of different groups have different numbers.
        group_T = torch.searchsorted(bound_G[1:], torch.arange(T, device=device), right=True)
        number_T = (group_T * V + target_T).sort().values
        number_GN = torch.arange(0, G * V, V, device=device)[:, None] + negative_GN
        is_target_GN = number_T[torch.searchsorted(number_T, number_GN).clamp(max=T - 1)] == number_GN
        # Where all are targets, they are drawn all the same.
        q_GN = q_GN.masked_fill(is_target_GN & ~is_target_GN.all(1, keepdim=True), 0.0)
        sum_GN = q_GN.cumsum(1)
        all_G1 = sum_GN[:, -1:]
        begin_G = ((examples.row_T[start_G] * _GOLDEN + derive_key(noise.key, "negatives")) & 0xFFFFFFFF) / 2**32
        step_Gn = (begin_G[:, None] + torch.arange(count, device=device)) * (all_G1 / count)
        drawn_Gn = torch.searchsorted(sum_GN, step_Gn).clamp(max=N - 1)
        negative_Gn = negative_GN.gather(1, drawn_Gn)
        log_q_Gn, log_q_V = (q_GN.gather(1, drawn_Gn) * (count / all_G1)).log(), examples.log_q_V
        if log_q_V is None:
            log_q_V = log_q_Gn.new_zeros(V)
        else:
            log_q_Gn = log_q_Gn + log_q_V[negative_Gn]
        # The same item weighs differently in each group.
        place_S = torch.cat([target_T, negative_Gn.flatten()])
        log_q_S = torch.cat([log_q_V[target_T], log_q_Gn.flatten()])
        own_S = torch.arange(len(place_S), device=device)
    return place_S, replace(examples, target_T=own_S[:T], negatives_GN=own_S[T:].view(G, count), log_q_V=log_q_S)
