"""The compiled parts of the project (setup.py), which are plain C libraries."""

import ctypes
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
