"""Stores for tests: fsspec's memory, whose operations can fail, and copies of it on several hosts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

OPERATIONS = ("find", "cat_file", "get_file", "pipe_file", "put_file", "rm_file")


class Memory:
    """All that is at memory:// in this process."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.patch, self.folder = patch, folder
        MemoryFileSystem.store.clear()
        MemoryFileSystem.pseudo_dirs[:] = [""]
        self.host("here")

    def host(self, name: str) -> Path:
        """What follows happens on this host: it has a cache of its own. Returns the cache's folder."""
        cache = self.folder / f"cache-{name}"
        self.patch.setenv("XDG_CACHE_HOME", str(cache))
        return cache

    def files(self, root: str = "") -> dict[str, bytes]:
        """Content by name, of a folder of the store."""
        start = f"/{root}/" if root else "/"
        found = {name: of.getvalue() for name, of in MemoryFileSystem.store.items() if name.startswith(start)}
        return {name.removeprefix(start): of for name, of in sorted(found.items())}

    def write(self, name: str, content: bytes) -> None:
        MemoryFileSystem().pipe_file(f"/{name}", content)

    def remove(self, name: str) -> None:
        MemoryFileSystem().rm_file(f"/{name}")

    @contextmanager
    def watched(
        self, fails: Callable[[int, str, str], bool] = lambda *_: False, late: bool = False
    ) -> Iterator[list[str]]:
        """Yields the operations, in order, as "put_file NAME". Where `fails` holds of an operation's number, its name
        and its file, it raises: before it does anything, or `late`, after it."""
        done: list[str] = []

        def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
            def operation(store: MemoryFileSystem, *arguments: Any, **options: Any) -> Any:
                file = str(arguments[1] if name == "put_file" else arguments[0])
                done.append(f"{name} {file}")
                broken = fails(len(done) - 1, name, file)
                if broken and not late:
                    raise ConnectionResetError("the store\nis gone")
                result = original(store, *arguments, **options)
                if broken:
                    raise ConnectionResetError("the store\nis gone")
                return result

            return operation

        with pytest.MonkeyPatch.context() as patch:
            for name in OPERATIONS:
                patch.setattr(MemoryFileSystem, name, counted(name, getattr(MemoryFileSystem, name)))
            yield done
