"""`logitmix plan`: where a job's tables would be placed, what its ranks would hold and what a step would send, without
the job's machines, and if need be without its dataset."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from logitmix.common.mappings import require
from logitmix.modules.schema import Feature, Schema, Table
from logitmix.trainer.commands.options import JSONOption, ScaleOption
from logitmix.trainer.commands.recipe import of_recipe
from logitmix.trainer.config import Config

if TYPE_CHECKING:
    from torch import Tensor

    from logitmix.modules.batch import Bags
    from logitmix.trainer.data.dataset import Dataset
    from logitmix.trainer.parallel.plan import Devices, TablePlan
    from logitmix.trainer.parallel.traffic import Traffic

USAGE = """\
usage: logitmix plan RECIPE [--world-size N] [--per-host N] [--device cuda|cpu] [--gpu-gib GIB]
                            [--items N [--users N] [--rows TABLE=N ...] [--history N]]
                            [--scale N] [--json] [--section.field VALUE ...]

It places the tables as `logitmix train` with the same settings would, without starting anything, and prints what each
rank would hold and what a step would send. With --items, no dataset is needed.
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
    gpu_gib: float = 80.0
    """Memory of a GPU in GiB."""
    items: float = 0
    """Items, such as 1e9, where there is no dataset yet."""
    users: float = 0
    """With --items: number of users."""
    rows: tuple[str, ...] = ()
    """With --items: further tables of items, as NAME=ROWS."""
    history: float = 0
    """With --items: mean length of a history; the most when 0."""

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
    from logitmix.trainer.parallel.plan import Devices

    require(arguments.gpu_gib > 0, "--gpu-gib", arguments.gpu_gib, "above 0")
    per_host = arguments.per_host or min(arguments.world_size, 8)
    memory = int(arguments.gpu_gib * 2**30) if arguments.device == "cuda" else None
    devices = Devices(arguments.world_size, per_host, arguments.device, memory)
    plan = plan_job(config, devices, arguments.imagined())
    arguments.tell(dataclasses.asdict(plan), plan.text())


@dataclass(frozen=True)
class JobPlan:
    """What `plan` prints, as text or JSON."""

    dataset: str
    users: int
    items: int
    devices: "Devices"
    tables: "Mapping[str, TablePlan]"
    table_bytes: tuple[int, ...]
    """By rank: its rows with their optimizers' state and moving averages."""
    tower_parameters: int
    tower_bytes: int
    """On each rank: the tower with its gradients, its optimizer's state and its moving average."""
    averaged: bool
    """Whether there are moving averages (train.ema)."""
    batch_bytes: int
    """On each rank at most: the rows of a batch and of the next one, and gradients."""
    traffic: "Mapping[str, Traffic]"
    """Of a step's rows, by their precision: the same in both directions, or else as configured."""
    dense_bytes: int
    """Of the tower's gradients, which a step sums over the ranks."""

    def text(self) -> str:
        """Lines as those that training begins with."""
        from logitmix.trainer.parallel.plan import binary_size, with_plan

        devices = self.devices
        parameters = sum(table.rows * table.dim for table in self.tables.values())
        held = list(dict.fromkeys(binary_size(count) for count in (min(self.table_bytes), max(self.table_bytes))))
        room = f" of {devices.bytes / 2**30:,g} GiB" if devices.bytes else ""
        averages = "both with moving averages; " if self.averaged else ""
        block = {
            "dataset": f"{self.dataset}: {self.users:,} users, {self.items:,} items",
            "parameters": f"{parameters:,} in tables, {self.tower_parameters:,} in the tower",
            "ranks": f"{devices.world_size} on {devices.kind}, {devices.per_host} on each host",
            "memory": f"on each rank{room}: tables with their optimizers {' to '.join(held)}, tower with gradients and "
            f"optimizer {binary_size(self.tower_bytes)}, rows of two batches {binary_size(self.batch_bytes)};",
            "": f"{averages}activations come on top",
            "wire": f"ids, rows and gradients that a rank sends in a step: {', '.join(map(self._sent, self.traffic))};",
            " ": f"gradients of the tower to be summed: {binary_size(self.dense_bytes)}",
        }
        return with_plan(block, self.tables)

    def _sent(self, wire: str) -> str:
        from logitmix.trainer.parallel.plan import binary_size

        of, W = self.traffic[wire], self.devices.world_size
        between = f" ({binary_size(of.between_hosts // W)} to other hosts)" if self.devices.per_host < W else ""
        return f"{binary_size((of.ids + of.forward + of.backward) // W)} with {wire}{between}"


