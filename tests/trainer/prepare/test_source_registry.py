import inspect
from pathlib import Path

import pytest

from logitmix.common.plugins import named
from logitmix.trainer.prepare import sources
from logitmix.trainer.prepare.registry import SOURCES, source_of


def test_each_file_is_named_and_reads() -> None:
    folder = Path(next(iter(sources.__path__)))
    modules = {f"{sources.__name__}.{path.stem}:read" for path in folder.glob("*.py") if path.stem != "__init__"}
    assert {source.read for source in SOURCES.values()} == modules
    for source in SOURCES.values():
        read = named(source.read)
        required = [name for name, of in inspect.signature(read).parameters.items() if of.default is of.empty]
        assert required == ["job"] and inspect.signature(read).return_annotation is None


@pytest.mark.parametrize(
    ("name", "module"),
    [("amazon-kindle-store", "amazon"), ("amazon-", None), ("amazon-Books", None), ("ml-2m", None), ("", None)],
)
def test_names_beyond_those_listed(name: str, module: str | None) -> None:
    source = source_of(name)
    assert (source and source.read) == (module and f"{sources.__name__}.{module}:read")
