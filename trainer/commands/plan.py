"""`logitmix plan`: where a job's tables would be placed, what its ranks would hold, what a step would send, and about
how long it would take, without the job's machines, and if need be without its dataset."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from logitmix.common.mappings import require
from logitmix.modules.schema import Feature, Schema, Table
from logitmix.trainer.commands.options import JSONOption, ScaleOption, importing
from logitmix.trainer.commands.recipe import of_recipe
from logitmix.trainer.config import Config, model_schema

if TYPE_CHECKING:
    from torch import Tensor

    from logitmix.modules.batch import Bags, Batch
    from logitmix.trainer.commands.step_time import StepTime
    from logitmix.trainer.data.dataset import Dataset
    from logitmix.trainer.parallel.plan import Devices, TablePlan
    from logitmix.trainer.parallel.traffic import Counts, Crossing, Traffic

USAGE = """\
usage: logitmix plan RECIPE [--world-size N] [--per-host N] [--device cuda|cpu] [--gpu NAME] [--gpu-gib GIB]
                            [--items N [--users N] [--rows TABLE=N ...] [--history N]]
                            [--scale N] [--json] [--section.field VALUE ...]

It places the tables as `logitmix train` with the same settings would, without starting anything, and prints what each
rank would hold, what a step would send, and about how long it would take. With --items, no dataset is needed.
logitmix plan RECIPE --help lists the sections of settings"""


@dataclass(frozen=True)
class Arguments(JSONOption, ScaleOption, Config):
    """Where the tables of a job would be placed, and the memory that each rank would need, without its machines."""

    world_size: int = 8
    """Ranks of the job."""
    per_host: int = 0
    """Ranks of each host; all, but 8 at most, when 0."""
    device: Literal["cuda", "cpu"] = "cuda"
    """What the ranks run on."""
    gpu: Literal["a100", "h100", "h200", "b200"] = "h100"
    """The GPU that the time of a step is estimated for."""
    gpu_gib: float = 0.0
    """Memory of a GPU in GiB; that of --gpu when 0."""
    items: float = 0
    """Items, such as 1e9, where there is no dataset yet."""
    users: float = 0
    """With --items: number of users."""
    rows: tuple[str, ...] = ()
    """With --items: further tables of items, as NAME=ROWS."""
    history: float = 0
    """With --items: mean length of a history; the most when 0."""

    def devices(self) -> "Devices":
        with importing():
            from logitmix.trainer.commands.step_time import GPUS
            from logitmix.trainer.parallel.plan import Devices

        memory = int((self.gpu_gib or GPUS[self.gpu].gib) * 2**30) if self.device == "cuda" else None
        return Devices(self.world_size, self.per_host or min(self.world_size, 8), self.device, memory)

    def imagined(self) -> "Imagined | None":
        """The dataset that is described in place of a real one."""
        if not self.items:
            for name in ("users", "rows", "history"):
                require(not getattr(self, name), f"--{name}", getattr(self, name), "given with --items alone")
            return None
        require(1 <= self.items < 2**62, "--items", self.items, "at least 1")
        require(0 <= self.users < 2**62, "--users", self.users, "at least 0")
        require(self.history >= 0, "--history", self.history, "at least 0")
        tables = [_table(word) for word in self.rows]
        schema = Schema.of_ids(int(self.items))
        features = (*schema.features, *(Feature(table.name, "item", "id", table.name) for table in tables))
        return Imagined(Schema(features, (*schema.tables, *tables), int(self.users)), self.history)


@dataclass(frozen=True)
class Imagined:
    """Sizes of a dataset that is not there."""

    schema: Schema
    history: float


def _table(word: str) -> Table:
    name, _, rows = word.partition("=")
    try:
        return Table(name, int(float(rows)))
    except (ValueError, OverflowError):
        raise ValueError(f"--rows has {word!r}; give NAME=ROWS, such as city=50000") from None


def run(words: list[str]) -> None:
    arguments, config, _ = of_recipe(Arguments, "plan", words, USAGE)
    require(arguments.gpu_gib >= 0, "--gpu-gib", arguments.gpu_gib, "above 0, or 0 for that of --gpu")
    plan = plan_job(config, arguments.devices(), arguments.imagined(), arguments.gpu)
    arguments.tell(dataclasses.asdict(plan), plan.text())


@dataclass(frozen=True)
class JobPlan:
    """What `plan` prints, as text or JSON."""

    dataset: str
    users: int
    items: int
    devices: "Devices"
    group_size: int
    """Ranks that hold all tables together."""
    tables: "Mapping[str, TablePlan]"
    table_bytes: tuple[int, ...]
    """By rank: its rows with their optimizers' state and moving averages, or the caches of cached tables."""
    host_bytes: tuple[int, ...]
    """By rank: rows and optimizers' state of cached tables, in the host's memory."""
    tower_parameters: int
    tower_bytes: int
    """On each rank: the tower with its gradients, its optimizer's state and its moving average."""
    averaged: bool
    """Whether there are moving averages (train.ema)."""
    step_bytes: "StepBytes"
    traffic: "Mapping[str, Traffic]"
    """Of a step's rows, by their precision: the same in both directions, or else as configured."""
    dense_bytes: int
    """Of the tower's gradients, which a step sums over the ranks."""
    gpu: str
    step_time: "StepTime | None"
    """On GPUs."""
    slowest: "Slowest"
    idle: str
    """A line about ranks that have no sequence in a step; empty if each has one."""

    @property
    def rank_bytes(self) -> int:
        """About what the rank with the most would hold."""
        maps = sum(table.map_bytes for table in self.tables.values()) // self.devices.world_size
        held = max(self.table_bytes) + (maps if self.devices.kind == "cpu" else 0)
        return held + self.tower_bytes + self.step_bytes.total + CONTEXT[self.devices.kind]

    def text(self) -> str:
        """Lines as those that training begins with."""
        from logitmix.trainer.parallel.plan import binary_size, with_plan

        devices = self.devices
        parameters = sum(table.rows * table.dim for table in self.tables.values())
        held = list(dict.fromkeys(binary_size(count) for count in (min(self.table_bytes), max(self.table_bytes))))
        room = f" of {devices.bytes / 2**30:,g} GiB" if devices.bytes else ""
        averages = ", both with moving averages" if self.averaged else ""
        step = self.step_bytes
        groups = f"; groups of {self.group_size} with all tables each" if self.group_size < devices.world_size else ""
        block = {
            "dataset": f"{self.dataset}: {self.users:,} users, {self.items:,} items",
            "parameters": f"{parameters:,} in tables, {self.tower_parameters:,} in the tower",
            "ranks": f"{devices.world_size} on {devices.kind}, {devices.per_host} on each host{groups}",
            "memory": f"on each rank{room}: tables with their optimizers {' to '.join(held)}, tower with gradients and "
            f"optimizer {binary_size(self.tower_bytes)}{averages};",
            "": f"in a step of {step.sequences:,} sequences: activations {binary_size(step.activations)}, rows "
            f"{binary_size(step.rows)}, batches {binary_size(step.batches)}; about {binary_size(self.rank_bytes)} in "
            "all",
        }
        if most := max(self.host_bytes):
            block["host"] = (
                f"in a host's memory: tables with their optimizers {binary_size(most)} for a rank, "
                f"{binary_size(most * devices.per_host)} in all; what a step waits for them is not in its time"
            )
        if line := self.too_much():
            block["NO ROOM"] = line
        if self.idle:
            block["batch"] = self.idle
        block |= {
            "wire": f"ids, rows and gradients that a rank sends in a step: {', '.join(map(self._sent, self.traffic))};",
            " ": f"gradients of the tower to be summed: {binary_size(self.dense_bytes)}",
        }
        if self.step_time:
            block |= _timed(self.step_time, self.gpu, self.slowest if devices.world_size > 1 else None)
        return with_plan(block, self.tables)

    def too_much(self) -> str:
        """What a GPU has no room for in a step, and the setting that mends it; empty if there is room."""
        from logitmix.trainer.parallel.plan import binary_size

        of, step = self.devices.bytes, self.step_bytes
        if of is None or self.rank_bytes <= of:
            return ""
        left = of - (self.rank_bytes - step.total)
        # A little less, because a smaller batch names more items for each of its positions.
        fits = self.devices.world_size * int(0.95 * left / step.total * step.sequences)
        mended = f"set --train.batch-size {fits}" if fits >= self.devices.world_size else "use more ranks"
        return (
            f"for a step's {binary_size(step.total)} beside the tables, {binary_size(max(0, left))} is left: {mended}"
        )

    def _sent(self, wire: str) -> str:
        from logitmix.trainer.parallel.plan import binary_size

        of, W = self.traffic[wire], self.devices.world_size
        between = f" ({binary_size(of.between_hosts // W)} to other hosts)" if self.devices.per_host < W else ""
        if of.peers:
            between = f"{between}, {binary_size(of.peers // W)} of it to other groups"
        return f"{binary_size(of.total // W)} with {wire}{between}"