def plan_job(config: Config, devices: "Devices", imagined: Imagined | None = None) -> JobPlan:
    """The plan of a run on these devices, with the dataset of the configuration or one of the imagined sizes.

    Raises ValueError for no dataset, settings that the devices do not support, and tables that they have no room for.
    """
    import torch

    from logitmix.trainer.data.dataset import load_dataset
    from logitmix.trainer.parallel.optimizer import bytes_per_weight
    from logitmix.trainer.parallel.parallelize import model_schema, unsharded
    from logitmix.trainer.parallel.plan import bytes_by_rank, describe, plan_tables
    from logitmix.trainer.parallel.traffic import expected_ids, rows_sent, traffic

    require(devices.world_size >= 1, "--world-size", devices.world_size, "at least 1")
    whole_hosts = devices.per_host >= 1 and devices.world_size % devices.per_host == 0
    require(whole_hosts, "--per-host", devices.per_host, f"a divisor of the {devices.world_size} ranks")
    if imagined:
        named = [feature.name for feature in imagined.schema.features[1:]]
        config = replace(config, model=replace(config.model, features=(*config.model.features, *named)))
        schema, name, users = imagined.schema, "imagined", imagined.schema.users
        length = imagined.history or config.model.encoder.max_length
        sequences = -(-config.train.batch_size // devices.world_size)
        ids: list[Mapping[str, Tensor | Bags]] = [
            expected_ids(model_schema(schema, config), config.model.loss, sequences, length)
        ] * devices.world_size
    else:
        dataset = load_dataset(config.data.path)
        schema, name, users = dataset.schema, dataset.name, dataset.num_users
        ids = first_ids(config, dataset, devices.world_size)
    model, tables = unsharded(schema, config, torch.device(devices.kind))
    plan = describe(plan_tables(tables, config, devices), tables, config)
    weights = sum(weight.numel() for weight in model.tower.parameters())
    rows = rows_sent(ids, plan, devices.per_host)
    wires = {of: replace(config.comm, forward=of, backward=of) for of in ("fp8", "fp16", "fp32")}
    if config.comm.forward != config.comm.backward:
        wires = {f"{config.comm.forward} and {config.comm.backward} back": config.comm, **wires}
    return JobPlan(
        dataset=name,
        users=users,
        items=schema.num_items,
        devices=devices,
        tables=plan,
        table_bytes=tuple(bytes_by_rank(plan, devices.world_size)),
        tower_parameters=weights,
        tower_bytes=weights * bytes_per_weight(config),
        averaged=config.train.ema > 0,
        batch_bytes=max(_batch_bytes(of_rank, plan) for of_rank in ids),
        traffic={wire: traffic(rows, of) for wire, of in wires.items()},
        dense_bytes=weights * (2 if config.comm.dense == "bf16" else 4),
    )


def first_ids(config: Config, dataset: "Dataset", world_size: int) -> "list[Mapping[str, Tensor | Bags]]":
    """The ids that the first step's batch names, rank by rank."""
    import torch

    from logitmix.comm.process_group import Ranks
    from logitmix.trainer.loop import training_batches

    device = torch.device("cpu")
    batches = training_batches(config, dataset, Ranks(0, world_size, 0, device, None))  # type: ignore[arg-type]
    found = []
    for rank in range(world_size):
        batches.rank = rank
        found.append(batches.at(0).ids)
    return found


def _batch_bytes(ids: "Mapping[str, Tensor | Bags]", plan: "Mapping[str, TablePlan]") -> int:
    """Rows as received and as leaves of the graph, of two batches, and the gradients of one."""
    from logitmix.modules.batch import Bags

    rows = {name: len(of.offsets) - 1 if isinstance(of, Bags) else len(of) for name, of in ids.items()}
    return sum(5 * 4 * rows[name] * table.dim for name, table in plan.items())
