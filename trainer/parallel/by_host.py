"""Where pooled tables lie that are divided among the ranks of a host: table_row_wise and grid.

The ranks of a host add their parts of a bag's sum before it leaves the host, so that a bag's row crosses the network
once, and not once for each rank that holds rows. TorchRec's planner does not place them on CPU, so these rules do.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torchrec.distributed import sharding_plan
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ParameterSharding, ShardingType

from logitmix.modules.embeddings import EmbeddingTable, embedding_collections, torchrec_name

DIVIDED_BY_HOST = ("table_row_wise", "grid_shard")
"""The shardings, as TorchRec's plans name them."""


def plan_by_host(
    tables: Sequence[EmbeddingTable],
    shardings: Mapping[str, str],
    sizes: Mapping[str, int],
    hosts: int,
    per_host: int,
    kind: str,
) -> dict[str, ParameterSharding]:
    """Returns the places of these tables, of `sizes` bytes, with the `shardings` table_row_wise and grid, on `hosts` of
    `per_host` ranks each. A table_row_wise table takes the host that holds the fewest bytes of such tables, the largest
    first. ValueError for tables with too few rows or columns."""
    plans: dict[str, ParameterSharding] = {}
    held = [0] * hosts
    for table in sorted(tables, key=lambda table: -sizes[table.name]):
        name = table.name
        if (per_host - 1) * -(-table.rows // per_host) >= table.rows:
            raise ValueError(
                f"table {name} has {table.rows:,} rows, too few for the {per_host} ranks of a host; set "
                f"tables.{name}.sharding to table_wise"
            )
        if shardings[name] == "grid":
            if table.dim % (4 * hosts):
                raise ValueError(
                    f"table {name} has {table.dim} columns, which {hosts} hosts cannot share in fours; set "
                    f"tables.{name}.sharding to table_row_wise, or tables.{name}.dim to a multiple of {4 * hosts}"
                )
            place = _grid(hosts)
        else:
            host = held.index(min(held))
            held[host] += sizes[name]
            place = sharding_plan.table_row_wise(host_index=host)
        (module,) = embedding_collections([table]).values()
        found = sharding_plan.construct_module_sharding_plan(
            module,
            {torchrec_name(name): place},
            EmbeddingBagCollectionSharder(),
            local_size=per_host,
            world_size=hosts * per_host,
            device_type=kind,
        )
        plans[name] = found[torchrec_name(name)]
    return plans


def _grid(hosts: int) -> Callable[..., ParameterSharding]:
    """Equal columns for each host; TorchRec's own grid_shard gives them by 128."""

    def place(weight: Tensor, per_host: int, _: int, kind: str, sharder: Any) -> ParameterSharding:
        rows, columns = weight.shape
        block, width = -(-rows // per_host), columns // hosts
        shards = [
            ([min(block, rows - rank * block), width], [rank * block, host * width], host * per_host + rank)
            for host in range(hosts)
            for rank in range(per_host)
        ]
        return sharding_plan._get_parameter_sharding(
            weight, ShardingType.GRID_SHARD.value, shards, per_host, kind, sharder
        )

    return place