CONTEXT = {"cuda": 2**30, "cpu": 2**23}
"""Bytes of a rank, about, that are no tensors: CUDA, NCCL and the code of kernels; TorchRec's objects."""
FRAGMENTED = {"cuda": 1.0, "cpu": 1.5}
"""Memory of a process by that of its step's tensors. Measured on CPU (benchmarks.estimates), where the C
library puts tensors into what earlier ones of other sizes have left. Not known for a GPU."""


def _timed(of: "StepTime", gpu: str, slowest: "Slowest | None") -> dict[str, str]:
    from logitmix.trainer.commands.step_time import ASSUMED, LEFT_OUT

    longest = ", ".join(f"{name} {of.parts[name] * 1e3:,.2f}" for name in of.longest())
    return {
        "step": f"about {of.total * 1e3:,.2f} ms on {gpu.upper()}, with {of.kernels:,} kernels; arithmetic or memory "
        f"alone at least {of.floor * 1e3:,.2f};",
        "  ": f"of it, in ms: {longest}.{slowest.text() if slowest else ''}",
        "   ": f"Assumed: {ASSUMED}.",
        "    ": f"Not estimated: {LEFT_OUT}",
    }


@dataclass(frozen=True)
class Slowest:
    """The rank with the most of something in a step, which the others wait for, by the mean of all ranks."""

    positions: float
    rows: float
    """Bytes of ids, rows and gradients that it sends or receives."""
    counted: bool
    """Whether positions are those of a dataset."""

    def text(self) -> str:
        alike = "" if self.counted else " (histories are taken for equally long)"
        return (
            f" The slowest rank has {self.positions:.2f} times the mean's positions{alike}, and sends or receives "
            f"{self.rows:.2f} times the mean's rows."
        )


