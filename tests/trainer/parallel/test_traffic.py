"""The bytes that a plan foresees are those that a step of the job sends, on two ranks and on four."""

import os
from pathlib import Path

import torch
import two_ranks
from small_data import small_config, write_dataset
from torch import Tensor

from logitmix.comm.process_group import process_group
from logitmix.trainer.commands.plan import first_batches
from logitmix.trainer.config import Config
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.loop import parallel_model, training_batches
from logitmix.trainer.parallel.replicas import SUFFIX
from logitmix.trainer.parallel.traffic import ID_BYTES, rows_sent, traffic

SETTINGS = {"model.features": ["all"], "tables.tags.pooled": True, "tables.brand.sharding": "row_wise"}
SHARDINGS = ("row_wise", "table_wise", "column_wise")


GROUPS = {"tables.group_size": 2, "comm.backward": "fp8"}


def configs(folder: Path) -> list[Config]:
    wires = ({"comm.forward": "fp8", "comm.backward": "fp16"}, {"comm.forward": "fp32", "comm.backward": "fp8"})
    return [
        small_config(folder, SETTINGS | wire | {"tables.sharding": sharding})
        for sharding in SHARDINGS
        for wire in wires
    ] + [small_config(folder, SETTINGS | GROUPS | {"tables.sharding": sharding}) for sharding in SHARDINGS]


def counted(folder: Path) -> list[Tensor]:
    """Bytes of this rank's first step, forward, backward and to peers; and those foreseen."""
    found = []
    os.environ.update(LOCAL_WORLD_SIZE="2", GLOO_SOCKET_IFNAME="lo")
    dataset = load_dataset(folder)
    with process_group("cpu", 60) as ranks:
        for config in configs(folder):
            model = parallel_model(config, dataset.schema, ranks)
            exchange = model.row_exchange(training_batches(config, dataset, ranks).at(0).ids)
            exchange.send_rows()
            rows = exchange.wait()
            torch.stack([row_VD.sum() for row_VD in rows.values()]).sum().backward()
            model.table_optimizers.begin_step(1.0)
            exchange.send_gradients()
            exchange.apply_gradients()
            counts = model.wire.pop_counts()[..., 0]
            to_peers = torch.tensor([name.endswith(SUFFIX) for name in model.wire.tables])
            crossed = torch.cat([counts[~to_peers].sum(0), counts[to_peers].sum(0)[1:]])
            found.append(torch.stack([crossed, torch.tensor(foreseen(config, folder, model.plan, ranks.world_size))]))
    return found


def foreseen(config: Config, folder: Path, plan: dict, world_size: int) -> tuple[float, float, float]:
    ids = [batch.ids for batch in first_batches(config, load_dataset(folder), world_size)]
    size = config.tables.ranks_of_group(world_size)
    rows = rows_sent(ids, plan, per_host=2, group_size=size)
    of = traffic(rows, config.comm)
    assert 0 < of.between_hosts < of.total
    assert (of.peers > 0) == (size < world_size)
    if of.peers:
        # Groups are hosts.
        assert of.between_hosts == of.peers
    ids_to_peers = ID_BYTES * sum(int(sent_W.sum()) for crossing, (sent_W, _) in rows.items() if crossing.to_peers)
    return float(of.forward), float(of.backward), float(of.peers - ids_to_peers)


def test_bytes_are_those_that_ranks_count(tmp_path: Path) -> None:
    write_dataset(tmp_path, features=True)
    for ranks in zip(*two_ranks.run(counted, tmp_path, world_size=4), strict=True):
        expected = ranks[0][1]
        assert torch.equal(torch.stack([of_rank[0] for of_rank in ranks]).sum(0), expected.double()) and expected[0] > 0
