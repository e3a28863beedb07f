"""What a kind of feature is. Its form says what its values are: from that follow how they are stored, in a dataset, in
a batch and in an export, and how they are moved. Its methods are what differs otherwise: how a column of a source is
read, how the values in a request are, and what the embedding is.

Imports no torch, for schemas are read without: methods that compute with tensors import it themselves.

Axes: R rows (items, users or events), S values of all their bags, V unique ids of a table, W width of a table's rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from ..values import Values

LARGEST = 3.4028234663852886e38
"""The largest number in FP32."""


FeatureNumbers = Any
"""What a kind knows of the feature that has it: width, mean and deviation of schema.Feature."""


Reads = Literal["one_id", "ids", "numbers", "vectors", "text_vectors", "days"]
"""How a column of a source is read: as one id a row; any number of ids a row, and what is parallel to them; one number
a row, float32 [R], NaN where it is missing; as many numbers in each row, float32 [R, width]; what the column's encoder
makes of one text a row, float32 [R, width]; or one date a row, as days since 1970, float32 [R]."""


class Kind(ABC):
    """A kind of feature."""

    reads: Reads
    in_request: str
    """What the value is in a request, in words, with {width} for the feature's width."""

    sparse = False
    """Values are rows of the feature's table; otherwise FP32 numbers."""
    bag = False
    """A row has any number of values."""
    wide = False
    """A row has as many numbers as the feature's width says."""
    parallel: tuple[str, ...] = ()
    """Names of the FP32 numbers that each value of a bag has beside it. In a source, they are other columns of lists,
    which --schema names: columns = { weights = "COLUMN" }."""

    missing: float | None = None
    """What stands for a missing number; None: the feature's mean."""
    dated = False
    """Numbers are dates of items, which the model compares with the time of the request."""

    of_texts = False
    """Numbers are what the feature's encoder makes of texts (text.py)."""

    needs = "a finite number"
    """What a parallel number must be."""

    @abstractmethod
    def cell(self, feature: FeatureNumbers, value: Any, row_of: Callable[[Any], int]) -> Any:
        """Returns the value of a request, None where it is missing. `row_of` finds the row of an id, or the vector of a
        text, for kinds of texts. Returns a row or a list of rows of the table, or a number or a list of numbers; a kind
        with parallel numbers, a list for the rows and one more for each of these.

        TypeError or ValueError that begins with what is wrong: "is …; it must be …".
        """

    @abstractmethod
    def embed(self, feature: FeatureNumbers, of: Values, row_VW: Tensor | None) -> Tensor:
        """Returns the embeddings [R, W], before they are mapped to the model's width: from the rows of the table's
        unique ids, which `of` indexes (for sparse kinds), or [R, `inputs`], from the numbers. Where a bag's values have
        no offsets, they are [R, any], with -1 behind each row's ids and 0 behind its parallel numbers."""

    def inputs(self, feature: FeatureNumbers) -> int:
        """Returns how many numbers of a row `embed` returns, for kinds that are not sparse."""
        return feature.width

    def allows(self, name: str, numbers: Any) -> Any:
        """Returns whether parallel numbers of this name are what the kind `needs`: for a number, or each of an array or
        tensor."""
        return (numbers > -inf) & (numbers < inf)

    def shares(self, of: Values) -> Tensor | None:
        """Returns what each row counts in its bag's sum, where the owners of rows pool the bags; None: as much as the
        others, so that the sum is the mean."""
        return None


def number_of(value: Any) -> float:
    """Returns a number of a request. ValueError if it is none, or not finite in FP32."""
    from logitmix.common.values import plain

    number = plain(value)
    if isinstance(number, bool) or not isinstance(number, int | float) or not abs(number) <= LARGEST:
        raise ValueError(f"is {value!r:.40}; it must be a finite number in FP32")
    return float(number)
