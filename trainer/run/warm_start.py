"""A run that starts from the weights of another, on a dataset that has grown since, with another similarity, or with
more features; or that goes on from it, with the states of its optimizers.

Rows of tables are matched by what they stand for: raw ids of items, values of features. New rows start as in any run;
so do the similarity and the h-indexer if the similarity is another, and the h-indexer alone if only it is another.
Features are matched by name; what maps the values of new ones to the model's width starts at zero. Where rows pass from
value to value, those that have one keep it, as far as there is room. A rank reads the other run's tables in blocks and
keeps its own rows. Where that run has averaged its weights, these are taken.

Axes: R rows of a shard of a table, S rows of a block, D width of a row.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor

from logitmix.comm.collectives import on_all_ranks, on_first_rank_at_length, own_result
from logitmix.common.storage import fetch, path_of
from logitmix.modules.schema import ITEM, Feature, Owner, Schema
from logitmix.modules.towers import Tower
from logitmix.trainer.config import Config, DataConfig, changed, conditions_of, flatten, model_schema
from logitmix.trainer.data.batches import starts_of_parts
from logitmix.trainer.data.dataset import Dataset, load_dataset, stored_values
from logitmix.trainer.data.description import UNIT_NAMES, read_description
from logitmix.trainer.data.limited import kept_items
from logitmix.trainer.parallel.growing import GrowingTable
from logitmix.trainer.parallel.parallelize import ParallelModel
from logitmix.trainer.parallel.row_map import Named, RowMap
from logitmix.trainer.run.checkpoint import SavedModel, load_saved, restore_tables
from logitmix.trainer.run.folder import read_schema, recorded_dataset
from logitmix.trainer.run.tensor_files import BLOCK_BYTES, Kind


def warm_start(
    run: Path,
    config: Config,
    dataset: Dataset,
    model: ParallelModel,
    optimizer: torch.optim.Optimizer | None = None,
    earlier: Dataset | None = None,
) -> str:
    """Gives the model the weights of the best checkpoint of `run`, and returns a line to say of them. With the
    tower's `optimizer`, its state and that of the tables' are taken over as well. `earlier`: the dataset of `run`, if
    it is loaded. Collective. Raises ValueError on every rank if `run` is not a run directory or has no intact
    checkpoint, if its dataset is missing or changed or has none of the items, if its weights do not fit, or if it was
    trained on what is held out now.
    """
    saved, ranks, schema = load_saved(run, ranks=model.ranks), model.ranks, model.tower.schema
    on_all_ranks(partial(_require_fit, run, saved, config, model.tower), ranks)
    on_first_rank_at_length(partial(_require_unseen, run, saved.config, dataset, config, earlier), ranks)
    on_all_ranks(partial(_require_same_unit, run, dataset), ranks)
    fresh, now_called, own = _fresh(saved.tower, model.tower), _by_feature(model.tower), model.tower.state_dict()
    # By name of a weight of this model, what the other run calls it.
    names = {now_called[of]: name for of, name in _by_feature(saved.tower).items() if not name.startswith(fresh)}
    before = saved.tower.state_dict()
    taken_over = {now: before[name] for now, name in names.items()}
    # What is added to a sum begins as nothing. A component does not: its L2 norm would magnify gradients at zero.
    component = f"{_MAPS['user']}{model.tower.query_tower.user_place}."
    new = {
        name: torch.zeros_like(of)
        for name, of in own.items()
        if name.startswith(_PLACED) and name not in taken_over and not name.startswith(component)
    }
    model.tower.load_state_dict({**own, **new, **taken_over})
    if optimizer:
        on_all_ranks(partial(_require_states, run, saved, config, model), ranks)
        on_all_ranks(partial(_take_states, saved, model, optimizer, names), ranks)
    here = _Values(dataset.path, dataset.schema, dataset.kept)
    there = own_result(partial(_Values.of_run, run, saved.config.data, earlier), ranks)
    counts = on_all_ranks(partial(_take_rows, saved, there, here, model, optimizer is not None), ranks)
    if optimizer:
        restore_tables(model, optimizer, 0)
    if model.average:
        # What is evaluated, should no step move the weights before.
        model.average.update(1)
    matched = {table.name: sum(count[table.name] for count in counts) for table in schema.tables}
    # The row of unknown values is in every table.
    if matched[ITEM] <= 1 and ITEM not in model.growing:
        raise ValueError(f"{run} has none of the items of {here.path}; spell ids as {there.path} does")
    taken = ", ".join(f"{matched[of.name]:,} of {of.rows:,} rows of table {of.name}" for of in schema.tables)
    said = f"warm start from {run}, step {saved.step}: the tower"
    if fresh:
        said += f" without its {'similarity' if _OWN[0] in fresh else 'h-indexer'}"
    said += f", and {taken}" + (", with their optimizers' states" if optimizer else "")
    of_owners = zip(_features(saved.tower).values(), _features(model.tower).values(), strict=True)
    if added := ", ".join(feature for before, now in of_owners for feature in now if feature not in before):
        said += f"; new features: {added}"
    return said


def require_fit(first: Config, config: Config, schema: Schema) -> None:
    """ValueError if a run with the one configuration would give weights that do not fit the other."""
    with torch.device("meta"):
        before, now = (Tower(each.model, model_schema(schema, each)) for each in (first, config))
    if not _fits(before, now):
        differences = _differences(first, config, before, now)
        raise ValueError(f"the weights of the run that is trained first would not fit: {differences}")


_OWN = ("similarity.", "hindexer.")
"""Parts of the tower that need not fit."""
_MAPS: Mapping[Owner, str] = {
    "item": "item_tower.features.maps.",
    "user": "query_tower.users.maps.",
    "event": "query_tower.events.maps.",
}
"""The modules of features, whose names are the places of the owner's features."""
_PLACED = (*_MAPS.values(), "query_tower.time.")


