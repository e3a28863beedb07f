"""Raw feature values, as requests and lists of new items give them -> inputs of the towers.

Axes: R rows (requests, events or items), S ids of all bags.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from logitmix.common.mappings import nearest
from logitmix.common.values import as_list, id_text, plain
from logitmix.modules.features import Values
from logitmix.modules.schema import Feature, Owner, Schema
from logitmix.serving.texts import Texts

_REMEMBERED = 2**16
"""Most values whose rows are cached."""

LARGEST = torch.finfo(torch.float32).max


class FeatureReader:
    """Encodes feature values of a model's schema with its vocabularies.

    A value that is missing or not in the vocabulary is unknown; a missing list is empty, a missing element of a list is
    left out, as in a dataset, and a missing number or vector is the mean that the model was trained with.
    """

    def __init__(self, schema: Schema, vocabularies: Mapping[str, Texts]) -> None:
        """`vocabularies`: for each table except the items', the values by row, with their order."""
        self.schema = schema
        # Values repeat, and finding one takes a bisection.
        self._find = lru_cache(_REMEMBERED)(lambda table, value: vocabularies[table].find(value))

    def read(self, owner: Owner, records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Values]:
        """The features, by name, of R items, users or events, each given as a mapping of feature names to raw values.
        Indices are rows of the whole tables.

        Raises ValueError that names the record (by `names`), the feature and what is wrong.
        """
        features = {feature.name: feature for feature in self.schema.of(owner)}
        for place, record in enumerate(records):
            for name in record:
                if name not in features:
                    there = ", ".join(features) or "none"
                    raise ValueError(
                        f"{names[place]}: the model has no {owner} feature {name!r}{nearest(name, list(features))}; "
                        f"there are: {there}"
                    )
        return {name: self._column(feature, records, names) for name, feature in features.items()}

    def _column(self, feature: Feature, records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Values:
        cells = []
        for place, record in enumerate(records):
            try:
                cells.append(self._cell(feature, record.get(feature.name)))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{names[place]}: feature {feature.name} {error}") from None
        if feature.kind == "ids":
            lengths = torch.tensor([0, *(len(cell) for cell in cells)])
            return Values(torch.tensor([row for cell in cells for row in cell], dtype=torch.int64), lengths.cumsum(0))
        kind = torch.int64 if feature.kind == "id" else torch.float32
        shape = (len(cells), feature.width) if feature.kind == "vector" else (len(cells),)
        return Values(torch.tensor(cells, dtype=kind).view(shape))

    def _cell(self, feature: Feature, value: Any) -> Any:
        match feature.kind:
            case "id":
                return self._row(feature, value)
            case "ids":
                there = [] if value is None else [entry for entry in as_list(value) if entry not in (None, "")]
                return [self._row(feature, entry) for entry in there]
            case "number":
                return feature.mean if value is None else _number(value)
            case _:
                if value is None:
                    return [feature.mean] * feature.width
                numbers = [_number(entry) for entry in as_list(value)]
                if len(numbers) != feature.width:
                    raise ValueError(f"has {len(numbers)} numbers; it must have {feature.width}")
                return numbers

    def _row(self, feature: Feature, value: Any) -> int:
        unknown = self.schema.table(feature.table).unknown
        if value is None:
            return unknown
        row: int | None = self._find(feature.table, id_text(value))
        return unknown if row is None else row


def _number(value: Any) -> float:
    number = plain(value)
    if isinstance(number, bool) or not isinstance(number, int | float) or not abs(number) <= LARGEST:
        raise ValueError(f"is {value!r:.40}; it must be a finite number in FP32")
    return float(number)
