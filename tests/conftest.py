import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with ml-1m.zip, ml-100k.zip and amazon-beauty/beauty.txt.gz, which may not be distributed."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("LOGITMIX_REAL_DATA", beside))
    if not (folder / "ml-1m.zip").is_file():
        pytest.skip(f"no ml-1m.zip in {folder}; LOGITMIX_REAL_DATA names the folder of the real data sets")
    return folder
