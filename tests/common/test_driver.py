"""What stands in for the NVIDIA driver's library."""

import subprocess
import sys
from pathlib import Path

import pytest

from logitmix.common import driver
from logitmix.common.compiled import compiled_library

ROOT = Path(__file__).parents[2]
LOADING = f"""
import ctypes
from logitmix.common import driver

def loads():
    try:
        return ctypes.CDLL({driver.DRIVER!r})
    except OSError:
        return None

assert loads() is None
assert driver.has_driver() is False
print([getattr(loads(), name)() for name in {{names}}])
"""
OF_FBGEMM = (
    "nvmlInit_v2",
    "nvmlDeviceGetCount_v2",
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetNvLinkRemotePciInfo_v2",
    "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetPciInfo_v3",
)
"""What the wheel of fbgemm-gpu 1.8.0 links: `nm -D fbgemm_gpu/fbgemm_gpu_py.so | grep nvml`."""


@pytest.mark.skipif(driver.has_driver(), reason="there is a driver")
@pytest.mark.skipif(compiled_library(driver.STAND_IN) is None, reason="no compiler built it")
def test_the_loader_takes_it_for_the_drivers() -> None:
    """12: NVML_ERROR_LIBRARY_NOT_FOUND."""
    words = [sys.executable, "-c", LOADING.format(names=OF_FBGEMM)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{[12] * len(OF_FBGEMM)}\n", "")


def refused(cause: str) -> OSError:
    """As torch raises it for a library that FBGEMM loads."""
    error = OSError("Could not load this library: /there/fbgemm_gpu_py.so")
    error.__cause__ = OSError(f"{cause}: cannot open shared object file: No such file or directory")
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (refused("libnvidia-ml.so.1"), "no NVIDIA driver here (libnvidia-ml.so.1), which fbgemm-gpu needs"),
        (refused("libtorch_cuda.so"), "fbgemm-gpu is a CUDA build, and torch is none (no libtorch_cuda.so); install"),
        (OSError("libgomp.so.1: cannot open shared object file: No such file or directory"), "no libgomp.so.1 here"),
        (OSError(28, "No space left on device"), ""),
    ],
)
def test_a_missing_library_is_named(error: OSError, said: str) -> None:
    found = driver.why_it_does_not_load(error)
    assert found.startswith(said) and "\n" not in found and bool(found) == bool(said)
