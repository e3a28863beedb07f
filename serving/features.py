"""Raw feature values, as requests and lists of new items give them -> inputs of the towers.

Axes: R rows (requests, events or items), S ids of all bags.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from torch import Tensor

from logitmix.common.mappings import nearest
from logitmix.common.values import id_text
from logitmix.modules.features import values_of_cells
from logitmix.modules.kinds.text import TextEncoder
from logitmix.modules.schema import Feature, Owner, Schema
from logitmix.modules.values import Values
from logitmix.serving.texts import ABSENT, Texts

_REMEMBERED = 2**16
"""Most values whose rows are cached."""


class FeatureReader:
    """Encodes feature values of a model's schema with its vocabularies.

    A value that is missing or not in the vocabulary is unknown; a missing list is empty, a missing element of a list is
    left out, as in a dataset, and a missing number or vector is the mean that the model was trained with.
    """

    def __init__(
        self, schema: Schema, vocabularies: Mapping[str, Texts], projections: Mapping[str, Tensor] | None = None
    ) -> None:
        """`vocabularies`: for each table except the items', the values by row, with their order. `projections`: those
        of features of texts."""
        self.schema, self._vocabularies = schema, vocabularies
        tables = {name: of.numpy() for name, of in (projections or {}).items()}
        self.encoders = {
            of.name: TextEncoder(of.encoder, of.version, of.width, tables.get(of.name))
            for of in schema.features
            if of.encoder
        }
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

    def rows(self, table: str, values: Sequence[str]) -> list[int]:
        """The rows of a table that values of its vocabulary have; "" is unknown."""
        unknown, places = self.schema.table(table).unknown, self._vocabularies[table].places(values)
        return [place if value and place != ABSENT else unknown for value, place in zip(values, places, strict=True)]

    def _column(self, feature: Feature, records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Values:
        cells, encoder = [], self.encoders.get(feature.name)
        row_of = (lambda text: encoder([text])[0].tolist()) if encoder else partial(self._row, feature)
        for place, record in enumerate(records):
            try:
                cells.append(feature.form.cell(feature, record.get(feature.name), row_of))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{names[place]}: feature {feature.name} {error}") from None
        return values_of_cells(feature, cells)

    def _row(self, feature: Feature, value: Any) -> int:
        unknown = self.schema.table(feature.table).unknown
        if value is None:
            return unknown
        row: int | None = self._find(feature.table, id_text(value))
        return unknown if row is None else row
