"""What is installed has each private name of TorchRec, and of torch beneath it, that is in use.

The failing names say what to read again before either is updated. Read in torchrec 1.6.1 (torch 2.11) and 1.8.0
(torch 2.13).
"""

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path

from torch.distributed import ProcessGroup

MODULES = (
    *(f"torchrec.distributed.{name}" for name in ("embedding", "embeddingbag", "comm", "sharding_plan", "dist_data")),
    *(f"torchrec.distributed.sharding.{name}_sharding" for name in ("tw", "twrw")),
    "torchrec.distributed.batched_embedding_kernel",
    "torch.distributed._shard.sharded_tensor.api",
    "torch.distributed.distributed_c10d",
    "torch.nn.modules.module",
)
"""Where they are."""
ROOT = Path(__file__).resolve().parents[2]
OURS = {"self", "cls", "sys", "torch"}
NAMED_TUPLES = {"_replace", "_asdict"}


def private_names(tree: ast.AST) -> set[str]:
    """The attributes of others that begin with one underscore, without those that our classes define."""
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    own = {of.attr for of in attributes if isinstance(of.value, ast.Name) and of.value.id in OURS}
    own |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return {of.attr for of in attributes if re.match("_[A-Za-z]", of.attr)} - own - NAMED_TUPLES


def test_the_installed_version_has_every_private_name_in_use() -> None:
    files = [*ROOT.glob("comm/*.py"), *ROOT.glob("trainer/parallel/*.py"), ROOT / "modules/embeddings.py"]
    used = set().union(*(private_names(ast.parse(path.read_text())) for path in files))
    # The groups of torch's C++ have no source.
    source = " ".join([*(inspect.getsource(import_module(module)) for module in MODULES), *dir(ProcessGroup)])
    assert "_grouped_embedding_configs_per_rank" in used
    assert sorted(name for name in used if not re.search(rf"\b{name}\b", source)) == []
