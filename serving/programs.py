"""Programs of an export that run without logitmix's code, loaded where they are trusted."""

import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from logitmix.common.messages import naming_urls
from logitmix.common.storage import fetch
from logitmix.serving.directory.format import PROGRAMS
from logitmix.serving.directory.reader import checked_extra, read_manifest

Program = Callable[..., dict[str, Tensor]]
"""Takes tensors as keywords; docs/export.md names them."""


@naming_urls()
def load_program(path: str | Path, name: str, trust: bool = False) -> Program:
    """A program of a serving directory: query_tower, item_tower or cascade, or with `.aoti` behind its name what
    AOTInductor compiled of it. Its file is first checked against the digest in the manifest.

    A digest says that the file is whole, not who wrote it: loading it runs code. Raises ValueError unless `trust` is
    true, if the program is not there or damaged, and if it was compiled for another kind of processor, where it would
    end the process (SIGILL).
    """
    if not trust:
        raise ValueError(
            f"{name} is native code or unpickled, so to load it is to run what its author wrote: give trust=True if "
            "you trust whoever made this export"
        )
    path, inside = fetch(path), f"{PROGRAMS}/{name}.pt2"
    file = checked_extra(path, inside)
    if name.endswith(".aoti"):
        _check_cpu(file, read_manifest(path)["files"][inside]["cpu"])
        program = torch._inductor.aoti_load_package(str(file))
        # What was compiled takes every tensor for a contiguous one.
        return lambda **given: program(**{key: of.contiguous() for key, of in given.items()})
    return torch.export.load(file).module()


def capabilities() -> Mapping[str, Any]:
    """What this processor has, by its own word: "architecture", and instruction sets."""
    found = getattr(torch.cpu, "get_capabilities", None)  # not in torch 2.11
    if found is not None:
        return found()
    sets = {"avx2": torch.cpu._is_avx2_supported(), "avx512_f": torch.cpu._is_avx512_supported()}
    return {"architecture": platform.machine()} | sets


def _check_cpu(file: Path, needed: list[str]) -> None:
    """ValueError if this processor lacks something of an entry "cpu" of the manifest."""
    here = capabilities()
    if needed[0] != here["architecture"]:
        raise ValueError(f"{file} was compiled for {needed[0]}, and this is {here['architecture']}: export it here")
    if missing := [name for name in needed[1:] if here.get(name) is False]:
        raise ValueError(
            f"{file} was compiled for a processor with {', '.join(missing)}, which this one has not: export it here"
        )
