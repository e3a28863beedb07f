"""Configuration -> similarity. Apart from base.py, which the similarities import."""

from logitmix.common.plugins import module_of

from ..config import SimilarityConfig
from .base import Similarity


def build_similarity(dim: int, config: SimilarityConfig) -> Similarity:
    """phi(x, u) for queries and items of width `dim`. ValueError for a plugin's that is none."""
    similarity = module_of(config)(dim, config)
    if not isinstance(similarity, Similarity):
        raise ValueError(f"{type(similarity).__name__} of kind {config.kind} is no subclass of Similarity")
    return similarity
