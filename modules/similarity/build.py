"""Configuration -> similarity. Apart from base.py, which the similarities import."""

from pkgutil import resolve_name

from ..config import SimilarityConfig
from .base import Similarity


def build_similarity(dim: int, config: SimilarityConfig) -> Similarity:
    """phi(x, u) for queries and items of width `dim`."""
    similarity = resolve_name(config.module)(dim, config)
    assert isinstance(similarity, Similarity), f"{config.module} is no Similarity"
    return similarity
