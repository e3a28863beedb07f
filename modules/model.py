"""RetrievalModel: the tables and the towers; SampledLosses: the losses of the towers.

Axes: T valid positions of a batch, packed, V unique items of a batch, S items of a resampled loss, D encoder width.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor, nn

from logitmix.common.plugins import module_of

from .batch import Batch
from .config import ModelConfig
from .embeddings import EmbeddingTable, embedding_collections
from .features import Embedded
from .losses.blockwise import Examples, Side
from .resample import resampled
from .schema import Schema
from .similarity.base import Similarity
from .similarity.mol import MoL
from .towers import Tower


class RetrievalModel(nn.Module):
    """The model-parallel tables and the data-parallel tower, which takes the tables' rows of a batch."""

    def __init__(self, tables: Sequence[EmbeddingTable], schema: Schema, config: ModelConfig) -> None:
        super().__init__()
        self.tables = embedding_collections(tables)
        self.tower = Tower(config, schema)


class SampledLosses(nn.Module):
    """A tower's losses: the module that is replicated and differentiated in training."""

    def __init__(self, tower: Tower, sum_over_ranks: Callable[[Tensor], Tensor] = lambda own: own) -> None:
        """`sum_over_ranks` adds up a tensor of all ranks that compute the losses of a batch together."""
        super().__init__()
        self.tower, self.sum_over_ranks = tower, sum_over_ranks

    def forward(self, rows: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """Losses of a batch, given the rows of each table's unique ids; each is a mean over the targets of all ranks,
        by their weights.

        "loss" is the one to minimize: "similarity" plus the weighted "hindexer" and minus the weighted
        "mutual_information", if there are any.
        """
        tower = self.tower
        examples = Examples(
            batch.row_Q, batch.target_T, batch.bounds, batch.negatives_GN, batch.log_q_V, batch.weight_Q
        )
        count, noise = tower.config.loss.resample, batch.noise
        S = len(examples.target_T) + count * len(examples.negatives_GN)
        few = noise is not None and count > 0 and len(batch.id_V) > S
        (queries, items), (query, item), of_hindexer = self.towers(rows, batch, few)
        asked = examples
        if noise is not None and count > 0:
            place_S, asked = resampled(queries.vector_RD, items.vector_RD, examples, count, noise)
            if item:
                item = tuple(part.index_select(0, place_S) for part in item)
            else:
                item = tower.similarity.item_side(items.take(place_S), batch.id_V[place_S], noise)
        losses = {"similarity": self._loss(tower.similarity, query, item, asked, batch)}
        losses["loss"] = losses["similarity"]
        if isinstance(tower.similarity, MoL) and (weight := tower.similarity.config.mutual_information):
            gates_TM = tower.similarity.target_gates(query, item, asked, batch.noise)
            losses["mutual_information"] = mutual_information(
                gates_TM, batch.total_targets, self.sum_over_ranks, batch.weight_Q
            )
            losses["loss"] = losses["loss"] - weight * losses["mutual_information"]
        if tower.hindexer is not None and of_hindexer is not None:
            losses["hindexer"] = self._loss(tower.hindexer, *of_hindexer, examples, batch)
            losses["loss"] = losses["loss"] + tower.config.hindexer.weight * losses["hindexer"]
        return losses

    def towers(
        self, rows: Mapping[str, Tensor], batch: Batch, few: bool
    ) -> tuple[tuple[Embedded, Embedded], tuple[Side, Side], tuple[Side, Side] | None]:
        """Queries and items, and their sides for the similarity, and for the h-indexer if there is one. Where the
        similarity's loss asks for `few` items, their side is left out: it is that of these alone."""
        tower = self.tower
        query, item = both = tower.at_positions(rows, batch)
        of_query = tower.similarity.query_side(query, batch.row_Q, batch.noise)
        sides = of_query, () if few else tower.similarity.item_side(item, batch.id_V, batch.noise)
        if tower.hindexer is None:
            return both, sides, None
        if tower.config.hindexer.detach:
            query, item = query.detach(), item.detach()
        of_query = tower.hindexer.query_side(query, batch.row_Q, batch.noise)
        return both, sides, (of_query, tower.hindexer.item_side(item, batch.id_V, batch.noise))

    def _loss(self, stage: Similarity, query: Side, item: Side, examples: Examples, batch: Batch) -> Tensor:
        config = self.tower.config.loss
        if config.kind == "softmax":
            return stage.sampled_softmax(query, item, examples, batch.noise) / batch.total_targets
        reduce = partial(module_of(config), config=config)
        return stage.sampled_loss(reduce, query, item, examples, batch.noise) / batch.total_targets


def mutual_information(
    gates_TM: Tensor, total: int, sum_over_ranks: Callable[[Tensor], Tensor], weight_T: Tensor | None = None
) -> Tensor:
    """This rank's share of the mutual information of pairs and components: the entropy of the mean gates of all
    `total` pairs, of which the rank has T, minus the mean entropy of each pair's gates (the regularization of MoL's
    gates in RAILS, arXiv:2407.15462, whose code takes the pairs of positions and targets). It is highest where every
    pair uses few components, and all pairs together use all of them.

    The ranks' shares, and their gradients, add up to those of all pairs on one rank.
    """
    weight_T = gates_TM.new_ones(len(gates_TM)) if weight_T is None else weight_T
    own_M = (weight_T[None] @ gates_TM)[0]
    mean_M = (own_M + (sum_over_ranks(own_M.detach()) - own_M.detach())) / total
    of_mean = -_log_sum(mean_M)
    # Each rank knows it whole and has its whole gradient, so only the value is shared out.
    of_mean = of_mean - of_mean.detach() * (1 - weight_T.sum() / total)
    return of_mean + _log_sum(gates_TM, weight_T[:, None]) / total


def _log_sum(p: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    """Sum of p log p; dropout makes some p zero."""
    return (weight * (p * (p + 1e-6).log())).sum()
