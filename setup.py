"""The compiled parts: plain C libraries, loaded with ctypes. All else is in pyproject.toml.

Each is optional: without a C compiler the installation succeeds, and plain torch does the same work more slowly. Only
FBGEMM's CUDA build then needs an NVIDIA driver to load.
"""

import platform
import sys

from setuptools import Extension, setup

# No -march: the libraries choose an instruction set when they are loaded, so that a wheel runs on any processor.
FLAGS = ["-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math"]
if sys.platform == "linux" and platform.machine() == "x86_64":
    FLAGS.append("-mprefer-vector-width=512")


def library(name: str, *headers: str, flags: list[str] = FLAGS, **options: list[str]) -> Extension:
    """The library of PACKAGE._NAME, from PACKAGE/NAME.c."""
    source = name.removeprefix("logitmix.").replace("._", "/").replace(".", "/") + ".c"
    return Extension(name, [source], depends=["setup.py", *headers], extra_compile_args=flags, optional=True, **options)


setup(
    ext_modules=[
        # Every FP32 operation rounds separately, so the bytes are those of plain torch.
        library("logitmix.comm._fp8", "common/cpu.h", flags=[*FLAGS, "-ffp-contract=off"]),
        # By its soname, the loader takes it for the driver's.
        library("logitmix.common._nvml", flags=[], extra_link_args=["-Wl,-soname,libnvidia-ml.so.1"]),
        library("logitmix.modules._noise", "common/cpu.h", "modules/noise.h"),
        library("logitmix.modules._stage1"),
        library("logitmix.modules.encoders._hstu", "modules/tiles.h", libraries=["m"]),
        library("logitmix.modules.losses._mol", "modules/tiles.h", "modules/noise.h", libraries=["m"]),
        library(
            "logitmix.modules.similarity._mol_scores",
            "modules/tiles.h",
            "modules/similarity/mol_scores_int8.h",
            libraries=["m"],
        ),
    ]
)
