"""What a rank's step computes, counted on a small part of its batch, which is computed here on the CPU: memory,
arithmetic, memory traffic and kernels of the tower's forward, loss and backward.

Two parts of one batch are computed, one twice as large. What differs between them grows with the batch, and the rest
does not. So any encoder and similarity can be counted, those of plugins too. Attention and the loss's pairs, which
compiled code computes, are counted from their sizes.

Axes: B sequences, T positions, V unique items, G groups, N negatives of a group, D width.
"""

import copy
import weakref
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from logitmix.common.compiled import plain_torch
from logitmix.modules.batch import Bags, Batch, Packing
from logitmix.modules.config import LossConfig
from logitmix.modules.features import Embedded, Features
from logitmix.modules.initialize import initialized
from logitmix.modules.losses.blockwise import Examples, Side
from logitmix.modules.model import SampledLosses
from logitmix.modules.noise import Noise
from logitmix.modules.schema import ITEM, Schema
from logitmix.modules.similarity.base import Similarity
from logitmix.modules.similarity.dot import Dot
from logitmix.modules.similarity.mol import MoL
from logitmix.modules.towers import Tower, query_groups
from logitmix.modules.values import Values
from logitmix.trainer.commands.as_on_cuda import NoiseOnCUDA, as_on_cuda, blocks_as_on_cuda, fused_loss
from logitmix.trainer.config import Config
from logitmix.trainer.parallel.flat import FlatLosses

POSITIONS, NEGATIVES = 1024, 16
"""Positions of the smaller part, about, and most negatives of a group: what is counted on parts does not grow with
their number."""


@dataclass(frozen=True)
class Work:
    """What a rank's forward, loss and backward take, without the tables and the optimizers."""

    bytes: float = 0.0
    """Most memory at once, beyond the batch, its rows and the tower's weights and gradients: activations, and the
    gradients of the rows."""
    bf16: float = 0.0
    """Operations of matrix products in BF16; a multiply-add is two."""
    fp32: float = 0.0
    mol: float = 0.0
    """Those of MoL's pairs in BF16."""
    traffic: float = 0.0
    """Bytes that kernels read and write."""
    kernels: float = 0.0
    of_loss: float = 0.0
    """Those that the loss launches in forward, among the kernels."""

    def plus(self, other: "Work", times: float = 1.0) -> "Work":
        sums = {of.name: getattr(self, of.name) + times * getattr(other, of.name) for of in fields(self)}
        return Work(**sums)


def work_of(config: Config, schema: Schema, batch: Batch, lookups: Mapping[str, int], device: str) -> Work:
    """What a rank's batch takes that names so many rows of each table; `schema` is the model's. Takes a second or so.

    For the `device` cuda, nothing depends on this CPU, nor on which compiled parts it has. For cpu, memory is that of
    what runs here.
    """
    tower = initialized(lambda: Tower(config.model, schema), torch.Generator().manual_seed(0))
    total, sequences, N = len(batch.input_T), len(batch.packing.lengths_B), batch.negatives_GN.shape[1]
    if total == 0:
        return Work()
    few = max(1, round(POSITIONS * sequences / total))
    if 2 * few >= sequences:
        found = _counted(config, tower, *_part(batch, schema, lookups, config.model.loss, sequences), N, device)
    else:
        small, large = (_part(batch, schema, lookups, config.model.loss, count) for count in (few, 2 * few))
        least, more = (_counted(config, tower, *part, N, device) for part in (small, large))
        sizes = [len(of.input_T) for of, _ in (small, large)]
        found = least.plus(more.plus(least, -1.0), (total - sizes[0]) / (sizes[1] - sizes[0]))
        # A loss may run block by block, and there are more blocks in a larger batch. All else launches once.
        found = replace(found, kernels=more.kernels - more.of_loss + found.of_loss)
    for stage, candidates in ((tower.similarity, config.model.loss.resample or N), (tower.hindexer, N)):
        if stage is not None:
            found = found.plus(_pairs(config, schema, stage, len(batch.target_T) * (candidates + 1)))
    return found.plus(_attention(config, batch))


