"""That the compiled parts are there to be tested: tests of a part that is missing are skipped, or test plain torch."""

import re
import shutil
from pathlib import Path

import pytest

from logitmix.common.compiled import compiled_library

PARTS = re.findall(r'"(logitmix\.[\w.]+)"', (Path(__file__).parents[2] / "setup.py").read_text())


def test_setup_names_them() -> None:
    assert len(PARTS) >= 6 and "logitmix.modules.encoders._hstu" in PARTS


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler here")
@pytest.mark.parametrize("module", PARTS)
def test_where_there_is_a_compiler_each_was_built(module: str) -> None:
    assert compiled_library(module), f"{module} was not built: install again, and read what the compiler said"
