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

setup(
    ext_modules=[
        # Every FP32 operation rounds separately, so the bytes are those of plain torch.
        Extension(
            "logitmix.comm._fp8",
            ["comm/fp8.c"],
            depends=["setup.py", "common/cpu.h"],
            extra_compile_args=[*FLAGS, "-ffp-contract=off"],
            optional=True,
        ),
        # By its soname, the loader takes it for the driver's.
        Extension(
            "logitmix.common._nvml",
            ["common/nvml.c"],
            depends=["setup.py"],
            extra_link_args=["-Wl,-soname,libnvidia-ml.so.1"],
            optional=True,
        ),
        Extension(
            "logitmix.modules._noise",
            ["modules/noise.c"],
            depends=["setup.py", "common/cpu.h", "modules/noise.h"],
            extra_compile_args=FLAGS,
            optional=True,
        ),
        Extension(
            "logitmix.modules._stage1",
            ["modules/stage1.c"],
            depends=["setup.py"],
            extra_compile_args=FLAGS,
            optional=True,
        ),
        Extension(
            "logitmix.modules.encoders._hstu",
            ["modules/encoders/hstu.c"],
            depends=["setup.py", "modules/tiles.h"],
            extra_compile_args=FLAGS,
            libraries=["m"],
            optional=True,
        ),
        Extension(
            "logitmix.modules.losses._mol",
            ["modules/losses/mol.c"],
            depends=["setup.py", "modules/tiles.h", "modules/noise.h"],
            extra_compile_args=FLAGS,
            libraries=["m"],
            optional=True,
        ),
        Extension(
            "logitmix.modules.similarity._mol_scores",
            ["modules/similarity/mol_scores.c"],
            depends=["setup.py", "modules/tiles.h", "modules/similarity/mol_scores_int8.h"],
            extra_compile_args=FLAGS,
            libraries=["m"],
            optional=True,
        ),
    ]
)
