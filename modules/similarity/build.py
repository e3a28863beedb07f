"""Config -> similarity. Apart from model.py, so that serving can import it without torchrec."""

from ..config import SimilarityConfig
from .dot import Dot
from .mol import MoL


def build_similarity(dim: int, config: SimilarityConfig) -> Dot | MoL:
    """phi(x, u) for queries and items of width `dim`."""
    if config.kind == "dot":
        return Dot(config.normalize, config.temperature)
    return MoL(dim, config)
