"""Memory settings of the C libraries beneath torch, set before their first use."""

import ctypes
import os
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""glibc's names of mallopt's settings; 2^25 is the largest threshold that it accepts."""


def set_up_memory() -> None:
    """Keeps memory that every step, or block of users, allocates again, and drops caches that are never used again."""
    if platform.libc_ver()[0] == "glibc":
        # A step's large tensors reuse the memory of the previous step's. By default glibc returns that memory each
        # time, and the kernel zeroes it again page by page.
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 2**25)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    # oneDNN keeps compiled products for the last 1024 shapes, but shapes differ from batch to batch.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")


def give_back() -> None:
    """Returns what was freed to the system, which `set_up_memory` has glibc keep: after a large dataset was read, more
    than the steps will need."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
