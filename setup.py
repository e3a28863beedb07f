"""The compiled parts: plain C libraries, loaded with ctypes. All else is in pyproject.toml.

Each is optional: without a C compiler the installation succeeds, and plain torch does the same work more slowly.
"""

import platform
import sys

from setuptools import Extension, setup

# Every FP32 operation rounded by itself, so that the result is that of plain torch; nothing else is given up. No
# -march: the sources choose among instruction sets when they are loaded, so that a wheel runs on any processor.
FLAGS = ["-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
if sys.platform == "linux" and platform.machine() == "x86_64":
    FLAGS.append("-mprefer-vector-width=512")
SOURCES = {"logitmix.comm._fp8": "comm/fp8.c", "logitmix.modules.kernels._mol": "modules/kernels/mol.c"}

setup(
    ext_modules=[
        Extension(module, [source], depends=["setup.py"], extra_compile_args=FLAGS, optional=True)
        for module, source in SOURCES.items()
    ]
)
