"""TorchRec's sharded modules on several ranks, against the unsharded tables and the concatenated batch.

The reference cuts the tables as the plan does and rounds each piece where it would cross the wire. Weights and
gradients are dyadic: their sums are exact in any order.
"""

import copy
import itertools
import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import two_ranks
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingType

from logitmix.comm.codec import DIRECTIONS, Segment
from logitmix.comm.config import WireConfig
from logitmix.comm.exchange import QUALITY, Exchange, RowSpan, Wire, stacked
from logitmix.comm.fp8 import BACKWARD_FP8, FORWARD_FP8, SCALE_BYTES, dequantize_rowwise, quantize_rowwise
from logitmix.comm.hooks import attach
from logitmix.comm.process_group import Ranks, process_group

ROWS = 20
FUSED = EmbeddingComputeKernel.FUSED.value


@dataclass(frozen=True)
class Layout:
    """Tables of these dimensions, and where TorchRec is told to put them."""

    pooled: bool
    dims: tuple[int, ...]
    placements: tuple[tuple[str, tuple[int, ...]], ...]
    twice: bool = False
    """Rows are rounded within a node and again between nodes."""


LAYOUTS = {
    "EC row_wise": Layout(False, (64, 64), (("row_wise", ()),) * 2),
    "EC table_wise": Layout(False, (64, 64, 64), (("table", (0,)), ("table", (1,)), ("table", (1,)))),
    "EC all on one rank": Layout(False, (64, 64), (("table", (0,)),) * 2),
    "EC column_wise": Layout(False, (64, 64), (("column", (0, 1)), ("column", (1, 0)))),
    "EC columns twice on a rank": Layout(False, (60, 60), (("column", (0, 1, 1)),) * 2),
    "EC rows and columns": Layout(False, (64, 64, 64), (("row_wise", ()), ("column", (0, 1)), ("table", (0,)))),
    "EBC table_wise": Layout(True, (64, 4, 100), (("table", (0,)), ("table", (1,)), ("table", (1,)))),
    "EBC all on one rank": Layout(True, (64, 48), (("table", (1,)),) * 2),
    "EBC column_wise": Layout(True, (64, 40, 96), (("column", (0, 1)), ("column", (1, 0)), ("column", (0, 1, 1)))),
    "EBC table_column_wise": Layout(True, (64, 12), (("table_column", (0, 1)), ("table_column", (1, 0)))),
    "EBC row_wise": Layout(True, (64, 4, 100), (("row_wise", ()),) * 3),
    "EBC table_row_wise": Layout(True, (64, 4), (("table_row", (0,)),) * 2),
    "EBC grid": Layout(True, (256, 256), (("grid", (0, 0)),) * 2),
    "EBC all kinds": Layout(
        True, (64, 4, 12, 8), (("row_wise", ()), ("table", (1,)), ("column", (1, 0)), ("data", ()))
    ),
}
NODES = {
    "EBC table_row_wise": Layout(
        True, (64, 4, 12), (("table_row", (0,)), ("table_row", (1,)), ("table_row", (1,))), twice=True
    ),
    "EBC grid": Layout(True, (256, 256), (("grid", (0, 1)), ("grid", (1, 0))), twice=True),
}
"""On two nodes of two ranks."""
PAIRS: list[tuple[str, str]] = [("fp32", "fp32"), ("fp8", "fp8"), ("bf16", "bf16"), ("fp16", "fp8"), ("fp8", "fp32")]
# Users of each rank, whether each rank has any ids, and how many of the rows are asked for.
BATCHES = {
    "ragged": ((3, 3, 3, 3), (True, True, True, True), ROWS),
    "empty on rank 1": ((3, 3, 3, 3), (True, False, True, True), ROWS),
    "rows of rank 0 only": ((3, 3, 3, 3), (True, True, True, True), ROWS // 4),
    "unequal": ((2, 5, 1, 4), (True, True, True, True), ROWS),
}
BYTES = {
    "fp32": lambda width: 4 * width,
    "bf16": lambda width: 2 * width,
    "fp16": lambda width: 2 * width,
    "fp8": lambda width: width + SCALE_BYTES,
}


def unsharded(layout: Layout) -> Any:
    configs: list[Any] = [
        (EmbeddingBagConfig if layout.pooled else EmbeddingConfig)(
            name=f"t{i}", num_embeddings=ROWS, embedding_dim=dim, feature_names=[f"f{i}"]
        )
        for i, dim in enumerate(layout.dims)
    ]
    module = EmbeddingBagCollection(tables=configs) if layout.pooled else EmbeddingCollection(tables=configs)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(dyadic(weight.shape, generator))
    return module


def dyadic(shape: Any, generator: torch.Generator) -> Tensor:
    """Within ±1, on the grid of 2^-10, rows on levels of their own."""
    levels = torch.randint(0, 5, (*shape[:-1], 1), generator=generator)
    return torch.randint(-64, 65, shape, generator=generator) / 64 * 2.0**-levels


def placement(kind: str, ranks: tuple[int, ...]) -> Any:
    return {
        "row_wise": lambda: row_wise(),
        "table": lambda: table_wise(rank=ranks[0]),
        "column": lambda: column_wise(ranks=list(ranks)),
        "table_column": lambda: column_wise(ranks=list(ranks)),
        "table_row": lambda: table_row_wise(host_index=ranks[0]),
        "grid": lambda: grid_shard(host_indexes=list(ranks)),
        "data": lambda: data_parallel(),
    }[kind]()


def shard(layout: Layout, module: Any, wire: WireConfig, ranks: Ranks, local_size: int = 2) -> tuple[Any, Any, Wire]:
    sharder_type: Any = EmbeddingBagCollectionSharder if layout.pooled else EmbeddingCollectionSharder
    os.environ["LOCAL_WORLD_SIZE"] = str(local_size)
    plan = construct_module_sharding_plan(
        module,
        {f"t{i}": placement(*where) for i, where in enumerate(layout.placements)},
        sharder_type(),
        local_size=local_size,
        world_size=ranks.world_size,
        device_type="cpu",
    )
    for parameter, (kind, _) in zip(plan.values(), layout.placements, strict=True):
        if kind != "data":
            parameter.compute_kernel = FUSED
        if kind == "table_column":
            # The same cuts, all on one node; TorchRec has no other words for it in a plan made by hand.
            parameter.sharding_type = ShardingType.TABLE_COLUMN_WISE.value
    sharder = sharder_type(fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 1.0})
    env = ShardingEnv.from_process_group(ranks.group)
    sharded = sharder.shard(copy.deepcopy(module), plan, env, ranks.device)
    return sharded, plan, attach(sharded, wire)


