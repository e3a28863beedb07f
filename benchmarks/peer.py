"""The MoL module of RAILS (github.com/bailuding/rails, by authors of the paper), driven from its own checkout.

It is imported unchanged; its layers are configured like ours: 8x8 components of 32, SwiGLU projections of 512, gates of
hidden width 128, dropout 0.1 on item embeddings and 0.2 on gates. Its loss draws negatives for each position, which
costs several times more; here it scores shared negatives, which it also supports. Its loss that balances the gates is
computed, as always in its training, but has no backward here.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.measure import Spent, spent

PARTS = 16
"""Parts of a batch, each with its own backward: its memory is that of one part."""


def measure(path: str, positions: int, negatives: int, items: int, dim: int) -> Spent:
    """CPU seconds and peak memory of loss and gradients from query and item embeddings, FP32."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = _module(path, dim)
    item_VD = torch.randn(items, dim).requires_grad_()
    query_TD, target_T = torch.randn(positions, dim), torch.randint(items, (positions,))
    negative_N = torch.randint(items, (negatives,))

    def step(count: int, parts: int) -> None:
        pieces = zip(query_TD[:count].chunk(parts), target_T[:count].chunk(parts), strict=True)
        for query, target in pieces:
            leaf = query.detach().requires_grad_()
            _loss(module, leaf, target, negative_N, item_VD).backward()

    # Its torch.compile works in the first two steps, the second being of another size.
    step(positions // PARTS, 1)
    step(positions // PARTS // 2, 1)
    return spent(partial(step, positions, PARTS))


def _loss(module: nn.Module, query_TD: Tensor, target_T: Tensor, negative_N: Tensor, item_VD: Tensor) -> Tensor:
    positive, _ = module(query_TD, F.embedding(target_T[:, None], item_VD))
    negative, _ = module(query_TD, F.embedding(negative_N[None], item_VD))
    negative = negative.masked_fill(target_T[:, None] == negative_N[None], -torch.inf)
    return -F.log_softmax(torch.cat([positive, negative], 1), 1)[:, 0].sum()


def _module(path: str, dim: int) -> nn.Module:
    # `logitmix` is a namespace, so no name in that checkout can hide one of ours.
    sys.path.insert(0, str(Path(path).resolve()))
    from rails.similarities.layers import SwiGLU
    from rails.similarities.mol.item_embeddings_fns import RecoMoLItemEmbeddingsFn
    from rails.similarities.mol.query_embeddings_fns import RecoMoLQueryEmbeddingsFn
    from rails.similarities.mol.similarity_fn import MoLSimilarity, SoftmaxDropoutCombiner

    def projection(dropout: float, width: int, out: int) -> nn.Module:
        return nn.Sequential(nn.Dropout(dropout), SwiGLU(width, 512), nn.Linear(512, out))

    def gate(bias: bool, width: int, out: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, 128), nn.SiLU(), nn.Linear(128, out, bias=bias))

    side: dict[str, Any] = {"dot_product_dimension": 32, "dot_product_l2_norm": True, "eps": 1e-6}
    query = RecoMoLQueryEmbeddingsFn(
        query_embedding_dim=dim,
        query_dot_product_groups=8,
        proj_fn=partial(projection, 0.0),
        uid_embedding_hash_sizes=[],
        uid_dropout_rate=0.0,
        **side,
    )
    item = RecoMoLItemEmbeddingsFn(
        item_embedding_dim=dim, item_dot_product_groups=8, proj_fn=partial(projection, 0.1), **side
    )
    return MoLSimilarity(
        query_embedding_dim=dim,
        item_embedding_dim=dim,
        query_dot_product_groups=8,
        item_dot_product_groups=8,
        temperature=0.05,
        query_embeddings_fn=query,
        item_embeddings_fn=item,
        item_proj_fn=None,
        gating_query_only_partial_fn=partial(gate, False),
        gating_item_only_partial_fn=partial(gate, False),
        gating_qi_partial_fn=partial(gate, True),
        gating_combination_type="glu_silu",
        gating_normalization_fn=lambda _: SoftmaxDropoutCombiner(0.2, 1e-6),
        **side,
    )
