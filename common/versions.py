"""The installed versions of what only works as a matching set."""

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

LIBRARIES = ("logitmix", "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu")


def versions() -> dict[str, str]:
    """Those of logitmix and of the LIBRARIES that are installed, by name. Imports none."""
    found = {}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
