"""Features of items, users and events as embeddings of one width.

Axes: R rows (items, sequences or positions), S ids of all bags, V unique ids of a table, G features, W width of a table
or vector, D width of the model, B users, T their actions, one user's after another's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .kinds.date import TICKS, waves
from .linear import Linear
from .schema import Feature
from .transfer import on_device
from .values import Values

NO_TIME = -(2**62)
"""Instead of the time of a request that states none."""


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


def values_of_cells(feature: Feature, cells: Sequence[Any]) -> Values:
    """Returns a feature's values in R requests, of which its kind has made the cells."""
    form, dtype = feature.form, torch.int64 if feature.sparse else torch.float32
    if not form.bag:
        shape = (len(cells), feature.width) if form.wide else (len(cells),)
        return Values(torch.tensor(cells, dtype=dtype).view(shape))
    first, *others = zip(*cells, strict=True) if form.parallel and cells else (cells, *([] for _ in form.parallel))
    lengths = torch.tensor([0, *map(len, first)])
    flat = (torch.tensor([*chain(*lists)], dtype=torch.float32) for lists in others)
    parallel = dict(zip(form.parallel, flat, strict=True))
    return Values(torch.tensor([*chain(*first)], dtype=dtype), lengths.cumsum(0), parallel)


def values_of_tensors(feature: Feature, tensors: Mapping[str, Tensor]) -> Values:
    """Returns a feature's values from tensors by name, such as `stored_tensors` has made."""
    parallel = {name: tensors[f"{feature.name}.{name}"] for name in feature.form.parallel}
    return Values(tensors[f"{feature.name}.values"], tensors.get(f"{feature.name}.offsets"), parallel)


def stored_tensors(feature: Feature, of: Values) -> dict[str, Tensor]:
    """Returns the tensors of a feature's values by name, as an export stores them."""
    offsets = {} if of.offsets is None else {"offsets": of.offsets}
    return {f"{feature.name}.{name}": part for name, part in {"values": of.values, **offsets, **of.parallel}.items()}


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
        self.maps = nn.ModuleList()
        for feature in self.features:
            width = table_dims[feature.table] if feature.table else feature.form.inputs(feature)
            self.maps.append(
                nn.Identity() if feature.table and width == dim else Linear(width, dim, bias=not feature.table)
            )

    def forward(self, rows: Mapping[str, Tensor], of: Mapping[str, Values]) -> list[Tensor]:
        """Returns the features' embeddings [R, D], from the rows [V, W] of each table's unique ids."""
        return [
            map_(feature.form.embed(feature, of[feature.name], rows.get(feature.table)))
            for feature, map_ in zip(self.features, self.maps, strict=True)
        ]


def waves_of_times(time_R: Tensor, unit: str) -> Tensor:
    """Times of requests in a unit, int64, as kind date has the dates of items; zero for NO_TIME."""
    return waves(time_R.double() / TICKS[unit], time_R != NO_TIME)


def recency_rows(time_T: Tensor, first_B: Tensor) -> Tensor:
    """Returns the rows [T] of table recency, int64, for actions at these times (whole numbers, which never decrease for
    a user); first_B is where each user's actions begin. 0 for a user's first action; for the others 1 + the number of
    bits of the time since the previous action (1 for 0, 2 for 1, 3 for 2 and 3, …)."""
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
        """Resets the layers. To be called after the random initialization of the layers: the compression begins by
        keeping the first K embeddings."""
        last = self.weights[2]
        assert isinstance(last, nn.Linear)
        last.weight.zero_()
        nn.init.eye_(last.bias.view(self.shape))

    def forward(self, v_RJC: Tensor) -> Tensor:
        """Compresses the J embeddings of each row, [R, J, C], to K, [R, K, C]."""
        w_RJK = self.weights(v_RJC.flatten(1)).view(-1, *self.shape)
        return torch.bmm(w_RJK.transpose(1, 2), v_RJC)
