"""A similarity: the cosine of the item and a linear map of the query.

logitmix train demo-mol --import bilinear.py --model.similarity.kind bilinear
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from logitmix.modules.config import SIMILARITIES
from logitmix.modules.linear import Linear
from logitmix.modules.noise import Noise
from logitmix.modules.similarity.base import PairDropout, Side, Similarity


class Bilinear(Similarity):
    def __init__(self, dim: int, config: "BilinearConfig") -> None:
        super().__init__()
        self.temperature, self.map = config.temperature, Linear(dim, dim, bias=False)

    def query(self, query_TD: Tensor, row_T: Tensor, noise: Noise | None = None, groups: Sequence[Tensor] = ()) -> Side:
        return (F.normalize(self.map(query_TD).float(), dim=1) / self.temperature,)

    def item(self, item_ND: Tensor, row_N: Tensor, noise: Noise | None = None, groups: Sequence[Tensor] = ()) -> Side:
        return (F.normalize(item_ND.float(), dim=1),)

    def all_pairs(self, query: Side, item: Side, dropout: PairDropout | None = None) -> Tensor:
        with torch.autocast(query[0].device.type, enabled=False):  # scores are FP32 in training with BF16 too
            return query[0] @ item[0].t()

    def pairs(self, query: Side, item: Side, dropout: PairDropout | None = None) -> Tensor:
        return (query[0] * item[0]).sum(1)


@dataclass(frozen=True)
class BilinearConfig:
    """phi(x, u), the similarity, of kind "bilinear": the cosine of the item and a linear map of the query."""

    module = Bilinear
    kind: str = "bilinear"
    temperature: float = 0.05
    """Divides the cosine."""


SIMILARITIES["bilinear"] = BilinearConfig
