"""What the C libraries beneath torch are told about memory, before they first need it."""

import ctypes
import os
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""glibc's names for what mallopt sets; 2^25 is the largest threshold that it takes."""


def set_up_memory() -> None:
    """Keeps what each step needs anew, and forgets what none needs again."""
    if platform.libc_ver()[0] == "glibc":
        # A step's large tensors take the places of the last one's. glibc would give their memory back each time, and
        # have it zeroed page by page anew.
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 2**25)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    # oneDNN keeps compiled products for the last 1024 shapes, and every batch has shapes of its own.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")