def batch_of(layout: Layout, name: str, rank: int) -> KeyedJaggedTensor:
    users, any_ids, rows = BATCHES[name]
    generator = torch.Generator().manual_seed(10 + rank)
    lengths = torch.randint(0, 5, (len(layout.dims) * users[rank],), generator=generator) * any_ids[rank]
    values = torch.randint(0, rows, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(keys=[f"f{i}" for i in range(len(layout.dims))], values=values, lengths=lengths)


def features_of(output: Any, layout: Layout) -> list[Tensor]:
    """Per feature what crossed the wire: [positions, D], or [users, D] where pooled."""
    if hasattr(output, "wait"):
        output = output.wait()
    return [output[f"f{i}"] if layout.pooled else output[f"f{i}"].values() for i in range(len(layout.dims))]


class Through(torch.autograd.Function):
    """Rows as the wire delivers them, and their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wire: WireConfig) -> Tensor:
        ctx.backward_precision = wire.backward
        return rounded(x, wire.forward, FORWARD_FP8)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return rounded(gradient, ctx.backward_precision, BACKWARD_FP8), None


def rounded(x: Tensor, precision: str, fp8: torch.dtype) -> Tensor:
    if precision == "fp32":
        return x.clone()
    if precision == "fp8":
        return dequantize_rowwise(quantize_rowwise(x, fp8), fp8, [x.shape[1]])
    return x.to({"bf16": torch.bfloat16, "fp16": torch.float16}[precision]).float()


def windows_of(parameter: Any) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """For each range of columns, the ranges of rows that its owners hold."""
    cuts: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for part in parameter.sharding_spec.shards if parameter.sharding_spec else []:
        (row, column), (rows, columns) = part.shard_offsets, part.shard_sizes
        cuts.setdefault((column, columns), []).append((row, rows))
    return cuts


def expected_features(layout: Layout, weights: list[Tensor], plan: Any, batch: Any, wire: WireConfig) -> list[Tensor]:
    features = []
    for table, (weight, parameter) in enumerate(zip(weights, plan.values(), strict=True)):
        asked = batch[f"f{table}"]
        bag = torch.repeat_interleave(torch.arange(len(asked.lengths())), asked.lengths())
        places, count = (bag, len(asked.lengths())) if layout.pooled else (torch.arange(len(bag)), len(bag))
        pieces = []
        for (column, columns), cuts in windows_of(parameter).items():
            parts = []
            for row, rows in cuts:
                mine = (asked.values() >= row) & (asked.values() < row + rows)
                looked_up = weight[asked.values()[mine], column : column + columns]
                part = torch.zeros(count, columns).index_add(0, places[mine], looked_up)
                parts.append(Through.apply(part, wire))
            whole = torch.stack(parts).sum(0)
            pieces.append(Through.apply(whole, wire) if layout.twice else whole)
        plain = torch.zeros(count, weight.shape[1]).index_add(0, places, weight[asked.values()])
        features.append(torch.cat(pieces, 1) if pieces else plain)
    return features


def worst(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual - expected).detach().abs().max()) if actual.numel() else 0.0


def bytes_sent(layout: Layout, plan: Any, batch: str, wire: WireConfig, world_size: int) -> Tensor:
    """Counted from the plan and the ids, for both ranks together: [tables, 2 directions, bytes and FP32 bytes]."""
    counts = torch.zeros(len(layout.dims), 2, 2, dtype=torch.float64)
    for table, parameter in enumerate(plan.values()):
        shards = parameter.sharding_spec.shards if parameter.sharding_spec else []
        for owner, part in zip(parameter.ranks or [], shards, strict=False):
            (row, _), (rows, columns) = part.shard_offsets, part.shard_sizes
            for asker in set(range(world_size)) - {owner}:
                ids = batch_of(layout, batch, asker)[f"f{table}"]
                owned = (ids.values() >= row) & (ids.values() < row + rows)
                crossing = ids.lengths().numel() if layout.pooled else int(owned.sum())
                for i, precision in enumerate((wire.forward, wire.backward)):
                    counts[table, i] += torch.tensor([BYTES[precision](columns) * crossing, 4 * columns * crossing])
    return counts


def local_shards(sharded: Any, layout: Layout) -> list[tuple[int, Any]]:
    state = sharded.state_dict()
    prefix = next(iter(state)).split(".")[0]
    tables = [i for i, (kind, _) in enumerate(layout.placements) if kind != "data"]
    return [(table, part) for table in tables for part in state[f"{prefix}.t{table}.weight"].local_shards()]


def window(full: Tensor, part: Any) -> Tensor:
    (row, column), (rows, columns) = part.metadata.shard_offsets, part.metadata.shard_sizes
    return full[row : row + rows, column : column + columns]


def load(sharded: Any, module: Any, layout: Layout) -> list[Tensor]:
    """The unsharded weights, which the shards now hold too."""
    weights = [weight.detach().clone().requires_grad_() for weight in module.parameters()]
    with torch.no_grad():
        for table, part in local_shards(sharded, layout):
            part.tensor.copy_(window(weights[table], part))
        for name, parameter in sharded.named_parameters():
            table = next(i for i in range(len(weights)) if f".t{i}." in name)
            if layout.placements[table][0] == "data":
                parameter.view_as(weights[table]).copy_(weights[table])
    return weights


def train_one(
    layout: Layout, batch: str, wire: WireConfig, module: Any, sharded: Any, plan: Any, ranks: Ranks
) -> dict[str, float]:
    """One SGD step at rate 1 on both sides; the largest deviations."""
    weights = load(sharded, module, layout)
    others = range(ranks.world_size)
    generators = [torch.Generator().manual_seed(20 + rank) for rank in others]
    told = [expected_features(layout, weights, plan, batch_of(layout, batch, rank), wire) for rank in others]
    exact = features_of(module(batch_of(layout, batch, ranks.rank)), layout)
    gradients = [[dyadic(x.shape, generators[rank]) for x in told[rank]] for rank in others]

    output = features_of(sharded(batch_of(layout, batch, ranks.rank)), layout)
    sum((x * g).sum() for x, g in zip(output, gradients[ranks.rank], strict=True)).backward()

    # What TorchRec's ranks apply: the ranks' sum divided by their number.
    loss = sum((x * g).sum() for rank in others for x, g in zip(told[rank], gradients[rank], strict=True))
    table_gradients = torch.autograd.grad(loss + 0 * sum(weight.sum() for weight in weights), weights)
    steps = [(window(weights[t], part) - part.tensor, t, part) for t, part in local_shards(sharded, layout)]
    mine = told[ranks.rank]
    return {
        "values": max(worst(x, y) for x, y in zip(output, mine, strict=True)),
        "rounding": max(worst(x, y) for x, y in zip(output, exact, strict=True)),
        "gradients": max(
            (worst(step, window(table_gradients[t], part) / ranks.world_size) for step, t, part in steps), default=0.0
        ),
        "gradient size": max((float(step.abs().max()) for step, _, _ in steps), default=0.0),
    }


def sampled(ranks: Ranks) -> dict[str, Tensor]:
    """Two tables on one rank, one of which holds what FP8 cannot."""
    layout = LAYOUTS["EC all on one rank"]
    module = unsharded(layout)
    with torch.no_grad():
        second = list(module.parameters())[1]
        second[:, 0], second[:, 1] = 3.4e38, 1.0
    sharded, _, wire = shard(layout, module, WireConfig("fp8", "fp8"), ranks)
    load(sharded, module, layout)
    results = {}
    for step, sampling in enumerate((False, True)):
        wire.begin_step(step, sampling=sampling)
        output = features_of(sharded(batch_of(layout, "ragged", ranks.rank)), layout)
        (output[0].sum() + 0.0 * output[1].sum()).backward()
        results[str(sampling)] = wire.pop_counts()
    return results


def rounded_by_each() -> tuple[Tensor, Tensor]:
    """One and the same gradient of this rank's rows [4, 64], as each of both ranks has rounded it at random."""
    gradient_RD = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).repeat(2, 1)
    row_RD, end = torch.zeros(8, 64, requires_grad=True), stacked([[RowSpan(4, (Segment("a", 64),))]] * 2)
    with process_group("cpu", 60) as ranks:
        wire = Wire(WireConfig(backward="fp8_stochastic"))
        wire.begin_step(1)
        Exchange(wire, ranks.group, end, end, (8, 64)).start(row_RD).wait().backward(gradient_RD)
    assert row_RD.grad is not None
    from_first, from_second = row_RD.grad.split(4)
    return from_first, from_second