def _fresh(*towers: Tower) -> tuple[str, ...]:
    """Those of these parts that start as in any run."""

    def same(part: str) -> bool:
        before, now = (
            {name: of.shape for name, of in tower.state_dict().items() if name.startswith(part)} for tower in towers
        )
        # Its own maps of features are by place, too.
        by_place = any("_features." in name for name in before)
        return before == now and (not by_place or _features(towers[0]) == _features(towers[1]))

    (before, now), (similarity, hindexer) = (tower.config.similarity.kind for tower in towers), _OWN
    if before != now or not same(similarity):
        return _OWN
    return () if same(hindexer) else (hindexer,)


def _require_fit(run: Path, saved: SavedModel, config: Config, tower: Tower) -> None:
    path = fetch(saved.config.data.path)
    there = path / "dataset.json"
    if not there.is_file() or there.read_text(encoding="utf-8") != recorded_dataset(run):
        raise ValueError(f"{path}, the dataset of {run}, is missing or has changed; its ids are needed to match rows")
    read_description(path)
    if not _fits(saved.tower, tower):
        differences = _differences(saved.config, config, saved.tower, tower)
        raise ValueError(f"the weights of {run} do not fit: {differences}")


def _require_unseen(run: Path, before: Config, dataset: Dataset, now: Config, earlier: Dataset | None) -> None:
    was, wanted = (
        {"split": of.data.split, "targets": of.data.targets, "negatives": conditions_of(of.data.negatives)}
        for of in (before, now)
    )
    for name in was if now.data.split == "leave-one-out" else ("split",):
        if was[name] != wanted[name]:
            raise ValueError(f"{run} has data.{name} {was[name]}, so it may have been trained on what is held out now")
    if now.data.split == "time":
        path = fetch(before.data.path)
        if earlier is None:
            earlier = (dataset.whole or dataset) if path == dataset.path else load_dataset(path)
        trained_to = _held_out_since(before, earlier)
        if trained_to > (since := _held_out_since(now, dataset)):
            raise ValueError(
                f"{run} was trained on the actions before time {trained_to}; held out now are those from {since} on"
            )
    elif now.data.validation and not before.data.validation:
        raise ValueError(f"{run} was trained on the validation actions, which are held out now; give the run before it")


def _require_same_unit(run: Path, dataset: Dataset) -> None:
    """ValueError if the times of the two datasets are known to be in different units: recency and times would mean
    something else, and a split by time would compare them."""
    times = (json.loads(text).get("times") for text in (recorded_dataset(run), dataset.description()))
    before, now = (UNIT_NAMES.get(str(of.get("unit"))) if isinstance(of, dict) else None for of in times)
    if before and now and before != now:
        raise ValueError(f"the times of {run} are in {before}, and those of {dataset.path} in {now}")


def _held_out_since(config: Config, dataset: Dataset) -> int:
    """With a split by time, the time from which on a run with these settings holds out all actions."""
    validation, test = starts_of_parts(dataset.whole or dataset, config.data.held_out)
    return validation if config.data.validation else test


