"""Checkpoints: sharded, complete or absent, checked when read.

A checkpoint is a directory `checkpoints/step-N` that PyTorch's distributed checkpointing (DCP) wrote, plus
`checkpoint.json` with the digests of its files. It is written under another name and renamed when complete, and no
directory is written twice.

No rank has more of a table in memory than its own rows: tables are saved and loaded in blocks, and read by ranges of
rows.
"""

import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed._shard.sharded_tensor import TensorProperties
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torchrec.distributed.types import Shard, ShardedTensor, ShardMetadata

from logitmix.comm.collectives import barrier, broadcast_object
from logitmix.comm.process_group import Ranks
from logitmix.common.files import file_digest, json_digest, publish, staging_path
from logitmix.modules.schema import Schema, Table
from logitmix.modules.towers import Tower
from logitmix.trainer.config import Config
from logitmix.trainer.parallelize import ParallelModel, model_schema
from logitmix.trainer.run import RunProgress, checkpoint_paths, read_config, read_schema
from logitmix.trainer.sharded_rows import ShardedRows, own_range

MANIFEST = "checkpoint.json"
FORMAT_VERSION = 2
BLOCK_BYTES = 2**25
"""Rows of a block: DCP copies whole blocks when it writes them, and reads whole blocks."""


@dataclass(frozen=True)
class SavedModel:
    """A checkpoint for evaluation and export: the tower, on the CPU in FP32, and the tables, which are read on
    demand."""

    config: Config
    step: int
    tower: Tower
    read_rows: Callable[[str, int, int], Tensor]
    """The rows [R, D] of a table from `start` to `stop`, excluded."""
    validation: Mapping[str, float] = field(default_factory=dict)
    """Its metrics, if it was evaluated."""

    @property
    def num_items(self) -> int:
        return self.tower.schema.num_items

    def sharded_rows(self, ranks: Ranks) -> dict[str, ShardedRows]:
        """The tables in memory; each rank reads an equal share of their rows."""
        return {table.name: self._shared(table, ranks) for table in self.tower.schema.tables}

    def _shared(self, table: Table, ranks: Ranks) -> ShardedRows:
        own_RD = self.read_rows(table.name, *own_range(table.rows, ranks.rank, ranks.world_size))
        return ShardedRows.of_ranges(table.rows, own_RD.to(ranks.device), ranks)


def save(run: Path, model: ParallelModel, optimizer: torch.optim.Optimizer, progress: RunProgress, keep: int) -> None:
    """Saves a new checkpoint, then removes all but the best and the `keep` newest. Collective."""
    folder = run / "checkpoints"
    ranks, config = model.ranks, model.config
    out = folder / f"step-{progress.step}"
    staging = broadcast_object(staging_path(out), ranks)
    try:
        dcp.save(_in_blocks(_state(model, optimizer)), checkpoint_id=staging, process_group=ranks.group)
    except CheckpointException as error:
        if ranks.rank == 0:
            shutil.rmtree(staging, ignore_errors=True)
        rank, (failure, _) = next(iter(error.failures.items()))
        raise OSError(f"no checkpoint could be written to {folder} (rank {rank}: {failure})") from None
    if ranks.rank == 0:
        _write_manifest(staging, progress)
        # Only a damaged checkpoint can be there: the run would have resumed from an intact one.
        publish(staging, out)
        _prune(run, keep, config.evaluate.metric)
    barrier(ranks)


def restore(run: Path, model: ParallelModel, optimizer: torch.optim.Optimizer) -> RunProgress:
    """Loads the newest intact checkpoint in place, whatever number of ranks wrote it. Collective.

    A run without one starts from step 0. Raises ValueError if there are checkpoints but none is intact.
    """
    ranks = model.ranks
    found = broadcast_object(_newest_intact(run) if ranks.rank == 0 else None, ranks)
    if isinstance(found, str):
        raise ValueError(found)
    if found is None:
        return RunProgress()
    path, progress = found
    state = _state(model, optimizer)
    dcp.load(_in_blocks(state), checkpoint_id=path, process_group=ranks.group)
    model.table_optimizers.restore(state.get("table_optimizers", {}), progress.step - progress.skipped)
    return progress


