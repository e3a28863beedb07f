import inspect
from importlib import import_module
from pathlib import Path

import pytest

from logitmix.trainer.data import sources
from logitmix.trainer.data.raw import RawDataset
from logitmix.trainer.data.registry import NAMES, SOURCES, source_of


def test_each_file_has_a_line_and_reads() -> None:
    folder = Path(next(iter(sources.__path__)))
    assert {source.module for source in SOURCES} == {path.stem for path in folder.glob("*.py")} - {
        "__init__",
        "registry",
    }
    for source in SOURCES:
        read = import_module(f"{sources.__name__}.{source.module}").read
        assert list(inspect.signature(read).parameters) == ["options", "rejects", "progress"]
        assert inspect.signature(read).return_annotation is RawDataset


def test_a_name_has_one_source() -> None:
    assert len(set(NAMES)) == len(NAMES)
    for source in SOURCES:
        assert all(source_of(name) is source for name in source.names)


@pytest.mark.parametrize(
    ("name", "module"),
    [("amazon-kindle-store", "amazon"), ("amazon-", None), ("amazon-Books", None), ("ml-2m", None), ("", None)],
)
def test_names_beyond_those_listed(name: str, module: str | None) -> None:
    source = source_of(name)
    assert (source and source.module) == module
