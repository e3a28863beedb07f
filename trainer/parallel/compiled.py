"""The towers under torch.compile (train.compile): everything between the tables' rows and the losses."""

import warnings
from typing import Any

import torch
import torch._dynamo
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler

from logitmix.common.compiled import has_triton
from logitmix.modules.encoders import fuxi, hstu, sasrec
from logitmix.modules.model import SampledLosses
from logitmix.modules.noise import Noise
from logitmix.modules.similarity import components, dot, mol

BACKEND = "inductor"
_LEFT_ALONE: dict[Any, tuple[str, ...]] = {
    Noise: ("dropout", "relu_dropout", "without_rows"),
    sasrec: ("attend_padded", "attend_last", "attend_jagged"),
    hstu: ("attend", "_fused"),
    fuxi: ("attend", "attend_places"),
    dot: ("l2_normalize",),
    mol: ("l2_normalize",),
    components: ("_gated",),
}
"""Functions that torch.compile runs as they are: they are kernels already, or depend on the batch's lengths."""


def compile_towers(losses: SampledLosses, device: torch.device) -> None:
    """Has the towers compiled, once for all sizes of batches. Raises ValueError if there is no compiler."""
    missing = "" if device.type == "cpu" or has_triton() else "Triton"
    if device.type == "cpu":
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            missing = "a C++ compiler such as g++"
    if missing:
        raise ValueError(f"train.compile needs {missing}; install it, or set train.compile to false")
    # The process's own, because a compiled function finds them by name.
    for owner, name in ((owner, name) for owner, names in _LEFT_ALONE.items() for name in names):
        function = getattr(owner, name)
        if not getattr(function, "_torchdynamo_disable", False):
            setattr(owner, name, torch.compiler.disable(function))
    # The tracer reads it of all inputs.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
    losses.towers = torch.compile(losses.towers, dynamic=True, backend=BACKEND)  # type: ignore[method-assign]
