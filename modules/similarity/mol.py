"""Mixture of logits (MoL): the paper's final similarity (section 3.3) and algorithm (section 3.4).

Axes: T queries, N items, D width, U query components (k_u), I item components (k_x), C component width,
M = U * I mixture components.
"""

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import MoLConfig
from ..linear import Linear
from ..losses.blockwise import GATES, Examples, Side
from ..losses.mol_loss import mol_sampled_softmax
from ..noise import Noise
from .base import PairDropout, Similarity
from .components import Compressed, Projection, begin_as_dot_product
from .dot import l2_normalize
from .mol_scores import mol_scores

PREFERENCE = 4.0
"""Initial bias of the cross gate for pairs of like components: with 8 x 8, SiLU and softmax give these 8 pairs about
0.88 of the weight."""


class MoL(Similarity):
    """phi(x, u) = sum over (u, i) of pi_ui(x, u) <f_u(u), g_i(x)> / tau, with decomposed gating (section 3.2): pi is a
    softmax of SiLU(uw xw + cw), each weight from an MLP of query, item and logits.

    Precision: projections, logits, gating MLPs, SiLU and the gates' softmax run in the dtype that autocast sets, as
    in section 4.3. L2 norms are FP32, and the weighted sum over components accumulates and ends in FP32: there are few
    of them, and a similarity of size 1/tau rounded to BF16 would be off by up to 0.06.
    """

    reads_stored = True
    fused = True
    """Whether there are compiled forms of its loss and scores."""

    def __init__(self, dim: int, config: MoLConfig) -> None:
        super().__init__()
        self.config, self.pair_dropout = config, config.gate_dropout
        U, I, C = config.query_components, config.item_components, config.component_dim
        hidden = config.projection_hidden
        self.query_projection = Projection(dim, hidden, U - config.user_component, C)
        self.user_map = Linear(dim, C, bias=False) if config.user_component else None
        self.item_projection = Projection(dim, 0 if config.item_projection_linear else hidden, I, C)
        self.query_gate, self.item_gate, self.cross_gate = self._make_gates(dim, config.gate_hidden, U * I)
        self.dim = dim
        self.query_features: Compressed | None = None
        self.item_features: Compressed | None = None

    def _make_gates(self, dim: int, hidden: int, M: int) -> tuple[nn.Module, nn.Module, nn.Sequential]:
        """Returns the MLPs of query, item and logits, drawn in this order."""
        return (
            _gate(dim, hidden, M, bias=False),
            _gate(dim, hidden, M, bias=False),
            _gate(M, hidden, M, bias=True),
        )

    def use_features(self, of_query: int, of_item: int) -> None:
        """Gives each feature its own component, which is compressed together with the others; not the user's id where
        it stays a component."""
        C, hidden, with_user = self.config.component_dim, self.config.gate_hidden, self.config.user_component
        if of_query - with_user:
            kept = self.config.query_components - with_user
            self.query_features = Compressed(self.dim, of_query - with_user, kept, C, hidden)
        if of_item:
            self.item_features = Compressed(self.dim, of_item, self.config.item_components, C, hidden)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draws random layers, changed so that the mixture begins nearly as the dot product of query and item, or their
        cosine with L2 norms: a warm start from a dot product's run begins with about its quality.

        The products of like components begin as shares of the dot product (`begin_as_dot_product`). The cross gate
        begins with a preference for these and ignores the values of the logits: with sizes of up to 1/tau, they would
        make its choice random. A component of the user's id begins with little weight.
        """
        super().reset_parameters(generator)
        begin_as_dot_product(self.query_projection, self.item_projection, generator)
        last = cast(nn.Linear, self.cross_gate[2])
        last.weight.zero_()
        last.bias.view(self.config.query_components, -1)[: self.query_projection.shape[0]].fill_diagonal_(PREFERENCE)
        for features in (self.query_features, self.item_features):
            if features is not None:
                features.compression.reset_parameters()

    def query(self, query_TD: Tensor, row_T: Tensor, noise: Noise | None = None, groups: Sequence[Tensor] = ()) -> Side:
        """Returns components [T, U, C], already divided by tau, and gating weights [T, M]. With a component of the
        user's id, its embedding is the last group [T, D]."""
        query_TD = _in_autocast(query_TD)
        components = self.query_projection(query_TD)
        if self.user_map is not None:
            *groups, user_TD = groups
        if self.query_features is not None:
            components = self.query_features(components, groups)
        if self.user_map is not None:
            components = torch.cat([components, self.user_map(user_TD)[:, None]], 1)
        weights = self.query_gate(self._gate_input(query_TD, row_T, noise, "mol.query_gate"))
        return self._scaled(components, 1 / self.config.temperature), weights

    def item(self, item_ND: Tensor, row_N: Tensor, noise: Noise | None = None, groups: Sequence[Tensor] = ()) -> Side:
        """Returns components [N, I, C] and gating weights [N, M]; both depend on the item alone, so serving caches
        them."""
        dropped_ND = item_ND = _in_autocast(item_ND)
        if noise:
            dropped_ND = noise.dropout(item_ND, self.config.projection_dropout, "mol.item", row_N)
        components = self.item_projection(dropped_ND)
        if self.item_features is not None:
            components = self.item_features(components, groups)
        weights = self.item_gate(self._gate_input(item_ND, row_N, noise, "mol.item_gate"))
        return self._scaled(components, 1.0), weights

    def all_pairs(self, query: Side, item: Side, dropout: PairDropout | None = None) -> Tensor:
        (query_TUC, query_gate), (item_NIC, item_gate) = query, item
        T, U, C = query_TUC.shape
        N, I, _ = item_NIC.shape
        # torch.export traces tensors that have no numbers yet.
        if dropout is None and not torch.is_grad_enabled() and not torch.compiler.is_exporting():
            every_P = torch.arange(N, device=item_NIC.device).repeat(T)
            fused = self._fused_scores(query, item, every_P, range(0, T * N + 1, N) if N else [0] * (T + 1))
            if fused is not None:
                return fused.view(T, N)
        item_NIC, item_gate = (part.to(of.dtype) for part, of in zip(item, query, strict=True))
        logits = torch.mm(query_TUC.reshape(T * U, C), item_NIC.reshape(N * I, C).t())
        logits_TNM = logits.view(T, U, N, I).transpose(1, 2).reshape(T, N, U * I)
        return self._mix(logits_TNM, query_gate[:, None], item_gate[None], dropout)

    def pairs(self, query: Side, item: Side, dropout: PairDropout | None = None) -> Tensor:
        return self._mix(_logits_of_pairs(query, item), query[1], item[1], dropout)

    def candidates(self, query: Side, item: Side, item_P: Tensor, bounds: Sequence[int]) -> Tensor:
        fused = self._fused_scores(query, item, item_P, bounds)
        return super().candidates(query, item, item_P, bounds) if fused is None else fused

    def pair_parameters(self) -> list[nn.Parameter]:
        return list(self.cross_gate.parameters())

    @property
    def pair_numbers(self) -> int:
        """The logits and the cross gate's hidden layer."""
        return self.config.query_components * self.config.item_components + self.config.gate_hidden

    def sampled_softmax(self, query: Side, item: Side, examples: Examples, noise: Noise | None = None) -> Tensor:
        fused = None
        if self.fused:
            fused = mol_sampled_softmax(query, item, self.pair_parameters(), examples, noise, self.pair_dropout)
        # In plain torch, which on a GPU is slower by far.
        return super().sampled_softmax(query, item, examples, noise) if fused is None else fused

    def gates(self, query: Side, item: Side) -> Tensor:
        """Returns pi(x, u) of query t with item t, FP32 [T, M]."""
        return self._gates(_logits_of_pairs(query, item), query[1], item[1]).float()

    def parts(self, query: Side, item: Side) -> Tensor:
        """Returns pi_ui(x, u) <f_u(u), g_i(x)> / tau of query t with item t, FP32 [T, U, I]."""
        return (self.gates(query, item) * _logits_of_pairs(query, item)).unflatten(1, (query[0].shape[1], -1))

    def target_gates(self, query: Side, item: Side, examples: Examples, noise: Noise | None = None) -> Tensor:
        """Returns pi(x, u) of each position with its target, FP32 [T, M], after the dropout that they have in the
        loss."""
        gates_TM = self.gates(query, tuple(part.index_select(0, examples.target_T) for part in item))
        if noise is None or self.pair_dropout == 0:
            return gates_TM
        candidates = examples.negatives_GN.shape[1] + 1
        kept_TM = noise.dropout(gates_TM, self.pair_dropout, GATES, examples.row_T * candidates)
        return kept_TM / kept_TM.sum(1, keepdim=True).clamp(min=1e-6)

    def diagnostics(self, query: Side, item: Side) -> dict[str, Tensor]:
        """Returns how evenly the components are used; entropy 1 is even use."""
        gates_TM = self.gates(query, item)
        use_M = gates_TM.mean(0)
        entropy = -(gates_TM * gates_TM.clamp(min=1e-12).log()).sum(1).mean()
        most = math.log(len(use_M))
        return {
            "gates/entropy": entropy / most if most else torch.zeros(()),
            "gates/least_used": use_M.min(),
            "gates/most_used": use_M.max(),
            "gates/use_of_components": use_M,
        }

    def _fused_scores(self, query: Side, item: Side, item_P: Tensor, bounds: Sequence[int]) -> Tensor | None:
        return mol_scores(query, item, self.pair_parameters(), item_P, bounds) if self.fused else None

    def _scaled(self, components: Tensor, scale: float) -> Tensor:
        return l2_normalize(components, scale, components.dtype) if self.config.normalize else components * scale

    def _gate_input(self, x_RD: Tensor, row_R: Tensor, noise: Noise | None, site: str) -> Tensor:
        return noise.dropout(x_RD, self.config.gate_input_dropout, site, row_R) if noise else x_RD

    def _gates(self, logits: Tensor, query_weights: Tensor, item_weights: Tensor) -> Tensor:
        """Returns the gates of logits [..., M], a distribution over the M components."""
        combined = self._combined(logits, query_weights, item_weights)
        with torch.autocast(combined.device.type, enabled=False):
            return F.softmax(combined, dim=-1)

    def _combined(self, logits: Tensor, query_weights: Tensor, item_weights: Tensor) -> Tensor:
        return F.silu(torch.addcmul(self.cross_gate(logits), query_weights, item_weights))

    def _mix(self, logits: Tensor, query_weights: Tensor, item_weights: Tensor, dropout: PairDropout | None) -> Tensor:
        pi = self._gates(logits, query_weights, item_weights)
        if dropout is not None:
            pi = dropout(pi)
        mixed = (pi * logits).sum(-1, dtype=torch.float32)
        if dropout is not None:
            # The gates stay a distribution: those that dropout keeps are renormalized.
            mixed = mixed / pi.sum(-1, dtype=torch.float32).clamp(min=1e-6)
        return mixed


