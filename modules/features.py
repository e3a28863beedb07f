"""Features of items, users and events as embeddings of one width.

Axes: R rows (items, sequences or positions), S ids of all bags, V unique ids of a table, G features, W width of a table
or vector, D width of the model, B users, T their actions, one user's after another's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .kinds.date import TICKS, waves
from .linear import Linear
from .schema import Feature
from .transfer import on_device

NO_TIME = -(2**62)
"""Instead of the time of a request that states none."""


@dataclass(frozen=True)
class Values:
    """One feature of R rows.

    `values` of a sparse kind are int64 [R] and index the unique ids of the feature's table; those of others are FP32,
    as in the dataset: [R], or [R, W] where they are wide. Bags are [S] with `offsets` [R + 1], or [R, any] with -1
    behind each row's ids, for programs whose shapes may not depend on values. `parallel`: what each value of a bag has
    beside it, FP32 of the same shape, by the kind's names.
    """

    values: Tensor
    offsets: Tensor | None = None
    parallel: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of_cells(cls, feature: Feature, cells: Sequence[Any]) -> "Values":
        """From what the feature's kind makes of R requests."""
        form, dtype = feature.form, torch.int64 if feature.sparse else torch.float32
        if not form.bag:
            shape = (len(cells), feature.width) if form.wide else (len(cells),)
            return cls(torch.tensor(cells, dtype=dtype).view(shape))
        first, *others = zip(*cells, strict=True) if form.parallel and cells else (cells, *([] for _ in form.parallel))
        lengths = torch.tensor([0, *map(len, first)])
        parallel = dict(zip(form.parallel, (_flat(of, torch.float32) for of in others), strict=True))
        return cls(_flat(first, dtype), lengths.cumsum(0), parallel)

    @classmethod
    def of_tensors(cls, feature: Feature, tensors: Mapping[str, Tensor]) -> "Values":
        """From the output of `tensors`, among others."""
        parallel = {name: tensors[f"{feature.name}.{name}"] for name in feature.form.parallel}
        return cls(tensors[f"{feature.name}.values"], tensors.get(f"{feature.name}.offsets"), parallel)

    def tensors(self, feature: Feature) -> dict[str, Tensor]:
        """By name, as an export stores them."""
        offsets = {} if self.offsets is None else {"offsets": self.offsets}
        return {
            f"{feature.name}.{name}": of for name, of in {"values": self.values, **offsets, **self.parallel}.items()
        }

    def to(self, device: torch.device) -> "Values":
        offsets = None if self.offsets is None else on_device(self.offsets, device)
        parallel = {name: on_device(of, device) for name, of in self.parallel.items()}
        return Values(on_device(self.values, device), offsets, parallel)

    def first(self, rows: int) -> "Values":
        """The values of the first rows."""
        if self.offsets is None:
            return Values(self.values[:rows])
        end = int(self.offsets[rows])
        parallel = {name: of[:end] for name, of in self.parallel.items()}
        return Values(self.values[:end], self.offsets[: rows + 1], parallel)

    def take(self, index_N: Tensor) -> "Values":
        """The values of some rows, by place."""
        if self.offsets is None:
            return Values(self.values[index_N])
        start_N = self.offsets[index_N]
        lengths_N = self.offsets[index_N + 1] - start_N
        offsets = F.pad(lengths_N.cumsum(0), (1, 0))
        place_S = torch.repeat_interleave(start_N - offsets[:-1], lengths_N)
        place_S += torch.arange(len(place_S), device=place_S.device)
        return Values(self.values[place_S], offsets, {name: of[place_S] for name, of in self.parallel.items()})

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        for of in self._all():
            of.record_stream(stream)

    def _all(self) -> Iterator[Tensor]:
        yield from (self.values, *self.parallel.values())
        if self.offsets is not None:
            yield self.offsets


def _flat(lists: Sequence[Sequence[Any]], dtype: torch.dtype) -> Tensor:
    return torch.tensor([value for values in lists for value in values], dtype=dtype)


@dataclass(frozen=True)
class Features:
    """Features of some items, users and actions; `values` by the features' names.

    item_row_V: the place of each item's row among the unique ids of the item table; None if these ids are the items, in
    order.
    """

    item_row_V: Tensor | None = None
    values: Mapping[str, Values] = field(default_factory=dict)

    def to(self, device: torch.device) -> "Features":
        row = None if self.item_row_V is None else on_device(self.item_row_V, device)
        return replace(self, item_row_V=row, values={name: of.to(device) for name, of in self.values.items()})

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        if self.item_row_V is not None:
            self.item_row_V.record_stream(stream)
        for of in self.values.values():
            of.record_stream(stream)