def work() -> dict[str, Any]:
    """Some batches in FP8, and one with other pairs."""
    results: dict[str, Any] = {}
    with process_group("cpu", 60) as ranks:
        for (name, layout), (forward, backward) in itertools.product(LAYOUTS.items(), PAIRS):
            wire, module = WireConfig(forward, backward), unsharded(layout)
            sharded, plan, counts = shard(layout, module, wire, ranks)
            for batch in BATCHES if (forward, backward) == ("fp8", "fp8") else ["ragged"]:
                errors = train_one(layout, batch, wire, module, sharded, plan, ranks)
                expected = bytes_sent(layout, plan, batch, wire, 2)
                results[f"{name} {forward} {backward} {batch}"] = (errors, _by_table(counts, layout), expected)
        results["sampled"] = sampled(ranks)
    return results


def _by_table(wire: Wire, layout: Layout) -> Tensor:
    counts, named = wire.pop_counts(), dict(zip(wire.tables, range(len(wire.tables)), strict=True))
    nothing = torch.zeros(2, 2, dtype=torch.float64)
    return torch.stack(
        [counts[named[f"t{i}"], :, :2] if f"t{i}" in named else nothing for i in range(len(layout.dims))]
    )


def work_over_nodes() -> dict[str, Any]:
    results: dict[str, Any] = {}
    with process_group("cpu", 60) as ranks:
        for name, layout in NODES.items():
            module, wire = unsharded(layout), WireConfig("fp8", "fp8")
            sharded, plan, _ = shard(layout, module, wire, ranks, local_size=2)
            for batch in BATCHES:
                results[f"{name} {batch}"] = train_one(layout, batch, wire, module, sharded, plan, ranks)
    return results


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return two_ranks.run(work)


