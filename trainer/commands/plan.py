"""`logitmix plan`: where a job's tables would be placed and what its ranks would hold, without the job's machines."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from logitmix.common.mappings import require
from logitmix.trainer.commands.options import JSONOption
from logitmix.trainer.commands.recipe import of_recipe
from logitmix.trainer.config import Config

if TYPE_CHECKING:
    from logitmix.trainer.parallel.plan import Devices, TablePlan

USAGE = """\
usage: logitmix plan RECIPE [--world-size N] [--per-host N] [--device cuda|cpu] [--gpu-gib GIB] [--json]
                            [--section.field VALUE ...]

It places the tables as `logitmix train` with the same settings would, without starting anything, and prints what each
rank would hold; logitmix plan RECIPE --help lists the sections of settings"""


@dataclass(frozen=True)
class Arguments(JSONOption, Config):
    """Where the tables of a job would be placed, and the memory that each rank would need, without its machines."""

    world_size: int = 8
    """Ranks of the job."""
    per_host: int = 0
    """Ranks of each host; all, but 8 at most, when 0."""
    device: Literal["cuda", "cpu"] = "cuda"
    """What the ranks run on."""
    gpu_gib: float = 80.0
    """Memory of a GPU in GiB."""


def run(words: list[str]) -> None:
    arguments, config, _ = of_recipe(Arguments, "plan", words, USAGE)
    from logitmix.trainer.parallel.plan import Devices

    require(arguments.gpu_gib > 0, "--gpu-gib", arguments.gpu_gib, "above 0")
    per_host = arguments.per_host or min(arguments.world_size, 8)
    memory = int(arguments.gpu_gib * 2**30) if arguments.device == "cuda" else None
    plan = plan_job(config, Devices(arguments.world_size, per_host, arguments.device, memory))
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

    def text(self) -> str:
        """Lines as those that training begins with."""
        from logitmix.trainer.parallel.plan import mebibytes, with_plan

        devices = self.devices
        parameters = sum(table.rows * table.dim for table in self.tables.values())
        held = list(dict.fromkeys(mebibytes(count) for count in (min(self.table_bytes), max(self.table_bytes))))
        room = f" of {devices.bytes / 2**30:,g} GiB" if devices.bytes else ""
        averages = "both with moving averages; " if self.averaged else ""
        block = {
            "dataset": f"{self.dataset}: {self.users:,} users, {self.items:,} items",
            "parameters": f"{parameters:,} in tables, {self.tower_parameters:,} in the tower",
            "ranks": f"{devices.world_size} on {devices.kind}, {devices.per_host} on each host",
            "memory": f"on each rank{room}: tables with their optimizers {' to '.join(held)}, tower with gradients and "
            f"optimizer {mebibytes(self.tower_bytes)};",
            "": f"{averages}activations and the rows of a batch come on top",
        }
        return with_plan(block, self.tables)


def plan_job(config: Config, devices: "Devices") -> JobPlan:
    """The plan of a run on these devices.

    Raises ValueError for no dataset, settings that the devices do not support, and tables that they have no room for.
    """
    import torch

    from logitmix.trainer.data.dataset import load_dataset
    from logitmix.trainer.parallel.optimizer import bytes_per_weight
    from logitmix.trainer.parallel.parallelize import unsharded
    from logitmix.trainer.parallel.plan import bytes_by_rank, describe, plan_tables

    require(devices.world_size >= 1, "--world-size", devices.world_size, "at least 1")
    whole_hosts = devices.per_host >= 1 and devices.world_size % devices.per_host == 0
    require(whole_hosts, "--per-host", devices.per_host, f"a divisor of the {devices.world_size} ranks")
    dataset = load_dataset(config.data.path)
    model, tables = unsharded(dataset.schema, config, torch.device(devices.kind))
    plan = describe(plan_tables(tables, config, devices), tables, config)
    weights = sum(weight.numel() for weight in model.tower.parameters())
    return JobPlan(
        dataset=dataset.name,
        users=dataset.num_users,
        items=dataset.num_items,
        devices=devices,
        tables=plan,
        table_bytes=tuple(bytes_by_rank(plan, devices.world_size)),
        tower_parameters=weights,
        tower_bytes=weights * bytes_per_weight(config),
        averaged=config.train.ema > 0,
    )
