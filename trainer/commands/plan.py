"""`logitmix plan`: where a job's tables would be placed and what its ranks would hold, without the job's machines."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from logitmix.common.mappings import require
from logitmix.trainer.config import Config
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.parallel.optimizer import bytes_per_weight
from logitmix.trainer.parallel.parallelize import unsharded
from logitmix.trainer.parallel.plan import (
    Devices,
    TablePlan,
    bytes_by_rank,
    describe,
    mebibytes,
    plan_tables,
    with_plan,
)


@dataclass(frozen=True)
class JobPlan:
    """What `plan` prints, as text or JSON."""

    dataset: str
    users: int
    items: int
    devices: Devices
    tables: Mapping[str, TablePlan]
    table_bytes: tuple[int, ...]
    """By rank: its rows with their optimizers' state and moving averages."""
    tower_parameters: int
    tower_bytes: int
    """The same on each rank: the tower with its gradients, its optimizer's state and its moving average."""
    averaged: bool
    """Whether there are moving averages (train.ema)."""

    def text(self) -> str:
        """Lines as those that training begins with."""
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


def plan_job(config: Config, devices: Devices) -> JobPlan:
    """The plan of a run on these devices.

    Raises ValueError for no dataset, settings that the devices do not support, and tables that they have no room for.
    """
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