@pytest.fixture(scope="module")
def over_nodes() -> list[dict[str, Any]]:
    return two_ranks.run(work_over_nodes, world_size=4)


@pytest.mark.parametrize("pair", PAIRS, ids="/".join)
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_sharding_rounds_and_counts_what_crosses_and_nothing_else(
    results: list[dict[str, Any]], name: str, pair: tuple[str, str]
) -> None:
    cases = [case for case in results[0] if case.startswith(f"{name} {' '.join(pair)} ")]
    assert cases
    for case in cases:
        for errors, _, _ in (result[case] for result in results):
            assert errors["values"] <= 1e-6 and errors["gradients"] <= 1e-6, case
        assert torch.equal(sum(result[case][1] for result in results), results[0][case][2]), case


@pytest.mark.parametrize("name", NODES)
def test_sums_within_a_node_and_exchange_between_nodes(over_nodes: list[dict[str, Any]], name: str) -> None:
    for result, batch in itertools.product(over_nodes, BATCHES):
        assert result[f"{name} {batch}"]["values"] <= 1e-6, batch
        assert result[f"{name} {batch}"]["gradients"] <= 1e-6, batch
    assert max(result[f"{name} ragged"]["rounding"] for result in over_nodes) > 1e-3


@pytest.mark.parametrize("name", LAYOUTS)
def test_fp8_is_what_crosses_the_wire(results: list[dict[str, Any]], name: str) -> None:
    rounding = max(result[f"{name} fp8 fp32 ragged"][0]["rounding"] for result in results)
    assert 1e-3 < rounding < 2**-4 * 8
    assert max(result[f"{name} fp32 fp32 ragged"][0]["gradient size"] for result in results) > 0.1