def restore_best(run: Path, model: ParallelModel) -> int:
    """Loads the weights of the best checkpoint in place, and returns its step. The optimizers keep their state, so
    training must not go on. Collective; raises ValueError as `load_saved` does."""
    path = _choose(run, model.config.evaluate.metric, "best", model.ranks)
    weights = {"tables": dict(model.shards()), "tower": model.tower.state_dict()}
    dcp.load(_in_blocks(weights), checkpoint_id=path, process_group=model.ranks.group)
    return _progress(path).step


def load_saved(run: Path, which: Literal["best", "last"] = "best", ranks: Ranks | None = None) -> SavedModel:
    """The best checkpoint of a run by its validation metric (or the last one); the tables are not read yet.

    With ranks, rank 0 chooses for all. Raises ValueError if `run` is not a run directory, has no checkpoint, or its
    checkpoint is damaged.
    """
    config = read_config(run)
    path = _choose(run, config.evaluate.metric, which, ranks)
    schema = model_schema(read_schema(run), config)
    tower = Tower(config.model, schema)
    _load_alone(path, {"tower": tower.state_dict()})
    progress = _progress(path)
    return SavedModel(config, progress.step, tower, partial(_read_rows, path, schema), progress.validation)


def _choose(run: Path, metric: str, which: Literal["best", "last"], ranks: Ranks | None) -> Path:
    """The requested checkpoint, checked by rank 0."""
    path: Path | str = ""
    if ranks is None or ranks.rank == 0:
        try:
            path = best_checkpoint(run, metric) if which == "best" else _last(run)
            path = _damage(path) or path
        except ValueError as error:
            path = str(error)
    path = path if ranks is None else broadcast_object(path, ranks)
    if isinstance(path, str):
        raise ValueError(path)
    return path


def _load_alone(path: Path, state: dict[str, Any], planner: DefaultLoadPlanner | None = None) -> None:
    """Loads into tensors of this process, whether or not there are other ranks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        dcp.load(state, checkpoint_id=path, planner=planner, no_dist=True)


def _read_rows(path: Path, schema: Schema, table: str, start: int, stop: int) -> Tensor:
    row_RD = torch.empty(stop - start, schema.table(table).dim)
    _load_alone(path, {"tables": {table: row_RD}}, _RowRange(start))
    return row_RD


class _RowRange(DefaultLoadPlanner):
    """Loads rows from row `start` on into the given tensor, as many as it has."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.start = start

    def create_local_plan(self) -> LoadPlan:
        ((name, row_RD),) = self.state_dict.items()
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata[name]
        assert isinstance(saved, TensorStorageMetadata)
        wanted = ChunkStorageMetadata(torch.Size([self.start, 0]), row_RD.size())
        return LoadPlan(create_read_items_for_chunk_list(name, saved, [wanted]))

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn]


def best_checkpoint(run: Path, metric: str) -> Path:
    """The checkpoint with the best validation metric, the earliest of equals; the last one if none was evaluated."""
    evaluated = [path for path in _complete(run) if metric in _progress(path).validation]
    if not evaluated:
        return _last(run)
    return max(evaluated, key=lambda path: (_progress(path).validation[metric], -_progress(path).step))


