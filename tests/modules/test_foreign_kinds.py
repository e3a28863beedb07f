"""Similarities, encoders and losses that a plugin got wrong: one line each."""

from typing import Any

import pytest
from torch import nn

from logitmix.modules.encoders.stack import build_encoder
from logitmix.modules.similarity.base import Similarity, build_similarity


class Plain(nn.Module):
    def __init__(self, dim: int, config: Any) -> None:
        super().__init__()


class Half(Similarity):
    def all_pairs(self, *arguments: Any, **named: Any) -> Any: ...
    def item(self, *arguments: Any, **named: Any) -> Any: ...


@pytest.mark.parametrize(
    ("build", "module", "message"),
    [
        (build_similarity, Half, "Half of kind own lacks pairs, query"),
        (build_similarity, Plain, "Plain of kind own is no subclass of Similarity"),
        (build_encoder, Plain, "Plain of kind own is no nn.Module with reset_parameters"),
        (build_encoder, "of_nobody:Nothing", "of_nobody:Nothing: ModuleNotFoundError: No module named"),
    ],
)
def test_what_is_no_such_module_is_refused(build: Any, module: Any, message: str) -> None:
    settings = type("Settings", (), {"module": module, "kind": "own"})()
    with pytest.raises(ValueError, match=f"^{message}"):
        build(8, settings)