@dataclass(frozen=True)
class StepBytes:
    """What a step needs on the rank with the largest batch, beside tables and tower; estimated."""

    sequences: int
    activations: int
    """With the rows' gradients."""
    rows: int
    """Those of the batch, as received and as leaves of the graph, and room for the next batch's."""
    batches: int
    """That in training, the next one, and the one that is being made."""
    total: int


def plan_job(config: Config, devices: "Devices", imagined: Imagined | None = None, gpu: str = "h100") -> JobPlan:
    """The plan of a run on these devices, with the dataset of the configuration or one of the imagined sizes.

    Raises ValueError for no dataset, settings that the devices do not support, and tables that they have no room for.
    """
    import torch

    from logitmix.trainer.commands.miniature import bytes_of, imagined_batch, work_of
    from logitmix.trainer.commands.step_time import GPUS, Load, step_time
    from logitmix.trainer.data.dataset import load_dataset
    from logitmix.trainer.data.limited import limited
    from logitmix.trainer.logs.telemetry import idle_ranks
    from logitmix.trainer.parallel.optimizer import bytes_per_weight
    from logitmix.trainer.parallel.parallelize import automatic_precision, unsharded
    from logitmix.trainer.parallel.plan import TableRules, bytes_by_rank, describe, plan_tables
    from logitmix.trainer.parallel.traffic import expected_ids, rows_sent, traffic
    from logitmix.trainer.run.warm_start import require_fit

    require(devices.world_size >= 1, "--world-size", devices.world_size, "at least 1")
    whole_hosts = devices.per_host >= 1 and devices.world_size % devices.per_host == 0
    require(whole_hosts, "--per-host", devices.per_host, f"a divisor of the {devices.world_size} ranks")
    if imagined:
        named = [feature.name for feature in imagined.schema.features[1:]]
        config = replace(config, model=replace(config.model, features=(*config.model.features, *named)))
        schema, name, users = imagined.schema, "imagined", imagined.schema.users
        longest = config.model.encoder.max_length
        length = min(imagined.history or longest, longest)
        used = model_schema(schema, config)
        # As TrainingBatches divides sequences of equal lengths.
        cuts = [round(config.train.batch_size * rank / devices.world_size) for rank in range(devices.world_size + 1)]
        sequences = [end - first for first, end in pairwise(cuts)]
        expected = {count: expected_ids(used, config.model.loss, count, length) for count in set(sequences)}
        ids: list[Mapping[str, Tensor | Bags]] = [expected[count] for count in sequences]
        batch = imagined_batch(used, config, max(sequences), length, _lookups(expected[max(sequences)]))
        positions = [count * length for count in sequences]
    else:
        dataset = limited(config.data, load_dataset(config.data.path))
        schema, name, users = dataset.schema, dataset.name, dataset.num_users
        used = model_schema(schema, config)
        parts = first_batches(config, dataset, devices.world_size)
        parts = _with_rows(parts, used)
        ids, batch = [of.ids for of in parts], max(parts, key=lambda of: len(of.input_T))
        positions = [len(of.input_T) for of in parts]
    if config.first:
        require_fit(config.first, config, schema)
    rules = TableRules(config.tables, config.train.ema > 0, config.comm.parts)
    model, tables = unsharded(used, config.model, rules, torch.device(devices.kind))
    plan = describe(plan_tables(tables, rules, devices), tables, rules)
    weights = sum(weight.numel() for weight in model.tower.parameters())
    size = config.tables.ranks_of_group(devices.world_size)
    rows = rows_sent(ids, plan, devices.per_host, size)
    wires = {of: replace(config.comm, forward=of, backward=of) for of in ("fp8", "fp16", "fp32")}
    if config.comm.forward != config.comm.backward:
        wires = {f"{config.comm.forward} and {config.comm.backward} back": config.comm, **wires}
    if config.train.precision == "auto":
        precision = automatic_precision(config.model, devices.kind, has_bf16=True)
        config = replace(config, train=replace(config.train, precision=precision))
    lookups = _lookups(batch.ids)
    work = work_of(config, used, batch, lookups, devices.kind)
    row_bytes = sum(4 * count * plan[name].dim for name, count in lookups.items())
    held = work.bytes, 3 * row_bytes, 3 * bytes_of(batch)
    activations, leaves, batches = (round(FRAGMENTED[devices.kind] * of) for of in held)
    sent, W = traffic(rows, config.comm), devices.world_size
    device, host = zip(*bytes_by_rank(plan, size), strict=True)
    exchanges, parts_of = len({(of.dim, of.sharding, of.pooled) for of in plan.values()}), config.comm.parts
    in_group, of_peers = (size, min(size, devices.per_host)), (W // size, max(1, devices.per_host // size))
    load = Load(
        within=sent.most_within,
        between=sent.most_between,
        dense=weights * (2 if config.comm.dense == "bf16" else 4),
        tables=max(sum(_moved(plan[name]) * count for name, count in lookups.items()), _most_served(rows, plan)),
        optimizer=2 * weights * bytes_per_weight(config.dense, config.train.ema > 0),
        exchanges=exchanges,
        # Of ids, rows and gradients; among peers, of ids and gradients.
        all_to_alls=[in_group] * (1 + 2 * exchanges * parts_of) + [of_peers] * (2 * exchanges),
        all_reduces=1 + bool(config.train.clip),
    )
    return JobPlan(
        dataset=name,
        users=users,
        items=used.num_items,
        devices=devices,
        group_size=size,
        tables=plan,
        table_bytes=device * (devices.world_size // size),
        host_bytes=host * (devices.world_size // size),
        tower_parameters=weights,
        tower_bytes=weights * bytes_per_weight(config.dense, config.train.ema > 0),
        averaged=config.train.ema > 0,
        step_bytes=StepBytes(
            len(batch.packing.lengths_B), activations, leaves, batches, activations + leaves + batches
        ),
        traffic={wire: traffic(rows, of) for wire, of in wires.items()},
        dense_bytes=int(load.dense),
        gpu=gpu,
        step_time=step_time(GPUS[gpu], work, load, W, devices.per_host) if devices.kind == "cuda" else None,
        slowest=Slowest(
            positions=max(positions) * W / max(1, sum(positions)),
            rows=(sent.most_within + sent.most_between) * W / max(1, sent.total),
            counted=imagined is None,
        ),
        idle=idle_ranks(config.train.batch_size, W),
    )


def first_batches(config: Config, dataset: "Dataset", world_size: int) -> "list[Batch]":
    """The ranks' parts of the first step's batch."""
    import torch

    from logitmix.comm.process_group import Ranks
    from logitmix.trainer.loop import training_batches

    device = torch.device("cpu")
    batches = training_batches(config, dataset, Ranks(0, world_size, 0, device, None))  # type: ignore[arg-type]
    return [batches.at(0, rank) for rank in range(world_size)]


def _with_rows(parts: "list[Batch]", schema: Schema) -> "list[Batch]":
    """The batches with rows in place of the ids of tables whose rows pass from value to value, as if each value got one
    at once."""
    import torch

    from logitmix.trainer.parallel.growing import unique_ids, with_rows
    from logitmix.trainer.parallel.row_map import RowMap

    for table in schema.tables:
        if table.values:
            named = [unique_ids(part.ids[table.name]) for part in parts]
            rows = RowMap(table.rows - 1)
            rows.advance(torch.cat([id_U for id_U, _ in named]).unique().numpy(), 1)
            for number, (id_U, place_S) in enumerate(named):
                row_U = torch.from_numpy(rows.find(id_U.numpy()))
                found = {table.name: row_U if place_S is None else row_U[place_S]}
                parts[number] = with_rows(parts[number], schema, found)
    return parts


def _lookups(ids: "Mapping[str, Tensor | Bags]") -> dict[str, int]:
    """The rows that a rank's batch needs of each table: a row for each bag of a pooled one."""
    from logitmix.modules.batch import Bags

    return {name: len(of.offsets) - 1 if isinstance(of, Bags) else len(of) for name, of in ids.items()}


ROW_PASSES = 9
"""How often a row or its gradient is read or written, in FP32, between its table and the loss: by the lookup, codec,
copies to their places, and back."""


def _most_served(rows: "Mapping[Crossing, Counts]", plan: "Mapping[str, TablePlan]") -> float:
    """Bytes that the rank which other ranks ask for the most reads and writes for their rows."""
    of_ranks = [
        _moved(plan[way.table]) * way.columns / plan[way.table].dim * sent_W
        for way, (sent_W, _) in rows.items()
        if not way.to_peers
    ]
    return float(sum(of_ranks).max()) if of_ranks else 0.0


def _moved(table: "TablePlan") -> float:
    """Bytes read and written for a row that a step names, with its update."""
    return 4 * ROW_PASSES * table.dim + 2 * table.bytes / table.rows
