"""A loss: each negative shall score lower than the target by a margin.

logitmix train demo-mol --import hinge.py --model.loss.kind hinge --model.loss.margin 2
"""

from dataclasses import dataclass

from torch import Tensor

from logitmix.modules.config import LOSSES, LossConfig


def hinge(positive_T: Tensor, negative_TN: Tensor, hit_TN: Tensor, config: "HingeConfig") -> Tensor:
    """Of each position, the mean over the negatives; those that are the target itself do not count."""
    over_TN = (config.margin + negative_TN - positive_T[:, None]).clamp(min=0).masked_fill(hit_TN, 0)
    return over_TN.sum(1) / (~hit_TN).sum(1).clamp(min=1)


@dataclass(frozen=True)
class HingeConfig(LossConfig):
    """The loss, of kind "hinge": by how much negatives score above the target less the margin."""

    module = hinge
    corrects = False  # in-batch negatives are corrected by log probabilities, which suits softmax alone
    kind: str = "hinge"
    margin: float = 1.0
    """How much lower a negative's score shall be than the target's."""


LOSSES["hinge"] = HingeConfig
