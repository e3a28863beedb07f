"""The compiled parts of the project: plain C libraries (setup.py), and Triton's kernels."""

import ctypes
import functools
import importlib.util


def compiled_library(module: str) -> ctypes.CDLL | None:
    """The library of a module's name; None if it was not built or does not load."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return None
    try:
        return ctypes.CDLL(spec.origin)
    except OSError:
        return None


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