def _state(model: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The content of a checkpoint, by reference: loading into it in place restores the model."""
    state: dict[str, dict[str, Any]] = {
        "tables": dict(model.shards()),
        "table_optimizers": dict(model.table_optimizers.state_dict()),
        "tower": model.tower.state_dict(),
        "dense_optimizer": {
            name: dict(optimizer.state[parameter]) for name, parameter in model.tower.named_parameters()
        },
    }
    # Without empty mappings, which DCP would take for an entry: a rank without shards has some, and so has SGD.
    entries = {part: {name: value for name, value in content.items() if value != {}} for part, content in state.items()}
    return {part: content for part, content in entries.items() if content}


def _in_blocks(state: Any) -> Any:
    """The same state by reference, its sharded tensors cut into blocks of rows."""
    if isinstance(state, ShardedTensor):
        return _blocks_of(state)
    return {name: _in_blocks(value) for name, value in state.items()} if isinstance(state, dict) else state


def _blocks_of(sharded: ShardedTensor) -> ShardedTensor:
    row_bytes = sharded.dtype.itemsize * sharded.size()[1:].numel()
    cut = partial(_cut, rows=max(1, BLOCK_BYTES // row_bytes))
    blocks = [
        Shard(shard.tensor.detach()[start : start + block.shard_sizes[0]], block)
        for shard in sharded.local_shards()
        for start, block in cut(shard.metadata)
    ]
    whole = sharded.metadata()
    properties = TensorProperties(dtype=sharded.dtype, requires_grad=False)
    metadata = replace(
        whole,
        shards_metadata=[block for shard in whole.shards_metadata for _, block in cut(shard)],
        tensor_properties=properties,
    )
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        blocks, metadata, process_group=sharded._process_group
    )


def _cut(shard: ShardMetadata, rows: int) -> Iterator[tuple[int, ShardMetadata]]:
    """Blocks of a shard, and where in it they begin."""
    (row, *offsets), (count, *sizes) = shard.shard_offsets, shard.shard_sizes
    for start in range(0, count, rows):
        yield start, ShardMetadata([row + start, *offsets], [min(rows, count - start), *sizes], shard.placement)


def _write_manifest(staging: Path, progress: RunProgress) -> None:
    files = {path.name: file_digest(path) for path in sorted(staging.iterdir())}
    content = {
        "format_version": FORMAT_VERSION,
        "step": progress.step,
        "skipped": progress.skipped,
        "seconds": progress.seconds,
        "examples": progress.examples,
        "validation": progress.validation,
        "sha256": files,
    }
    (staging / MANIFEST).write_text(json.dumps(content | {"manifest_sha256": json_digest(content)}, indent=1))


def _prune(run: Path, keep: int, metric: str) -> None:
    complete = _complete(run)
    kept = {*complete[-keep:], best_checkpoint(run, metric)}
    for path in complete:
        if path not in kept:
            shutil.rmtree(path)
    for path in (run / "checkpoints").glob(".step-*"):
        shutil.rmtree(path)


def _complete(run: Path) -> list[Path]:
    """Checkpoints with a readable manifest."""
    return [path for path in checkpoint_paths(run) if _manifest(path) is not None]


def _manifest(path: Path) -> dict[str, Any] | None:
    """checkpoint.json of a checkpoint; None if it is missing, or damaged by its own digest."""
    try:
        content: dict[str, Any] = json.loads((path / MANIFEST).read_text())
        digest = content.pop("manifest_sha256")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return content if digest == json_digest(content) else None


def _last(run: Path) -> Path:
    complete = _complete(run)
    if not complete:
        raise ValueError(f"{run} has no complete checkpoint yet; train it first: logitmix train RECIPE --run {run}")
    return complete[-1]


def _newest_intact(run: Path) -> tuple[Path, RunProgress] | str | None:
    problems = []
    for path in reversed(checkpoint_paths(run)):
        problem = _damage(path)
        if problem is None:
            return path, _progress(path)
        problems.append(problem)
    return problems[0] if problems else None


def _damage(path: Path) -> str | None:
    """What is wrong with a checkpoint's files; DCP itself would silently load flipped bits."""
    manifest = _manifest(path)
    if manifest is None:
        return f"{path / MANIFEST} is damaged or missing; remove {path} to go on from an older checkpoint"
    if (version := manifest["format_version"]) != FORMAT_VERSION:
        return f"{path / MANIFEST} has format {version}, this logitmix reads {FORMAT_VERSION}; train into another --run"
    for name, digest in manifest["sha256"].items():
        if not (path / name).is_file() or file_digest(path / name) != digest:
            return f"{path / name} is damaged or missing; remove {path} to go on from an older checkpoint"
    return None


def _progress(path: Path) -> RunProgress:
    manifest = _manifest(path)
    assert manifest is not None
    return RunProgress(*(manifest[name] for name in ("step", "seconds", "examples", "validation", "skipped")))
