"""The list of TorchRec's private names is that of the code, and the installed versions have them."""

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest
from torch.distributed import ProcessGroup

from logitmix.comm.torchrec_private import NAMES

ROOT = Path(__file__).resolve().parents[2]
OURS = {"self", "cls", "sys", "torch"}
NAMED_TUPLES = {"_replace", "_asdict"}


def private_names(tree: ast.AST) -> set[str]:
    """The attributes of others that begin with one underscore."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and re.match("_[A-Za-z]", node.attr)
        and not (isinstance(node.value, ast.Name) and node.value.id in OURS)
    } - NAMED_TUPLES


def own_names(tree: ast.AST) -> set[str]:
    """Private names that our classes define."""
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    mine = {node.attr for node in assigned if isinstance(node.value, ast.Name) and node.value.id in OURS}
    return mine | {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_private_name_in_use_is_listed() -> None:
    used: set[str] = set()
    for path in [*ROOT.glob("comm/*.py"), *ROOT.glob("trainer/parallel/*.py"), ROOT / "modules/embeddings.py"]:
        tree = ast.parse(path.read_text())
        used |= private_names(tree) - own_names(tree)
    assert used == {name for names in NAMES.values() for name in names}


@pytest.mark.parametrize("module", NAMES)
def test_the_installed_version_has_it(module: str) -> None:
    # The groups of torch's C++ have no source.
    source = inspect.getsource(import_module(module)) + " ".join(dir(ProcessGroup))
    assert [name for name in NAMES[module] if not re.search(rf"\b{name}\b", source)] == []
