"""Kernels compiled for GPUs that are not here."""

from collections.abc import Mapping
from tempfile import TemporaryDirectory
from typing import Any

import pytest

OF_A_BLOCK = {80: 163 * 1024, 90: 227 * 1024}
"""Shared memory that one block can have, bytes, by compute capability."""
EACH = pytest.mark.parametrize("compute_capability", [90, pytest.param(80, marks=pytest.mark.slow)])


def compiled(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, object], compute_capability: int, **options: int
) -> Any:
    """Triton's compiled kernel. types: those of arguments that are neither constants nor FP32 pointers. Pointers are
    aligned to 16 bytes."""
    import triton
    from triton.backends.compiler import GPUTarget

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "*fp32") for name in names}
    source = triton.compiler.ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if signature[name][0] == "*"},
    )
    # Anew, whatever was compiled before.
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", folder)
        return triton.compile(source, target=GPUTarget("cuda", compute_capability, 32), options=options)