class Embedded(NamedTuple):
    """Items or queries: one vector each [R, D], the sum of their embeddings, and their features' embeddings separately,
    each [R, D]. A user's id that is a component of MoL is the last of these and not in the sum."""

    vector_RD: Tensor
    groups: Sequence[Tensor] = ()

    def detach(self) -> "Embedded":
        return Embedded(self.vector_RD.detach(), [group_RD.detach() for group_RD in self.groups])

    def take(self, index: Tensor | slice) -> "Embedded":
        """Returns those at the given places."""
        return Embedded(_taken(self.vector_RD, index), [_taken(group_RD, index) for group_RD in self.groups])


def _taken(of_RD: Tensor, index: Tensor | slice) -> Tensor:
    # On CUDA the gradient of `index_select` takes two kernels, and that of a tensor in brackets eight.
    return of_RD.index_select(0, index) if isinstance(index, Tensor) else of_RD[index]


class FeatureEmbeddings(nn.Module):
    """Each feature as an embedding [R, D]: what its kind makes of its values, and a linear map of that, unless it is
    made of a table's rows of width D."""

    def __init__(self, features: Sequence[Feature], table_dims: Mapping[str, int], dim: int) -> None:
        super().__init__()
        self.features = tuple(features)
        # By place, not by name: a dataset's column names must not clash with a module's attributes.
        self.maps = nn.ModuleList(_map(feature, table_dims, dim) for feature in self.features)

    def forward(self, rows: Mapping[str, Tensor], of: Mapping[str, Values]) -> list[Tensor]:
        """The features' embeddings [R, D], from the rows [V, W] of each table's unique ids."""
        return [
            map_(feature.form.embed(feature, of[feature.name], rows.get(feature.table)))
            for feature, map_ in zip(self.features, self.maps, strict=True)
        ]


def _map(feature: Feature, table_dims: Mapping[str, int], dim: int) -> nn.Module:
    if not feature.table:
        return Linear(feature.form.inputs(feature), dim)
    width = table_dims[feature.table]
    return nn.Identity() if width == dim else Linear(width, dim, bias=False)


def waves_of_times(time_R: Tensor, unit: str) -> Tensor:
    """Times of requests in a unit, int64, as kind date has the dates of items; zero for NO_TIME."""
    return waves(time_R.double() / TICKS[unit], time_R != NO_TIME)


def recency_rows(time_T: Tensor, first_B: Tensor) -> Tensor:
    """The rows [T] of table recency, int64, for actions at these times (whole numbers, which never decrease for a
    user); first_B is where each user's actions begin. 0 for a user's first action; for the others 1 + the number of
    bits of the time since the previous action (1 for 0, 2 for 1, 3 for 2 and 3, …).
    """
    time_T = time_T.long()
    gap_T = torch.cat([time_T[:1], time_T.diff()])
    row_T = 1 + torch.bucketize(gap_T, 2 ** torch.arange(63), right=True)
    # Times do not decrease, so a negative difference has overflowed: it takes all 64 bits.
    row_T[gap_T < 0] = 65
    row_T[first_B] = 0
    return row_T


class AdaptiveCompression(nn.Module):
    """k' embeddings of a row become k of the same width (section 3.1.1, "Adaptive Embedding Compression"): v_i = sum
    over j of w_ji v'_j, with weights from a two-layer MLP of all k'.

    Axes: J embeddings in (the paper's k'), K embeddings out (k), C their width.
    """

    def __init__(self, count: int, kept: int, width: int, hidden: int) -> None:
        super().__init__()
        self.shape = (count, kept)
        self.weights = nn.Sequential(Linear(count * width, hidden), nn.SiLU(), Linear(hidden, count * kept))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Call after the random initialization of the layers: the compression begins by keeping the first K
        embeddings."""
        last = self.weights[2]
        assert isinstance(last, nn.Linear)
        last.weight.zero_()
        nn.init.eye_(last.bias.view(self.shape))

    def forward(self, v_RJC: Tensor) -> Tensor:
        """[R, J, C] -> [R, K, C]."""
        w_RJK = self.weights(v_RJC.flatten(1)).view(-1, *self.shape)
        return torch.bmm(w_RJK.transpose(1, 2), v_RJC)