def _fits(before: Tower, now: Tower) -> bool:
    """Whether a tower can take over the other's weights, whatever its similarity is and whichever features it has
    besides: shapes are the same, and what shapes do not tell. Heads divide a width."""
    features = zip(_features(before).values(), _features(now).values(), strict=True)
    old, new = (
        {of: weights[name].shape for of, name in _by_feature(tower).items() if not name.startswith(_OWN)}
        for tower, weights in ((before, before.state_dict()), (now, now.state_dict()))
    )
    dims = [{table.name: table.dim for table in tower.schema.tables} for tower in (before, now)]
    heads = [getattr(tower.config.encoder, "heads", 1) for tower in (before, now)]
    return (
        all(set(were) <= set(are) for were, are in features)
        and old.items() <= new.items()
        and all(name.startswith(_PLACED) for name in new.keys() - old.keys())
        and dims[0].items() <= dims[1].items()
        and heads[0] == heads[1]
    )


def _by_feature(tower: Tower) -> dict[str, str]:
    """The names of a tower's weights, by names that have a feature in place of its number."""
    features, names = _features(tower), {}
    for name in tower.state_dict():
        of = name
        for owner, maps in _MAPS.items():
            if name.startswith(maps):
                place, _, rest = name.removeprefix(maps).partition(".")
                of = f"{maps}{features[owner][int(place)]}.{rest}"
        names[of] = name
    return names


def _features(tower: Tower) -> dict[str, list[str]]:
    """The features that the model uses besides the item id, in order, by owner. A number's mean and deviation may
    change."""
    return {owner: [_said(feature) for feature in tower.schema.of(owner)] for owner in get_args(Owner)}


def _said(feature: Feature) -> str:
    about = f" of table {feature.table}" if feature.sparse else f", {feature.width} wide" if feature.form.wide else ""
    if feature.encoder:
        about += f", by {feature.encoder} {feature.version}"
    return f"{feature.name} ({feature.kind}{about})"


_SHAPING = re.compile(r"model\.(dim|encoder\.(?!.*dropout).*)|tables\.(.*\.)?dim")
"""The settings that weights must have in common."""


def _differences(before: Config, now: Config, old_tower: Tower, new_tower: Tower) -> str:
    said = [of for name, of in changed(flatten(before), flatten(now)).items() if _SHAPING.fullmatch(name)]
    unused = [
        f"{owner} feature {was} is not used"
        for owner, were in _features(old_tower).items()
        for was in were
        if was not in _features(new_tower)[owner]
    ]
    if unused and before.model.features != now.model.features:
        unused.append(f"that run has --model.features {' '.join(before.model.features)}")
    return "; ".join([*said, *unused])


def _require_states(run: Path, saved: SavedModel, config: Config, model: ParallelModel) -> None:
    """ValueError if the other run's optimizers keep something else."""
    tables = {table.name for table in saved.tower.schema.tables} & set(model.shards())
    before, now = (
        {"dense": of.dense.optimizer} | {f"tables.{name}": of.tables.of(name).optimizer for name in sorted(tables)}
        for of in (saved.config, config)
    )
    for name, optimizer in before.items():
        if now[name] != optimizer:
            raise ValueError(
                f"{run} has {name}.optimizer {optimizer}, and this run {now[name]}: --continue needs the same"
            )


def _take_states(
    saved: SavedModel, model: ParallelModel, optimizer: torch.optim.Optimizer, names: Mapping[str, str]
) -> None:
    """Fills the states of the tower's weights; `names` has those that are taken over, and what they were called."""
    for name, weight in model.tower.named_parameters():
        if name not in names:
            continue
        for key, state in optimizer.state[weight].items():
            saved_as = f"dense_optimizer/{names[name]}/{key}"
            saved.tensors.check({saved_as: Kind(state.dtype, tuple(state.shape))}, beside=("",))
            saved.tensors.read(saved_as, (0,) * state.ndim, state)


@dataclass(frozen=True)
class _Values:
    """What the rows of a dataset's tables stand for, read some at a time."""

    path: Path
    schema: Schema
    kept: np.ndarray | None
    """The items that a run is limited to; None: all."""

    @staticmethod
    def of_run(run: Path, config: DataConfig, dataset: Dataset | None) -> "_Values":
        """Returns the values of another run's tables, by that run's settings. `dataset` is that run's dataset if it is
        loaded already."""
        path = path_of(config.path)
        kept = kept_items(config, dataset or load_dataset(path)) if config.items else None
        return _Values(path, read_schema(run), kept)

    def blocks(self, table: str) -> Iterator[tuple[int, pa.Array]]:
        """Yields the values of a table by row, some at a time, and the row of the first of them."""
        first = 0
        for array in stored_values(self.path, self.schema, table, self.kept):
            yield first, array
            first += len(array)

    def of_rows(self, table: str, row_N: np.ndarray) -> pa.ChunkedArray:
        """Returns the values of some rows, in their order."""
        order_N, found = np.argsort(row_N), []
        for first, array in self.blocks(table):
            within = slice(*np.searchsorted(row_N[order_N], [first, first + len(array)]))
            found.append(array.take(pa.array(row_N[order_N][within] - first)))
        return pa.chunked_array(found).take(pa.array(np.argsort(order_N)))

    def rows(self, table: str, wanted: pa.ChunkedArray) -> np.ndarray:
        """Returns the row of each value, int64 [R]; -1 for one that is not there."""
        row_R = np.full(len(wanted), -1)
        for first, array in self.blocks(table):
            at_R = pc.index_in(wanted, value_set=array).fill_null(-1).to_numpy()
            row_R = np.where(at_R >= 0, at_R + first, row_R)
        return row_R