def test_samples_are_told_apart_by_table_and_direction(results: list[dict[str, Any]]) -> None:
    assert not any(result["sampled"]["False"][..., 2:].any() for result in results)
    total = sum(result["sampled"]["True"][..., 2:] for result in results)
    (first, second) = (
        {d: dict(zip(QUALITY, row, strict=True)) for d, row in zip(DIRECTIONS, t, strict=True)} for t in total.tolist()
    )
    assert 1e-5 < first["forward"]["squared_error"] / first["forward"]["squares"] < 2**-8
    # Beside 3.4e38, which BF16's scale cannot hold, everything else vanishes; gradients are all 1, or all 0.
    assert second["forward"]["squares"] > 1e76
    assert first["backward"]["squared_error"] == second["backward"]["squares"] == 0


def test_ranks_round_at_random_independently() -> None:
    """With one seed for all, the errors of the ranks' gradients would add up instead of averaging out."""
    for first, second in two_ranks.run(rounded_by_each):
        # Both round the same numbers, each up or down: half of the inexact ones differently.
        assert (first != second).float().mean() > 0.2
        torch.testing.assert_close(first, second, rtol=0.5, atol=1e-3)


def test_exchanges_of_a_step_round_at_random_independently() -> None:
    """Of a step repeated, as after a restart, each exchange rounds as before."""
    wire, found = Wire(WireConfig(backward="fp8_stochastic"), seed=1), []
    for step in (1, 2, 1):
        wire.begin_step(step)
        found.append([wire.next_seed("backward", rank=0) for _ in range(3)])
    assert len({*found[0], *found[1]}) == 6 and found[2] == found[0]
    assert wire.next_seed("forward", rank=0) is None


def test_rounding_does_not_depend_on_what_is_sampled() -> None:
    """Only samples need the rows of several tables apart: logging more often must not change a run."""
    apart = [RowSpan(3, (Segment("a", 8),)), RowSpan(0, (Segment("b", 8),)), RowSpan(5, (Segment("c", 8),))]
    gradient_RD, arrived = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)), []
    with process_group("cpu", 60) as ranks:
        wire = Wire(WireConfig(backward="fp8_stochastic", emulate=True))
        for runs in (apart, [RowSpan(8, (Segment("a", 8),))]):
            wire.begin_step(1)
            row_RD = torch.zeros(8, 8, requires_grad=True)
            exchange = Exchange(wire, ranks.group, stacked([runs]), stacked([runs]), (8, 8))
            exchange.start(row_RD).wait().backward(gradient_RD)
            arrived.append(row_RD.grad)
    assert torch.equal(*arrived) and not torch.equal(arrived[0], gradient_RD)


def test_what_is_not_sharded_is_refused() -> None:
    with pytest.raises(ValueError, match="no table of the model is sharded"):
        attach(nn.Linear(1, 1), WireConfig())
