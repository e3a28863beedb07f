"""A kind of feature of one's own: the hour of the day, of which 23.5 and 0 are near each other.

    logitmix prepare table --source clicks.csv --schema schema.toml --out data/clicks --import hour.py
    logitmix train auto --data.path data/clicks --model.features all --run runs/clicks --import hour.py

The column `hour` of clicks.csv has numbers from 0 to 24, and schema.toml says:

    [features.hour]
    kind = "hour"

`evaluate`, `export`, `retrieve`, `serve` and `update-items` need the same --import.
"""

from math import pi
from typing import TYPE_CHECKING

from logitmix.modules.kinds.numbers import Number
from logitmix.modules.kinds.registry import KINDS

if TYPE_CHECKING:
    from torch import Tensor

    from logitmix.modules.kinds.base import FeatureNumbers
    from logitmix.modules.values import Values


class Hour(Number):
    """A linear map of the hour's sine and cosine; stored and asked for as a number."""

    def embed(self, feature: "FeatureNumbers", of: "Values", row_VW: "Tensor | None") -> "Tensor":
        import torch

        angle_R1 = of.values.view(-1, 1).remainder(24) * (2 * pi / 24)
        return torch.cat([angle_R1.sin(), angle_R1.cos()], 1)

    def inputs(self, feature: "FeatureNumbers") -> int:
        return 2


KINDS["hour"] = Hour()
