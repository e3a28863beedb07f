"""Configuration -> similarity. Apart from base.py, which the similarities import."""

from collections.abc import Callable
from typing import Any

from logitmix.common.mappings import classes_by_kind

from ..config import SimilarityConfig
from .base import Similarity
from .deepfm import DeepFM
from .dot import Dot
from .mlp import MLP
from .mol import MoL
from .neumf import NeuMF

MODULES: dict[str, Callable[[int, Any], Similarity]] = {
    "dot": Dot,
    "mlp": MLP,
    "neumf": NeuMF,
    "deepfm": DeepFM,
    "mol": MoL,
}
"""By kind: the class, built from a width and a configuration of that kind."""
assert MODULES.keys() == classes_by_kind(SimilarityConfig).keys()


def build_similarity(dim: int, config: SimilarityConfig) -> Similarity:
    """phi(x, u) for queries and items of width `dim`."""
    return MODULES[config.kind](dim, config)
