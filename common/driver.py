"""FBGEMM's CUDA build where there is no NVIDIA driver: where images are built, and jobs planned and submitted.

It is linked with the driver's libnvidia-ml.so.1, which it asks how GPUs are connected, and does not load without. A
library of that name (nvml.c) stands in.
"""

import ctypes
import functools
import re

from .compiled import compiled_library

DRIVER = "libnvidia-ml.so.1"
STAND_IN = "logitmix.common._nvml"


@functools.cache
def has_driver() -> bool:
    """Whether there is an NVIDIA driver. If not, FBGEMM's CUDA build loads from here on, so call it before."""
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        # The loader takes a loaded library for every other of its name.
        compiled_library(STAND_IN)
        return False
    return True


def why_it_does_not_load(error: BaseException) -> str:
    """What to do about a library that does not load because it needs one that is not there; "" for other errors."""
    found = re.match(r"(\S+): cannot open shared object file", str(error.__cause__ or error))
    if found is None:
        return ""
    if found[1] == DRIVER:
        return (
            f"no NVIDIA driver here ({DRIVER}), which fbgemm-gpu needs, and what stands in for it is not built; "
            "install a C compiler, then logitmix again"
        )
    if found[1].startswith("libtorch"):
        return (
            f"fbgemm-gpu is a CUDA build, and torch is none (no {found[1]}); install torch from the public index, or "
            "fbgemm-gpu-cpu in place of fbgemm-gpu"
        )
    return f"no {found[1]} here, which a library needs"
