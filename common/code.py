"""The code that a process computes with: versions, plugins, compiled parts and sources, to compare it with that of
other hosts and of earlier times."""

import functools
import hashlib
from pathlib import Path

from logitmix.common.compiled import PARTS, compiled_library, triton_is_installed
from logitmix.common.plugins import plugins
from logitmix.common.versions import versions

PACKAGES = ("comm", "common", "launch", "modules", "serving", "trainer")
"""Folders of logitmix. What is beside them in a repository is no part of it."""
SOURCES = (".py", ".c", ".h", ".toml")


def code() -> dict[str, str]:
    """Returns what must be equal for two processes to compute the same, by a name that messages can show. Of sources it
    has the first digits of their SHA-256; of compiled parts only whether they are there, because each host may compile
    its own."""
    found = {f"the version of {library}": number for library, number in versions().items()}
    found |= {f"the plugin {plugin.name}": plugin.version for plugin in plugins()}
    found |= {f"the compiled part for {what}": _there(compiled_library(module)) for module, what in PARTS.items()}
    found["triton"] = _there(triton_is_installed())
    for plugin in plugins():
        # A plugin that is one file and no package has the digest as its version.
        if plugin.place and plugin.version not in (digests := source_digests(plugin.place)).values():
            found |= {f"{name} of the plugin {plugin.name}": digest for name, digest in digests.items()}
    root = Path(__file__).parents[1]
    for package in PACKAGES:
        found |= {f"{package}/{name} of logitmix": digest for name, digest in source_digests(root / package).items()}
    return found


def _there(part: object) -> str:
    return "there" if part else "not there"


@functools.cache
def source_digests(place: Path) -> dict[str, str]:
    """Returns the first 12 digits of the SHA-256 of each source in a folder and those within, by its path there; or of
    one file, by its name. They are read once for each process."""
    files = [place]
    if place.is_dir():
        # Names that begin with a dot are those of editors.
        found = (path for path in place.rglob("*") if path.suffix in SOURCES and not path.name.startswith("."))
        files = sorted(filter(Path.is_file, found))
    names = [str(file.relative_to(place)) if file != place else file.name for file in files]
    return {name: hashlib.sha256(file.read_bytes()).hexdigest()[:12] for name, file in zip(names, files, strict=True)}