class JointMoL(MoL):
    """MoL with joint gating: pi is a softmax of one MLP of query, item and logits. Its first layer is a sum of three
    parts, so the gating weights of a side are its part of the hidden layer, [T, H] or [N, H]. Loss and scores are in
    plain torch."""

    fused = False

    def _make_gates(self, dim: int, hidden: int, M: int) -> tuple[nn.Module, nn.Module, nn.Sequential]:
        last = nn.Sequential(Linear(M, hidden, bias=False), nn.SiLU(), Linear(hidden, M))
        return Linear(dim, hidden), Linear(dim, hidden, bias=False), last

    def _combined(self, logits: Tensor, query_weights: Tensor, item_weights: Tensor) -> Tensor:
        first, silu, last = self.cross_gate
        return last(silu(first(logits) + query_weights + item_weights))


def mixture_of_logits(dim: int, config: MoLConfig) -> MoL:
    """Returns the similarity with the gating that the configuration names."""
    return JointMoL(dim, config) if config.gating == "joint" else MoL(dim, config)


def _in_autocast(x_RD: Tensor) -> Tensor:
    """Returns the vectors on CUDA in autocast's dtype, so that the layers that take it do not each cast it."""
    return x_RD.to(torch.get_autocast_dtype("cuda")) if x_RD.is_cuda and torch.is_autocast_enabled("cuda") else x_RD


def _logits_of_pairs(query: Side, item: Side) -> Tensor:
    """Returns <f_u(u), g_i(x)> / tau of query t with item t [T, M]."""
    return torch.bmm(query[0], item[0].transpose(1, 2)).flatten(1)


def _gate(dim: int, hidden: int, out: int, bias: bool) -> nn.Sequential:
    return nn.Sequential(Linear(dim, hidden), nn.SiLU(), Linear(hidden, out, bias=bias))
