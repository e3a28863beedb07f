"""The compiled parts of the project: plain C libraries (setup.py), and Triton's kernels."""

import ctypes
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from .messages import say

T = TypeVar("T")
PARTS = {
    "logitmix.comm._fp8": "the FP8 codec",
    "logitmix.modules._noise": "dropout",
    "logitmix.modules._stage1": "stage 1",
    "logitmix.modules.encoders._hstu": "HSTU's attention",
    "logitmix.modules.losses._mol": "MoL's loss",
    "logitmix.modules.similarity._mol_scores": "MoL's scores",
}
"""The libraries that setup.py builds, by module, and what each one computes, which plain torch does without it."""


def compiled_library(module: str, **functions: tuple[Any, ...]) -> ctypes.CDLL | None:
    """Returns the library of a module's name; None if it was not built (setup.py), does not load or is of other
    sources. `functions` have the types of their results and arguments: `scan=(None, c_void_p, c_int64)`."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return None
    try:
        library = ctypes.CDLL(spec.origin)
        for name, (result, *arguments) in functions.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError):
        return None
    return library


def lazy_library(module: str, **functions: tuple[Any, ...]) -> Callable[[], Any]:
    """`compiled_library` as a function that loads the library at its first call. If the library is missing, this call
    says so, once in a process. It takes no arguments, because hot paths call it."""

    @functools.cache
    def loaded() -> ctypes.CDLL | None:
        found = compiled_library(module, **functions)
        if found is None:
            _say_what_is_missing()
        return found

    return lambda: None if _PLAIN.get() else loaded()


_PLAIN = ContextVar("_PLAIN", default=False)


@contextmanager
def plain_torch() -> Iterator[None]:
    """Within, this thread finds no compiled library, whether it was built or not: for what may not depend on this
    machine."""
    token = _PLAIN.set(True)
    try:
        yield
    finally:
        _PLAIN.reset(token)


def missing_parts() -> list[str]:
    """What the compiled parts that were not built, or do not load, would compute."""
    return [what for module, what in PARTS.items() if compiled_library(module) is None]


@functools.cache
def _say_what_is_missing() -> None:
    """Says once that plain torch does the work of compiled parts. Of the ranks of a job only the first one says it."""
    if os.environ.get("RANK", "0") == "0":
        parts = ", ".join(missing_parts()) or "a part of these sources"
        say(
            f"not compiled here: {parts}: plain torch does it, several times slower; install a C "
            "compiler, then logitmix again (logitmix doctor says more)"
        )


def in_threads(work: Callable[[int], T], workers: int) -> list[T]:
    """work(0), …, work(workers - 1), all but the first in threads of their own. For calls of compiled libraries, which
    run beside each other."""
    others = [_pool().submit(work, worker) for worker in range(1, workers)]
    return [work(0), *(other.result() for other in others)]


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), "compiled")


def _without_the_parents_threads() -> None:
    """A forked process does not have its parent's threads. OpenMP, on which torch computes, does not notice: with more
    than one thread it would wait for the parent's for ever."""
    _pool.cache_clear()
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


os.register_at_fork(after_in_child=_without_the_parents_threads)


def triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def has_triton() -> bool:
    """Whether there is Triton, asked where a GPU would use it. If there is none, the first call says so."""
    found = triton_is_installed()
    if not found and os.environ.get("RANK", "0") == "0":
        say("no triton here: plain torch does what its kernels do on a GPU, several times slower; pip install triton")
    return found
