"""The list of private names of TorchRec, and of torch beneath it, is that of the code, and what is installed has them.

It says what to read again before either is updated. Read in torchrec 1.6.1 (torch 2.11) and 1.8.0 (torch 2.13).
"""

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest
from torch.distributed import ProcessGroup

NAMES = {
    # Of which shardings a sharded collection consists, and how their rows are divided among ranks and hosts.
    "torchrec.distributed.embedding": (
        "_embedding_configs",
        "_lookups",
        "_output_dists",
        "_sharding_type_to_sharding",
        "_awaitables_per_sharding",
    ),
    "torchrec.distributed.embeddingbag": (
        "_embedding_bag_configs",
        "_embedding_shardings",
        "_optimizer_classes",
        "_optimizer_kwargs",
    ),
    "torchrec.distributed.sharding.tw_sharding": (
        "_pg",
        "_rank",
        "_dist",
        "_variable_dist",
        "_grouped_embedding_configs_per_rank",
    ),
    "torchrec.distributed.sharding.twrw_sharding": (
        "_intra_pg",
        "_cross_pg",
        "_intra_dist",
        "_cross_dist",
        "_variable_intra_dist",
        "_variable_cross_dist",
        "_grouped_embedding_configs_per_node",
    ),
    # The groups of the ranks of a host.
    "torchrec.distributed.comm": ("_INTRA_PG", "_CROSS_PG"),
    "torchrec.distributed.sharding_plan": ("_get_parameter_sharding",),
    # The collectives that exchanges replace.
    "torchrec.distributed.dist_data": ("_callbacks",),
    # What updates rows in the backward of a lookup.
    "torchrec.distributed.batched_embedding_kernel": ("_feature_table_map",),
    "torch.distributed._shard.sharded_tensor.api": (
        "_init_from_local_shards_and_global_metadata",
        "_process_group",
    ),
    # Where a module has its weights.
    "torch.nn.modules.module": ("_parameters",),
    # The time limits of collectives, and how many a rank has begun.
    "torch.distributed.distributed_c10d": (
        "_get_backend",
        "_set_default_timeout",
        "_get_sequence_number_for_group",
    ),
}
"""The names by a module whose code has them."""

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
