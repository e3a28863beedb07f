"""Programs of an export that run without logitmix's code, loaded where they are trusted."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from logitmix.common.storage import fetched, naming_urls
from logitmix.serving.format import PROGRAMS, checked_extra

Program = Callable[..., dict[str, Tensor]]
"""Takes tensors as keywords; docs/export.md names them."""


@naming_urls()
def load_program(path: str | Path, name: str, trust: bool = False) -> Program:
    """A program of a serving directory: query_tower, item_tower or cascade, or with `.aoti` behind its name what
    AOTInductor compiled of it. Its file is first checked against the digest in the manifest.

    A digest says that the file is whole, not who wrote it: loading it runs code. Raises ValueError unless `trust` is
    true, and if the program is not there or damaged.
    """
    if not trust:
        raise ValueError(
            f"{name} is native code or unpickled, so to load it is to run what its author wrote: give trust=True if "
            "you trust whoever made this export"
        )
    file = checked_extra(fetched(path), f"{PROGRAMS}/{name}.pt2")
    if name.endswith(".aoti"):
        program = torch._inductor.aoti_load_package(str(file))
        # What was compiled takes every tensor for a contiguous one.
        return lambda **given: program(**{key: of.contiguous() for key, of in given.items()})
    return torch.export.load(file).module()
