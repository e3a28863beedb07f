"""Similarities, encoders and losses that a plugin got wrong: one line each."""

from dataclasses import dataclass
from typing import Any

import pytest
from torch import nn

from logitmix.common.plugins import module_of
from logitmix.modules.encoders.build import build_encoder
from logitmix.modules.similarity.base import Similarity
from logitmix.modules.similarity.build import build_similarity


class Plain(nn.Module):
    def __init__(self, dim: int, config: Any) -> None:
        super().__init__()


class Half(Similarity):
    def all_pairs(self, *arguments: Any, **named: Any) -> Any: ...
    def item(self, *arguments: Any, **named: Any) -> Any: ...


@dataclass(frozen=True)
class OfHalf:
    module = Half
    kind: str = "own"


@dataclass(frozen=True)
class OfPlain:
    module = Plain
    kind: str = "own"


@dataclass(frozen=True)
class OfNothing:
    module = "of_nobody:Nothing"
    kind: str = "own"


@pytest.mark.parametrize(
    ("build", "config", "message"),
    [
        (build_similarity, OfHalf(), "Half of kind own lacks pairs, query"),
        (build_similarity, OfPlain(), "Plain of kind own is no subclass of Similarity"),
        (build_encoder, OfPlain(), "Plain of kind own is no nn.Module with reset_parameters"),
        (lambda dim, config: module_of(config), OfNothing(), "of_nobody:Nothing: ModuleNotFoundError: No module named"),
    ],
)
def test_what_is_no_such_module_is_refused(build: Any, config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        build(8, config)