def imagined_batch(schema: Schema, config: Config, sequences: int, length: float, lookups: Mapping[str, int]) -> Batch:
    """A batch of one rank of a dataset that is not there, whose features are ids."""
    loss, longest = config.model.loss, max(1, round(length))
    T, V = sequences * longest, lookups[ITEM]
    each = {
        "position": [*range(T + 1)],
        "sequence": [*range(0, T + 1, longest)],
        "group": [*range(0, T, -(-loss.group_positions // longest) * longest), T],
        "batch": [0, T],
    }
    bounds = each[loss.share]
    rows = {"item": V, "user": sequences, "event": T}
    values = {
        feature.name: Values(_spread(rows[feature.owner], lookups[feature.table]))
        for feature in schema.features
        if feature.name != ITEM
    }
    N = loss.candidates(schema.num_items)
    return Batch(
        ids={name: torch.arange(count) for name, count in lookups.items()},
        id_V=torch.arange(V),
        features=Features(None, values),
        packing=Packing(torch.full((sequences,), longest), 0, *_times(config, T)),
        input_T=_spread(T, V),
        target_T=_spread(T, V),
        negatives_GN=_spread((len(bounds) - 1) * N, V).view(-1, N),
        bounds=bounds,
        noise=Noise(0),
        total_targets=T,
        log_q_V=torch.zeros(V) if loss.in_batch else None,
    )


def bytes_of(batch: Batch) -> int:
    """Of the tensors of a batch on the host or the device."""
    parts = [*vars(batch.packing).values(), *_tensors(batch.features)]
    parts += [getattr(batch, of.name) for of in fields(batch)]
    parts += [part for ids in batch.ids.values() for part in (ids if isinstance(ids, Bags) else (ids,))]
    return sum(part.nbytes for part in parts if isinstance(part, Tensor))


def _tensors(features: Features) -> Iterator[Tensor | None]:
    yield features.item_row_V
    for of in features.values.values():
        yield from (of.values, of.offsets, *of.parallel.values())


def _times(config: Config, count: int) -> Sequence[Tensor]:
    return (torch.arange(count), torch.arange(count)) if getattr(config.model.encoder, "times", False) else ()


def _spread(count: int, below: int) -> Tensor:
    """So many numbers below a bound, in no order."""
    return torch.arange(count) * 7919 % max(1, below)


def _part(batch: Batch, schema: Schema, lookups: Mapping[str, int], loss: LossConfig, sequences: int) -> "_Part":
    """The first sequences of a batch, with a proportional part of its items and rows; of a batch that shares its
    negatives, with all. The places of items and rows are others."""
    packing = batch.packing.first(sequences)
    T = Q = len(packing.row_T)
    position_Q = batch.position_Q
    if position_Q is not None:
        position_Q = position_Q[position_Q < T]
        Q = len(position_Q)
    share = 1.0 if loss.share == "batch" else T / len(batch.input_T)
    V = max(1, round(share * len(batch.id_V)))
    lookups = {name: max(1, round(share * count)) for name, count in lookups.items()}
    bounds = batch.bounds[: bisect_left(batch.bounds, Q)]
    rows = {"item": torch.arange(V), "user": torch.arange(sequences), "event": torch.arange(T)}
    values = {}
    for feature in (feature for feature in schema.features if feature.name != ITEM):
        of = batch.features.values[feature.name].take(rows[feature.owner])
        values[feature.name] = replace(of, values=of.values % lookups[feature.table]) if feature.sparse else of
    item_row_V = batch.features.item_row_V
    part = replace(
        batch,
        id_V=batch.id_V[:V],
        features=Features(None if item_row_V is None else item_row_V[:V] % lookups[ITEM], values),
        packing=packing,
        input_T=batch.input_T[:T] % V,
        target_T=batch.target_T[:Q] % V,
        position_Q=position_Q,
        weight_Q=None if batch.weight_Q is None else batch.weight_Q[:Q],
        negatives_GN=batch.negatives_GN[: len(bounds), :NEGATIVES] % V,
        bounds=[*bounds, Q],
        log_q_V=None if batch.log_q_V is None else batch.log_q_V[:V],
    )
    return part, lookups


_Part = tuple[Batch, Mapping[str, int]]
"""A batch, and the number of rows that it needs of each table."""


def _counted(
    config: Config, tower: Tower, batch: Batch, lookups: Mapping[str, int], negatives: int, device: str
) -> Work:
    """Forward, loss and backward of a part of a batch with so many negatives, without the products of pairs and of
    attention."""
    counter = _Counter()
    dims = tower.schema.dims(config.model.dim)
    rows = {name: torch.zeros(count, dims[name], requires_grad=True) for name, count in lookups.items()}
    bf16 = config.train.precision == "bf16"
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=bf16)
    if device == "cuda":
        tower, batch = copy.deepcopy(tower), replace(batch, noise=NoiseOnCUDA(0))
        as_on_cuda(tower, counter)
        losses = FlatLosses(_Losses(tower, counter, device), dist.ProcessGroup(dist.HashStore(), 0, 1))
        with plain_torch(), blocks_as_on_cuda(batch.negatives_GN.shape[1] / max(1, negatives)), counter:
            with autocast:
                loss = losses(rows, batch)["loss"]
            losses.backward(loss)
    else:
        for parameter in tower.parameters():
            # They have their places in the memory of the tower.
            parameter.grad = torch.zeros_like(parameter)
        with counter, autocast:
            loss = _Losses(tower, counter, device)(rows, batch)["loss"]
        with counter:
            loss.backward()
    in_bf16, others = counter.products[True], counter.products[False]
    return Work(counter.peak, in_bf16, others, 0.0, counter.traffic, counter.kernels, counter.of_loss)


class _Losses(SampledLosses):
    """Without the loss's own matrix products, which some similarities have in compiled code: `_pairs` counts them."""

    def __init__(self, tower: Tower, counter: "_Counter", device: str) -> None:
        super().__init__(tower)
        self.counter, self.device = counter, device

    def _loss(self, stage: Similarity, query: Side, item: Side, examples: Examples, batch: Batch) -> Tensor:
        # Its gradients are computed here, too.
        self.counter.in_loss, before = True, self.counter.kernels
        fused = None
        if self.device == "cuda" and self.tower.config.loss.kind == "softmax":
            fused = fused_loss(stage, self.counter, query, item, examples)
        loss = super()._loss(stage, query, item, examples, batch) if fused is None else fused / batch.total_targets
        self.counter.in_loss = False
        self.counter.of_loss += self.counter.kernels - before
        return loss


class _Counter(TorchDispatchMode):
    """Counts what torch runs: memory that is in use, products, bytes and kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.held, self.now, self.peak = set[int](), 0, 0
        self.products = {True: 0, False: 0}
        """In BF16, and others."""
        self.traffic = self.kernels = self.of_loss = 0
        self.in_loss = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs, inputs = _dense(result), _dense((args, kwargs))
        for tensor in outputs:
            self._hold(tensor.untyped_storage())
        packet = func._overloadpacket
        if not self.in_loss and packet in flop_registry:
            self.products[inputs[0].dtype == torch.bfloat16] += flop_registry[packet](
                *args, **(kwargs or {}), out_val=result
            )
        name = packet.__name__
        if name == "empty_like":
            # Our compiled code reads as much and fills it.
            self.traffic += 2 * sum(tensor.nbytes for tensor in outputs)
            self.kernels += 1
        elif name not in _NO_KERNEL and not func.is_view:
            self.traffic += sum(tensor.nbytes for tensor in (*inputs, *outputs))
            self.kernels += 1
        return result

    def add(self, kernels: int, traffic: int) -> None:
        self.kernels, self.traffic = self.kernels + kernels, self.traffic + traffic

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self.held:
            return
        self.held.add(key)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key, storage.nbytes())

    def _free(self, key: int, size: int) -> None:
        self.held.discard(key)
        self.now -= size


def _dense(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.layout == torch.strided]


_NO_KERNEL = {
    "empty", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view", "lift_fresh", "_local_scalar_dense",
    "constant_pad_nd", "_sparse_coo_tensor_with_dims_and_tensors",
}  # fmt: skip
"""Of torch's operations; constant_pad_nd is that of `Linear` on a CPU."""


def _pairs(config: Config, schema: Schema, stage: Similarity, pairs: int) -> Work:
    """Products of so many pairs' scores and of their gradients."""
    vector, row, of = torch.zeros(2, config.model.dim), torch.arange(2), schema.of
    query = stage.query_side(Embedded(vector[:1], [vector[:1]] * query_groups(schema)), row[:1])
    item = stage.item_side(Embedded(vector, [vector] * len(of("item"))), row)
    counts = []
    for items in (1, 2):
        counter = _Counter()
        with counter:
            stage.all_pairs(query, tuple(part[:items] for part in item))
        counts.append(counter.products[False])
    each = counts[1] - counts[0]
    # MoL's backward computes the forward again. Dot products are never in BF16.
    is_mol = isinstance(stage, MoL)
    operations = (4 if is_mol else 3) * each * pairs
    if isinstance(stage, Dot) or config.train.precision != "bf16":
        return Work(fp32=operations)
    return Work(mol=operations) if is_mol else Work(bf16=operations)


def _attention(config: Config, batch: Batch) -> Work:
    """Causal attention's products, of queries with keys and of weights with values, and their gradients: five more, as
    the weights are computed again."""
    blocks = getattr(config.model.encoder, "blocks", 0)
    squares = float(batch.packing.lengths_B.double().square().sum())
    operations = blocks * (2 + 5) * config.model.dim * squares
    return Work(bf16=operations) if config.train.precision == "bf16" else Work(fp32=operations)
