"""Features of items, users and events as embeddings of one width.

Axes: R rows (items, sequences or positions), S ids of all bags, V unique ids of a table, G features, W width of a table
or vector, D width of the model, B users, T their actions, one user's after another's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .linear import Linear
from .schema import Feature


@dataclass(frozen=True)
class Values:
    """One feature of R rows.

    For kind id, `values` is int64 [R]; for kind ids, int64 [S] with `offsets` [R + 1], or [R, any] with -1 behind each
    row's ids, for programs whose shapes may not depend on values. They index the unique ids of the feature's table. For
    kind number it is FP32 [R], for kind vector FP32 [R, W], as in the dataset.
    """

    values: Tensor
    offsets: Tensor | None = None

    def to(self, device: torch.device) -> "Values":
        offsets = None if self.offsets is None else self.offsets.to(device, non_blocking=True)
        return Values(self.values.to(device, non_blocking=True), offsets)

    def first(self, rows: int) -> "Values":
        """The values of the first rows."""
        if self.offsets is None:
            return Values(self.values[:rows])
        return Values(self.values[: int(self.offsets[rows])], self.offsets[: rows + 1])

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        self.values.record_stream(stream)
        if self.offsets is not None:
            self.offsets.record_stream(stream)


@dataclass(frozen=True)
class Features:
    """Features of some items, users and actions; `values` by the features' names.

    item_row_V: the place of each item's row among the unique ids of the item table; None if these ids are the items, in
    order.
    """

    item_row_V: Tensor | None = None
    values: Mapping[str, Values] = field(default_factory=dict)

    def to(self, device: torch.device) -> "Features":
        row = None if self.item_row_V is None else self.item_row_V.to(device, non_blocking=True)
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


class FeatureEmbeddings(nn.Module):
    """Each feature as an embedding [R, D]: the row of an id, the mean of a bag's rows (zero for an empty bag), or a
    linear map of a number or vector, normalized by the dataset's mean and deviation. Rows whose width is not D go
    through a linear map too."""

    def __init__(self, features: Sequence[Feature], table_dims: Mapping[str, int], dim: int) -> None:
        super().__init__()
        self.features = tuple(features)
        # By place, not by name: a dataset's column names must not clash with a module's attributes.
        self.maps = nn.ModuleList(_map(feature, table_dims, dim) for feature in self.features)

    def forward(self, rows: Mapping[str, Tensor], of: Mapping[str, Values]) -> list[Tensor]:
        """The features' embeddings [R, D], from the rows [V, W] of each table's unique ids."""
        return [
            map_(_looked_up(feature, rows, of[feature.name]))
            for feature, map_ in zip(self.features, self.maps, strict=True)
        ]


def _map(feature: Feature, table_dims: Mapping[str, int], dim: int) -> nn.Module:
    if not feature.table:
        return Linear(feature.width, dim)
    width = table_dims[feature.table]
    return nn.Identity() if width == dim else Linear(width, dim, bias=False)


def _looked_up(feature: Feature, rows: Mapping[str, Tensor], of: Values) -> Tensor:
    match feature.kind:
        case "id":
            return F.embedding(of.values, rows[feature.table])
        case "ids" if of.offsets is None:
            weight_RS1 = (of.values >= 0).unsqueeze(2).to(rows[feature.table].dtype)
            row_RSW = F.embedding(of.values.clamp(min=0), rows[feature.table])
            return (row_RSW * weight_RS1).sum(1) / weight_RS1.sum(1).clamp(min=1)
        case "ids":
            return F.embedding_bag(of.values, rows[feature.table], of.offsets, mode="mean", include_last_offset=True)
        case _:
            normalized = (of.values - feature.mean) / feature.deviation
            return normalized.view(-1, feature.width)


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
