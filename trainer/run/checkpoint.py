"""Which checkpoint of a run is read: the best or the newest that is intact; and reading it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from logitmix.comm.collectives import broadcast_object, on_all_ranks, on_first_rank, own_result
from logitmix.comm.process_group import Ranks
from logitmix.common.checked import check_file, json_digest
from logitmix.common.messages import prefixed, say
from logitmix.modules.schema import Schema, Table
from logitmix.modules.towers import Tower
from logitmix.trainer.config import Config, model_schema
from logitmix.trainer.parallel.growing import GrowingTable
from logitmix.trainer.parallel.row_map import NONE, Layout, Named
from logitmix.trainer.parallel.sharded_rows import ShardedRows, own_range
from logitmix.trainer.run.folder import checkpoint_paths, read_config, read_schema, require_alike
from logitmix.trainer.run.manifest import MANIFEST, by_merit, manifests, read_manifest, require_same_model
from logitmix.trainer.run.metrics import RunProgress
from logitmix.trainer.run.state import (
    AVERAGE,
    GROWING,
    VALUES,
    evaluated,
    fill,
    kind_of,
    kind_of_values,
    kinds_in,
    only_for_training,
    state_of,
    weights_of,
)
from logitmix.trainer.run.tensor_files import Kind, SavedTensors

if TYPE_CHECKING:
    # It imports torchrec, which takes seconds and which evaluation and export do not need.
    from logitmix.trainer.parallel.parallelize import ParallelModel


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
    tensors: SavedTensors = field(default_factory=lambda: SavedTensors(()))
    """All that the checkpoint has; what only training needs is not checked."""

    @property
    def num_items(self) -> int:
        return self.tower.schema.num_items

    def sharded_rows(self, ranks: Ranks) -> dict[str, ShardedRows]:
        """The tables in memory; each rank reads an equal share of their rows."""
        found = {}
        for table in self.tower.schema.tables:
            own_RD, growing = self.read_rows(table.name, *own_range(table.rows, ranks.rank, ranks.world_size)), None
            if table.values:
                growing = GrowingTable(table, self.config.tables.of(table.name), ranks)
                growing.map.rows.id[:] = self._values(table, *growing.part).numpy()
            row_of = growing.find if growing else None
            found[table.name] = ShardedRows.of_ranges(table.rows, own_RD.to(ranks.device), ranks, row_of)
        return found

    def _values(self, table: Table, start: int, stop: int) -> Tensor:
        """The ids [B, K] that have the rows of a table, by bucket (row_map.py), from `start` to `stop`, excluded."""
        id_BK = torch.empty(stop - start, kind_of_values(table).shape[1], dtype=torch.int64)
        self.tensors.read(f"{VALUES}{table.name}", (start, 0), id_BK)
        return id_BK

    def id_of_row(self, name: str) -> Tensor | None:
        """The ids of the values that have the rows of a table [R], int64, 0 for none; None where these are the
        rows."""
        table = self.tower.schema.table(name)
        if not table.values:
            return None
        id_BK = self._values(table, 0, Layout(table.rows - 1).buckets)
        return F.pad(id_BK[id_BK != NONE], (1, 0))

    def named(self, name: str) -> tuple[Named, Named]:
        """What is known of the ids that have rows of a table, in the order of these, and of those that wait for one.
        Steps are those of a run that goes on, so below 0; -1 for all of a table whose rows stay with their values."""
        table = self.tower.schema.table(name)
        none = np.empty(0, np.int64)
        if not table.values:
            id_N = np.arange(1, table.rows)
            return Named(id_N, id_N * 0 - 1, id_N * 0), Named(none, none, none)
        kind, own = kind_of_values(table), f"{GROWING}{name}/"
        steps, found = int(self._whole(f"{own}steps", Kind(torch.int64, ()))), list[Named]()
        waiting = self.config.tables.of(name).admit_after > 1
        for ids, beside in ((f"{VALUES}{name}", own), (f"{own}candidates/id", f"{own}candidates/"))[: 1 + waiting]:
            id_BK, last_BK, count_BK = (self._whole(of, kind) for of in (ids, f"{beside}last", f"{beside}count"))
            found.append(Named(id_BK[id_BK > 0], last_BK[id_BK > 0] - steps - 1, count_BK[id_BK > 0]))
        return found[0], found[1] if waiting else Named(none, none, none)

    def _whole(self, name: str, kind: Kind) -> np.ndarray:
        """Returns a tensor that only training needs, once it is checked."""
        whole = torch.empty(kind.shape, dtype=kind.dtype)
        self.tensors.check({name: kind}, beside=("",))
        self.tensors.read(name, (0,) * whole.ndim, whole)
        return whole.numpy()

    def rows_of(self, name: str, id_N: np.ndarray) -> np.ndarray:
        """The rows of ids of a table."""
        if (id_R := self.id_of_row(name)) is None:
            return id_N
        known = id_R.sort(stable=True)
        # Of the rows without a value, row 0 is the first.
        wanted = torch.from_numpy(id_N.astype(np.int64))
        place = torch.searchsorted(known.values, wanted).clamp(max=len(known.values) - 1)
        return torch.where(known.values[place] == wanted, known.indices[place], 0).numpy()


def restore_tables(model: "ParallelModel", optimizer: torch.optim.Optimizer, otherwise: int) -> None:
    """Has the tables' optimizers adopt the state that was loaded, after as many steps as the tower's optimizer counts,
    those of an earlier run among them, from which this one goes on; `otherwise` if it counts none."""
    steps = max((int(of["step"]) for of in optimizer.state.values() if "step" in of), default=otherwise)
    model.table_optimizers.restore(model.table_optimizers.state_dict(), steps)


def restore(run: Path, config: Config, model: "ParallelModel", optimizer: torch.optim.Optimizer) -> RunProgress:
    """Loads the newest intact checkpoint in place, whatever number of ranks wrote it. Collective.

    Damaged ones that are newer are renamed to damaged-step-N, and a line on stderr says so; with `train.on_damage` stop
    they raise ValueError. A run without checkpoints starts from step 0. Raises ValueError if there are checkpoints but
    none is intact.
    """
    ranks = model.ranks
    paths = broadcast_object(checkpoint_paths(run)[::-1], ranks)
    if not paths:
        return RunProgress()
    state = state_of(model, optimizer)
    # A rank without shards of a table does not know its optimizer's state.
    expected = {name: kind for kinds in on_all_ranks(lambda: kinds_in(state), ranks) for name, kind in kinds.items()}
    opened, problems = _open_first(paths, _Wanted(config, model.tower.schema, expected), ranks)
    fill(state, opened.tensors)
    restore_tables(model, optimizer, opened.progress.step - opened.progress.skipped)
    for path, problem in problems.items():
        aside = on_first_rank(partial(_set_aside, path), ranks)
        if ranks.rank == 0:
            lost, goes_on = path.name.removeprefix("step-"), opened.progress.step
            say(f"{problem}: step {lost} is lost (kept in {aside}), and training continues from step {goes_on}")
    return opened.progress


def restore_best(run: Path, config: Config, model: "ParallelModel") -> int:
    """Loads the weights of the best checkpoint in place, and returns its step. The optimizers keep their state, so
    training must not go on. Collective; raises ValueError as `load_saved` does."""
    state = evaluated(model)
    wanted = _Wanted(config, model.tower.schema, kinds_in(state), only_for_training(config))
    opened = _choose(run, "best", wanted, model.ranks)
    fill(state, opened.tensors)
    model.forget_cached_rows()
    return opened.progress.step


ALONE = Ranks(0, 1, 0, torch.device("cpu"), group=None)  # type: ignore[arg-type]
"""For a process without a group: the collectives of one rank use none."""


def load_saved(run: Path, which: Literal["best", "last"] = "best", ranks: Ranks = ALONE) -> SavedModel:
    """The best checkpoint of a run by its validation metric (or the last one); the tables are not read yet.

    Collective: each rank checks a part of the files. Where a damaged checkpoint is or may be a better choice, a
    line on stderr says so; with `train.on_damage` stop it raises ValueError. Raises ValueError also if `run` is not a
    run directory, or has no intact checkpoint.
    """
    config = read_config(run)
    schema = model_schema(read_schema(run), config)
    tower = Tower(config.model, schema)
    prefix = AVERAGE if config.train.ema else ""
    weights = weights_of(tower, {}, prefix)
    tables = {f"{prefix}tables/{table.name}": kind_of(table, config) for table in schema.tables}
    values = {f"{VALUES}{table.name}": kind_of_values(table) for table in schema.tables if table.values}
    wanted = _Wanted(config, schema, kinds_in(weights) | tables | values, only_for_training(config))
    opened = _choose(run, which, wanted, ranks)
    fill(weights, opened.tensors)
    progress = opened.progress
    read_rows = partial(_read_rows, opened.tensors, schema, prefix)
    return SavedModel(config, progress.step, tower, read_rows, progress.validation, opened.tensors)


def _read_rows(tensors: SavedTensors, schema: Schema, prefix: str, table: str, start: int, stop: int) -> Tensor:
    row_RD = torch.empty(stop - start, schema.table(table).dim)
    tensors.read(f"{prefix}tables/{table}", (start, 0), row_RD)
    return row_RD


def _set_aside(path: Path) -> Path:
    """Renames a damaged checkpoint, so that it counts no more; returns its new path."""
    aside, number = path.with_name(f"damaged-{path.name}"), 2
    while aside.exists():
        aside, number = path.with_name(f"damaged-{path.name}.{number}"), number + 1
    return path.rename(aside)


@dataclass(frozen=True)
class _Wanted:
    """What a checkpoint must fit to be read."""

    config: Config
    schema: Schema
    tensors: Mapping[str, Kind]
    unchecked: tuple[str, ...] = ()
    """How the names of tensors begin that are not checked."""


@dataclass(frozen=True)
class _Opened:
    """An intact checkpoint that fits the model."""

    progress: RunProgress
    tensors: SavedTensors
    files: Mapping[str, Any]
    """The entry of each file in the manifest."""


def _choose(run: Path, which: Literal["best", "last"], wanted: _Wanted, ranks: Ranks) -> _Opened:
    """The requested checkpoint; if it is damaged, the next one."""

    def candidates() -> list[Path]:
        found = manifests(run)
        if not found:
            raise ValueError(f"{run} has no complete checkpoint yet; train it first: logitmix train RECIPE --run {run}")
        known = {path: manifest for path, manifest in found.items() if manifest}
        # The others cannot be read, so each may be the best: they are tried first, and a message names them.
        unknown = [path for path in found if path not in known]
        return [*unknown, *by_merit(known, wanted.config.evaluate.metric)] if which == "best" else list(found)

    opened, problems = _open_first(on_first_rank(candidates, ranks), wanted, ranks)
    for path, problem in problems.items() if ranks.rank == 0 else ():
        say(f"{problem}: instead of {path.name}, step {opened.progress.step} of {run} is taken")
    return opened


def _open_first(paths: Sequence[Path], wanted: _Wanted, ranks: Ranks) -> tuple[_Opened, dict[Path, str]]:
    """The first of the checkpoints that is intact and fits, and what is wrong with those before it. Collective.
    ValueError on every rank if none is, and with `train.on_damage` stop if the first is not."""
    problems: dict[Path, str] = {}
    for path in paths:
        try:
            opened = own_result(partial(_open, path, wanted, ranks), ranks)
        except (ValueError, OSError) as error:
            problems[path] = str(error)
        else:
            require_alike(partial(json_digest, opened.files), path, "is another checkpoint than", ranks)
            return opened, problems
        if wanted.config.train.on_damage == "stop":
            raise ValueError(f"{problems[path]}; remove {path}, or set train.on_damage to continue")
    first = next(iter(problems.values()))
    raise ValueError(f"{first}, and no other checkpoint in {paths[0].parent} is intact; use another run directory")


def _open(path: Path, wanted: _Wanted, ranks: Ranks) -> _Opened:
    """A checkpoint whose files are mapped. Each rank checks the digests of its share of the files. ValueError if the
    checkpoint is damaged or does not fit."""
    manifest = read_manifest(path)
    require_same_model(path / MANIFEST, manifest, wanted.config, wanted.schema)
    files = [path / name for name in manifest.files]
    for file in files[slice(*own_range(len(files), ranks.rank, ranks.world_size))]:
        check_file(file, manifest.files[file.name], MANIFEST)
    tensors = SavedTensors(files)
    with prefixed(f"{path}: "):
        tensors.check(wanted.tensors, wanted.unchecked)
    return _Opened(manifest.progress, tensors, manifest.files)