def _take_rows(saved: SavedModel, there: _Values, here: _Values, model: ParallelModel, states: bool) -> dict[str, int]:
    """Fills this rank's shards of all tables, and of their optimizers' `states`; returns, by table, how many of its
    rows the other run had. Rows split by columns count on the rank of their first columns, and copies once."""
    known = {table.name for table in saved.tower.schema.tables}
    of_states = model.table_optimizers.state_dict() if states else {}
    counts = {}
    for name, sharded in model.shards().items():
        counts[name] = 0
        if name not in known:
            continue
        inherited_R = _inherited(saved, name, model.growing[name], here, there) if name in model.growing else None
        matched: dict[tuple[int, int], np.ndarray] = {}
        for key, tensor in {"": sharded, **of_states.get(name, {})}.items():
            for shard in tensor.local_shards() if isinstance(tensor, ShardedTensor) else ():
                (row, *column), (rows, *columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                if inherited_R is not None:
                    matched[row, rows] = inherited_R[row : row + rows]
                elif (row, rows) not in matched:
                    place_R = there.rows(name, here.of_rows(name, np.arange(row, row + rows)))
                    matched[row, rows] = _rows_of(saved, name, place_R)
                old_R, part = matched[row, rows], [slice(a, a + n) for a, n in zip(column, columns, strict=True)]
                for start, row_SD in _blocks(saved, name, key, tensor):
                    at_N = np.flatnonzero((old_R >= start) & (old_R < start + len(row_SD)))
                    values_ND = row_SD[torch.from_numpy(old_R[at_N] - start)][(slice(None), *part)]
                    shard.tensor.detach()[torch.from_numpy(at_N)] = values_ND.to(shard.tensor)
                if tensor is sharded and column == [0] and model.replicas.number == 0:
                    counts[name] += int((old_R >= 0).sum())
    return counts


def _blocks(saved: SavedModel, name: str, key: str, now: ShardedTensor) -> Iterator[tuple[int, Tensor]]:
    """The other run's rows [S, ...] of a table, or what its optimizer keeps of them as `key`, some at a time, and the
    place of the first one."""
    table, (_, *columns) = saved.tower.schema.table(name), now.size()
    saved_as, size = f"table_optimizers/{name}/{key}", max(1, BLOCK_BYTES // (4 * table.dim))
    if key:
        saved.tensors.check({saved_as: Kind(now.dtype, (table.rows, *columns))}, beside=("",))
    for start in range(0, table.rows, size):
        count = min(size, table.rows - start)
        if not key:
            yield start, saved.read_rows(name, start, start + count)
            continue
        of_rows = torch.empty(count, *columns, dtype=now.dtype)
        saved.tensors.read(saved_as, (start, *(0 for _ in columns)), of_rows)
        yield start, of_rows


def _rows_of(saved: SavedModel, name: str, place_N: np.ndarray) -> np.ndarray:
    """The rows of values by their places, -1 for those without one."""
    if not saved.tower.schema.table(name).values:
        return place_N
    row_N = saved.rows_of(name, place_N)
    return np.where((row_N > 0) | (place_N == 0), row_N, -1)


def _inherited(saved: SavedModel, name: str, growing: GrowingTable, here: _Values, there: _Values) -> np.ndarray:
    """Gives rows of a table, as far as there is room, to the values that had some in the other run, and has its
    candidates wait for one. Returns, for each row, that which its value had in the other run, or -1 [R]."""
    were = saved.named(name)
    are = [of._replace(id=here.rows(name, there.of_rows(name, of.id))) for of in were]
    whole = RowMap(growing.map.layout.capacity, growing.map.admit_after, growing.map.evict)
    whole.adopt(*(Named(*(each[of.id > 0] for each in of)) for of in are))
    growing.adopt(whole)
    row_N = whole.find(are[0].id.clip(0))
    inherited_R = np.full(1 + whole.layout.capacity, -1)
    inherited_R[row_N] = np.where(row_N > 0, saved.rows_of(name, were[0].id), 0)
    inherited_R[0] = 0
    return inherited_R
