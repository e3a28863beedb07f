"""Fewer negatives for a similarity that is slow: of those of each group, some are drawn by a dot product.

Axes: T positions, G groups of consecutive positions, N shared negatives of a group, n of these that are drawn, P
positions of a group that are asked, V unique items of the batch, D width.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from ..noise import Noise, derive_key, random_bits
from ..transfer import on_device
from .blockwise import Examples, Side

TEMPERATURE = 0.05
"""Of the dot product's softmax, by which negatives are drawn: that of the similarities, by default."""
UNIFORM = 0.1
"""Share of uniform draws: no negative weighs more than 1 / (n UNIFORM) of what all N would together, if alike."""
POSITIONS = 32
"""Most positions of a group whose softmax decides, evenly spaced."""


def resampled(
    query_TD: Tensor, item_VD: Tensor, item: Side, examples: Examples, count: int, noise: Noise
) -> tuple[Side, Examples]:
    """The item's side and the examples with `count` of each group's negatives instead of all, for sampled softmax.

    They are drawn with replacement, a negative x with probability q(x): the mean over the group's positions of the
    softmax over its negatives of cos(query, x) / TEMPERATURE, mixed with a uniform share. Its score is lowered by
    log(n q(x)), so that the sum over negatives in the softmax has the expected value of that over all N (importance
    sampling). Targets of the group are not drawn, which are no negatives of its other positions either.

    query_TD, item_VD: the vectors that the similarity's towers get; no gradient passes through the draws. They are a
    function of the noise and the number of the group's first position, so those of any number of ranks.
    """
    target_T, negative_GN, V = examples.target_T, examples.negatives_GN, len(item_VD)
    (G, N), T, device = negative_GN.shape, len(target_T), target_T.device
    if T == 0:
        return item, examples
    with torch.no_grad():
        bound_G = on_device(torch.tensor(examples.bounds), device)
        start_G, length_G = bound_G[:-1], bound_G.diff()
        place_GP = start_G[:, None] + torch.arange(POSITIONS, device=device) * length_G[:, None] // POSITIONS
        query_GPD = F.normalize(query_TD.float(), dim=1)[place_GP]
        item_GND = F.normalize(item_VD.float(), dim=1)[negative_GN]
        q_GN = (torch.bmm(query_GPD, item_GND.transpose(1, 2)).float() / TEMPERATURE).softmax(2).mean(1)
        # Items of different groups have different numbers.
        group_T = torch.repeat_interleave(torch.arange(G, device=device), length_G, output_size=T)
        number_T = (group_T * V + target_T).sort().values
        number_GN = torch.arange(G, device=device)[:, None] * V + negative_GN
        drawable_GN = number_T[torch.searchsorted(number_T, number_GN).clamp(max=T - 1)] != number_GN
        drawable_GN |= ~drawable_GN.any(1, keepdim=True)
        q_GN = _shares(_shares(q_GN * drawable_GN) + UNIFORM / (1 - UNIFORM) * _shares(drawable_GN.float()))
        # One draw from each n-th of the distribution: fewer repeated ones than independent draws have.
        bits_Gn = random_bits(
            derive_key(noise.key, "negatives"), examples.row_T[start_G], torch.arange(count, device=device)
        )
        uniform_Gn = (torch.arange(count, device=device) + bits_Gn / 2**32 + 0.5) / count
        drawn_Gn = torch.searchsorted(q_GN.cumsum(1), uniform_Gn.float()).clamp(max=N - 1)
        negative_Gn = negative_GN.gather(1, drawn_Gn)
        log_q_Gn, log_q_V = (count * q_GN.gather(1, drawn_Gn)).log(), examples.log_q_V
        if log_q_V is None:
            log_q_V = log_q_Gn.new_zeros(V)
        else:
            log_q_Gn = log_q_Gn + log_q_V[negative_Gn]
    # The same item weighs differently in each group.
    item = tuple(torch.cat([side, side.index_select(0, negative_Gn.flatten())]) for side in item)
    own_Gn = V + torch.arange(G * count, device=device).view(G, count)
    return item, replace(examples, negatives_GN=own_Gn, log_q_V=torch.cat([log_q_V, log_q_Gn.flatten()]))


def _shares(weight_GN: Tensor) -> Tensor:
    return weight_GN / weight_GN.sum(1, keepdim=True)
