"""TorchRec's sharded modules on two ranks, against the unsharded module and the concatenated batch.

Weights and gradients are dyadic: sums are exact in any order, and what the wire rounds can be told exactly.
"""

import copy
import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import two_ranks
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingEnv

from logitmix.comm.config import Precision, WireConfig
from logitmix.comm.fp8 import roundtrip
from logitmix.comm.hooks import Fp8Codec, HalfCodec, WireBytes, WireCodec, WireMeter, codecs_registry, common_row_dim
from logitmix.comm.process_group import Ranks, process_group

ROWS = 20
RANKS = range(two_ranks.WORLD_SIZE)
FUSED = EmbeddingComputeKernel.FUSED.value
Shard = tuple[int, int, int, int, int, int]
"""Owner, table, first row, rows, first column, columns."""


@dataclass(frozen=True)
class Layout:
    pooled: bool
    dims: tuple[int, ...]
    placements: tuple[tuple[str, tuple[int, ...]], ...]
    row_dim: int


LAYOUTS = {
    "sequence row_wise": Layout(False, (64, 64), (("row_wise", ()),) * 2, 64),
    "sequence table_wise": Layout(False, (64, 64, 64), (("table", (0,)), ("table", (1,)), ("table", (1,))), 64),
    "sequence all on one rank": Layout(False, (64, 64), (("table", (0,)),) * 2, 64),
    "sequence column_wise": Layout(False, (64, 64), (("column", (0, 1)), ("column", (1, 0))), 32),
    "sequence columns twice on a rank": Layout(False, (64, 64), (("column", (0, 1, 1, 0)),) * 2, 16),
    "sequence rows and columns": Layout(
        False, (64, 64, 64), (("row_wise", ()), ("column", (0, 1)), ("table", (0,))), 32
    ),
    "pooled table_wise": Layout(True, (64, 32, 96), (("table", (0,)), ("table", (1,)), ("table", (1,))), 32),
    "pooled all on one rank": Layout(True, (64, 48), (("table", (1,)),) * 2, 16),
    "pooled column_wise": Layout(
        True, (64, 32, 96), (("column", (0, 1)), ("column", (1, 0)), ("column", (0, 1, 1))), 16
    ),
}
PAIRS: list[tuple[Precision, Precision]] = [
    ("fp32", "fp32"),
    ("fp8", "fp8"),
    ("bf16", "bf16"),
    ("fp16", "fp16"),
    ("fp32", "fp8"),
    ("fp8", "fp32"),
    ("bf16", "fp8"),
    ("fp8", "fp16"),
]
# Users of each rank, whether each rank has any ids, and how many of the rows are asked for.
BATCHES = {
    "ragged": ((3, 3), (True, True), ROWS),
    "empty on rank 1": ((3, 3), (True, False), ROWS),
    "empty on rank 0": ((3, 3), (False, True), ROWS),
    "empty": ((3, 3), (False, False), ROWS),
    "rows of rank 0 only": ((3, 3), (True, True), ROWS // 2),
    "unequal": ((2, 5), (True, True), ROWS),
}
BYTES_PER_ROW = {
    "fp32": lambda row: 4 * row,
    "bf16": lambda row: 2 * row,
    "fp16": lambda row: 2 * row,
    "fp8": lambda row: row + 4,
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


def dyadic(shape: Any, generator: torch.Generator) -> torch.Tensor:
    """Within ±1, on the grid of 2^-10, rows on levels of their own."""
    levels = torch.randint(0, 5, (*shape[:-1], 1), generator=generator)
    return torch.randint(-64, 65, shape, generator=generator) / 64 * 2.0**-levels


def placement(kind: str, ranks: tuple[int, ...]) -> Any:
    if kind == "row_wise":
        return row_wise(compute_kernel=FUSED)
    if kind == "table":
        return table_wise(rank=ranks[0], compute_kernel=FUSED)
    return column_wise(ranks=list(ranks), compute_kernel=FUSED)


def shard(
    layout: Layout, module: Any, wire: WireConfig, row_dim: int | None, ranks: Ranks
) -> tuple[Any, Any, WireMeter]:
    sharder_type: Any = EmbeddingBagCollectionSharder if layout.pooled else EmbeddingCollectionSharder
    plan = construct_module_sharding_plan(
        module,
        {f"t{i}": placement(*where) for i, where in enumerate(layout.placements)},
        sharder_type(),
        local_size=ranks.world_size,
        world_size=ranks.world_size,
        device_type="cpu",
    )
    meter = WireMeter(ranks.rank)
    sharder = sharder_type(
        fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 1.0},
        qcomm_codecs_registry=codecs_registry(wire, row_dim or common_row_dim(plan), meter),
    )
    env = ShardingEnv.from_process_group(ranks.group)
    return sharder.shard(copy.deepcopy(module), plan, env, ranks.device), plan, meter


def batch_of(layout: Layout, name: str, rank: int) -> KeyedJaggedTensor:
    users, any_ids, rows = BATCHES[name]
    generator = torch.Generator().manual_seed(10 + rank)
    lengths = torch.randint(0, 5, (len(layout.dims) * users[rank],), generator=generator) * any_ids[rank]
    values = torch.randint(0, rows, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(keys=[f"f{i}" for i in range(len(layout.dims))], values=values, lengths=lengths)


def features_of(output: Any, layout: Layout) -> list[torch.Tensor]:
    """Per feature what crossed the wire: [positions, D], or [users, D] where pooled."""
    if hasattr(output, "wait"):
        output = output.wait()
    return [output[f"f{i}"] if layout.pooled else output[f"f{i}"].values() for i in range(len(layout.dims))]


def error_bound(x: torch.Tensor, precision: Precision, fp8: tuple[float, float], row_dim: int) -> torch.Tensor:
    if precision == "fp32" or x.numel() == 0:
        return torch.zeros_like(x)
    if precision != "fp8":
        return x.abs() * (2**-8 if precision == "bf16" else 2**-11) + 2**-25
    rows = x.abs().view(-1, row_dim)
    return torch.maximum(fp8[0] * rows, fp8[1] * rows.amax(dim=1, keepdim=True)).view(x.shape)


def worst(actual: torch.Tensor, expected: torch.Tensor, allowed: torch.Tensor | float = 0.0) -> float:
    assert actual.shape == expected.shape
    excess = (actual - expected).abs() - allowed
    return float(excess.max()) if excess.numel() else 0.0


def table_gradients(module: Any, losses: list[torch.Tensor]) -> list[torch.Tensor]:
    """What TorchRec's ranks apply: the ranks' sum divided by their number."""
    weights = list(module.parameters())
    gradients = torch.autograd.grad(sum(losses) + 0 * sum(weight.sum() for weight in weights), weights)
    return [gradient / two_ranks.WORLD_SIZE for gradient in gradients]


def shards_of(plan: Any) -> list[Shard]:
    return [
        (owner, table, *(number for pair in zip(part.shard_offsets, part.shard_sizes, strict=True) for number in pair))
        for table, parameter in enumerate(plan.values())
        for owner, part in zip(parameter.ranks, parameter.sharding_spec.shards, strict=True)
    ]


def bytes_sent(layout: Layout, plan: Any, batch: str, rank: int, wire: WireConfig) -> WireBytes:
    """Counted from the plan and the ids: what one rank owes the other and gives back to it."""
    elements = {"forward": 0, "backward": 0}
    for owner, table, row, rows, _, columns in shards_of(plan):
        for asker in RANKS:
            ids = batch_of(layout, batch, asker)[f"f{table}"]
            owned = (ids.values() >= row) & (ids.values() < row + rows)
            count = ids.lengths().numel() if layout.pooled else int(owned.sum())
            if asker != owner:
                elements["forward"] += count * columns * (rank == owner)
                elements["backward"] += count * columns * (rank == asker)
    rows_sent = {direction: count // layout.row_dim for direction, count in elements.items()}
    return WireBytes(
        forward_bytes=rows_sent["forward"] * BYTES_PER_ROW[wire.forward](layout.row_dim),
        backward_bytes=rows_sent["backward"] * BYTES_PER_ROW[wire.backward](layout.row_dim),
        forward_fp32_bytes=elements["forward"] * 4,
        backward_fp32_bytes=elements["backward"] * 4,
    )


def local_shards(sharded: Any, tables: int) -> list[tuple[int, Any]]:
    state = sharded.state_dict()
    prefix = next(iter(state)).split(".")[0]
    return [(table, part) for table in range(tables) for part in state[f"{prefix}.t{table}.weight"].local_shards()]


def window(full: torch.Tensor, part: Any) -> torch.Tensor:
    (row, column), (rows, columns) = part.metadata.shard_offsets, part.metadata.shard_sizes
    return full[row : row + rows, column : column + columns]


def load(sharded: Any, module: Any) -> list[torch.Tensor]:
    """The unsharded weights, which the shards now hold too."""
    weights = [weight.detach() for weight in module.parameters()]
    for table, part in local_shards(sharded, len(weights)):
        part.tensor.copy_(window(weights[table], part))
    return weights


def train_one(
    layout: Layout, batch: str, wire: WireConfig, module: Any, sharded: Any, ranks: Ranks
) -> dict[str, float]:
    """One SGD step at rate 1 on both sides; the largest deviations."""
    weights = load(sharded, module)
    generators = [torch.Generator().manual_seed(20 + rank) for rank in RANKS]
    exact = [features_of(module(batch_of(layout, batch, rank)), layout) for rank in RANKS]
    gradients = [[dyadic(x.shape, generators[rank]) for x in exact[rank]] for rank in RANKS]

    output = features_of(sharded(batch_of(layout, batch, ranks.rank)), layout)
    sum((x * g).sum() for x, g in zip(output, gradients[ranks.rank], strict=True)).backward()

    def losses(change: Any) -> list[torch.Tensor]:
        return [(x * change(g)).sum() for rank in RANKS for x, g in zip(exact[rank], gradients[rank], strict=True)]

    mine = [x.detach() for x in exact[ranks.rank]]
    narrow = layout.row_dim
    plain = table_gradients(module, losses(lambda g: g))
    exact = [features_of(module(batch_of(layout, batch, rank)), layout) for rank in RANKS]
    told = table_gradients(module, losses(lambda g: received_gradient(g, wire.backward, narrow)))
    exact = [features_of(module(batch_of(layout, batch, rank)), layout) for rank in RANKS]
    limit = (2**-3, 2**-17 / 57344)
    slack = table_gradients(module, losses(lambda g: error_bound(g, wire.backward, limit, narrow)))
    steps = [(window(weights[t], part) - part.tensor, t, part) for t, part in local_shards(sharded, len(weights))]
    return {
        "values": max(worst(x, roundtrip(y, wire.forward, row_dim=narrow)) for x, y in zip(output, mine, strict=True)),
        "values beyond bound": max(
            worst(x, y, error_bound(y, wire.forward, (2**-4, 2**-10 / 448), narrow))
            for x, y in zip(output, mine, strict=True)
        ),
        "rounding": max(worst(x, y) for x, y in zip(output, mine, strict=True)),
        "gradients": max((worst(step, window(told[t], part)) for step, t, part in steps), default=0.0),
        "gradients beyond bound": max(
            (worst(step, window(plain[t], part), window(slack[t], part)) for step, t, part in steps), default=0.0
        ),
        "gradient size": max((float(step.abs().max()) for step, _, _ in steps), default=0.0),
    }


def received_gradient(gradient: torch.Tensor, precision: Precision, row_dim: int) -> torch.Tensor:
    x = torch.zeros_like(gradient, requires_grad=True)
    roundtrip(x, "fp32", precision, row_dim).backward(gradient)
    assert x.grad is not None
    return x.grad


def refusal(layout: Layout, row_dim: int | None, batch: str, ranks: Ranks) -> str:
    module = unsharded(layout)
    sharded, _, _ = shard(layout, module, WireConfig(), row_dim, ranks)
    try:
        features_of(sharded(batch_of(layout, batch, ranks.rank)), layout)
    except ValueError as error:
        return str(error)
    return "nothing"


def variable_batch(ranks: Ranks) -> dict[str, Any]:
    """Each feature with a number of bags of its own, as TorchRec's deduplicated requests have."""
    layout = LAYOUTS["pooled table_wise"]
    module = unsharded(layout)
    wire = WireConfig("fp8", "fp8")
    sharded, _, meter = shard(layout, module, wire, None, ranks)
    weights = load(sharded, module)
    generators = [torch.Generator().manual_seed(30 + rank) for rank in RANKS]
    strides = [[2 + rank, 4, 1 + 2 * rank] for rank in RANKS]
    lengths = [torch.randint(0, 4, (sum(strides[rank]),), generator=generators[rank]) for rank in RANKS]
    values = [torch.randint(0, ROWS, (int(lengths[rank].sum()),), generator=generators[rank]) for rank in RANKS]
    pieces = []
    for rank in RANKS:
        bags = iter(zip(lengths[rank].split(strides[rank]), module.parameters(), strict=True))
        rest, pooled = values[rank], []
        for length, weight in bags:
            here, rest = rest.split([int(length.sum()), len(rest) - int(length.sum())])
            pooled.append(torch.stack([weight[ids].sum(dim=0) for ids in here.split(length.tolist())]))
        pieces.append(pooled)
    gradients = [[dyadic(x.shape, generators[rank]) for x in pieces[rank]] for rank in RANKS]
    losses = [
        (x * received_gradient(g, "fp8", layout.row_dim)).sum()
        for rank in RANKS
        for x, g in zip(pieces[rank], gradients[rank], strict=True)
    ]
    expected = table_gradients(module, losses)
    mine, keys = ranks.rank, ["f0", "f1", "f2"]
    users = 5
    inverse = torch.stack([torch.arange(users) % stride for stride in strides[mine]])
    batch = KeyedJaggedTensor(
        keys=keys,
        values=values[mine],
        lengths=lengths[mine],
        stride_per_key_per_rank=[[stride] for stride in strides[mine]],
        inverse_indices=(keys, inverse),
    )
    output = features_of(sharded(batch), layout)
    told = [roundtrip(x.detach(), "fp8", row_dim=layout.row_dim)[inverse[i]] for i, x in enumerate(pieces[mine])]
    # The gradient of a bag that several users share: all of it by the first of them.
    firsts = [torch.zeros(users, g.shape[1]) for g in gradients[mine]]
    for first, gradient in zip(firsts, gradients[mine], strict=True):
        first[: len(gradient)] = gradient
    sum((x * g).sum() for x, g in zip(output, firsts, strict=True)).backward()
    parts = local_shards(sharded, 3)
    return {
        "values": max(worst(x, y) for x, y in zip(output, told, strict=True)),
        "gradients": max(worst(window(weights[t], part) - part.tensor, window(expected[t], part)) for t, part in parts),
        "bytes": meter.take(),
    }


def work() -> dict[str, Any]:
    results: dict[str, Any] = {}
    with process_group("cpu", 60) as ranks:
        for (name, layout), (forward, backward) in itertools.product(LAYOUTS.items(), PAIRS):
            wire = WireConfig(forward, backward)
            module = unsharded(layout)
            sharded, plan, meter = shard(layout, module, wire, None, ranks)
            for batch in BATCHES:
                errors = train_one(layout, batch, wire, module, sharded, ranks)
                expected = bytes_sent(layout, plan, batch, ranks.rank, wire)
                results[f"{name} {forward} {backward} {batch}"] = (errors, meter.take(), expected)
            results[f"{name} row_dim"] = common_row_dim(plan)
        results["variable"] = variable_batch(ranks)
        results["reduce-scatter"] = refusal(Layout(True, (64,), (("row_wise", ()),), 64), None, "ragged", ranks)
        # Six users in all: here the row divides what is sent, though not what belongs together.
        results["pooled row_dim"] = refusal(LAYOUTS["pooled table_wise"], 48, "ragged", ranks)
        results["sequence row_dim"] = refusal(LAYOUTS["sequence all on one rank"], 48, "unequal", ranks)
    return results


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return two_ranks.run(work)


@pytest.mark.parametrize("pair", PAIRS, ids="/".join)
@pytest.mark.parametrize("name", LAYOUTS)
def test_sharded_equals_unsharded_within_the_codecs_bound(
    results: list[dict[str, Any]], name: str, pair: tuple[Precision, Precision]
) -> None:
    for result, batch in itertools.product(results, BATCHES):
        errors, _, _ = result[f"{name} {' '.join(pair)} {batch}"]
        assert errors["values beyond bound"] <= 1e-6, batch
        assert errors["gradients beyond bound"] <= 1e-6, batch


@pytest.mark.parametrize("pair", PAIRS, ids="/".join)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_wire_delivers_what_roundtrip_tells(
    results: list[dict[str, Any]], name: str, pair: tuple[Precision, Precision]
) -> None:
    for result, batch in itertools.product(results, BATCHES):
        errors, _, _ = result[f"{name} {' '.join(pair)} {batch}"]
        assert errors["values"] <= 1e-6, batch
        assert errors["gradients"] <= 1e-6, batch


@pytest.mark.parametrize("name", LAYOUTS)
def test_fp8_is_what_crosses_the_wire(results: list[dict[str, Any]], name: str) -> None:
    rounding = max(result[f"{name} fp8 fp32 ragged"][0]["rounding"] for result in results)
    assert 1e-3 < rounding < 2**-4 * 8
    assert max(result[f"{name} fp32 fp32 ragged"][0]["gradient size"] for result in results) > 0.1


@pytest.mark.parametrize("pair", PAIRS, ids="/".join)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_meter_counts_what_leaves_the_rank(
    results: list[dict[str, Any]], name: str, pair: tuple[Precision, Precision]
) -> None:
    for result, batch in itertools.product(results, BATCHES):
        _, counted, expected = result[f"{name} {' '.join(pair)} {batch}"]
        assert counted == expected, batch


@pytest.mark.parametrize("name", ["sequence row_wise", "sequence table_wise"])
def test_fp8_takes_little_more_than_a_quarter(results: list[dict[str, Any]], name: str) -> None:
    for result in results:
        _, counted, _ = result[f"{name} fp8 fp8 ragged"]
        assert 0.25 < counted.forward_bytes / counted.forward_fp32_bytes <= 0.27
        assert 0.25 < counted.backward_bytes / counted.backward_fp32_bytes <= 0.27


@pytest.mark.parametrize("name", LAYOUTS)
def test_common_row_dim(results: list[dict[str, Any]], name: str) -> None:
    assert [result[f"{name} row_dim"] for result in results] == [LAYOUTS[name].row_dim] * 2


def test_bags_of_each_feature_by_themselves(results: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(results):
        variable = result["variable"]
        assert variable["values"] <= 1e-6
        assert variable["gradients"] <= 1e-6
        # Rank 0 owns 64 columns for 3 bags of rank 1; rank 1 owns 32 for 4 and 96 for 1 of rank 0.
        owed = [64 * 3, 32 * 4 + 96 * 1][rank]
        returned = [32 * 4 + 96 * 1, 64 * 3][rank]
        assert variable["bytes"] == WireBytes(owed // 32 * 36, returned // 32 * 36, owed * 4, returned * 4)


def test_row_wise_pooled_tables_are_refused(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert "row-wise is sent by reduce-scatter" in result["reduce-scatter"]
        assert "comm.forward and comm.backward to fp32" in result["reduce-scatter"]


def test_a_row_dim_that_divides_no_piece_is_refused(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert "row_dim (48) does not divide a piece of" in result["pooled row_dim"]
        assert "row_dim (48) does not divide a piece of" in result["sequence row_dim"]


def test_registry_holds_only_what_is_asked_for() -> None:
    assert codecs_registry(WireConfig("fp32", "fp32"), 64) is None
    counting = codecs_registry(WireConfig("fp32", "fp32"), 64, WireMeter(0))
    assert counting is not None
    assert set(counting) == {"POOLED_EMBEDDINGS_ALL_TO_ALL", "SEQUENCE_EMBEDDINGS_ALL_TO_ALL"}
    with pytest.raises(ValueError, match="row_dim is 0"):
        codecs_registry(WireConfig(), 0)


def test_fp32_is_sent_without_a_copy() -> None:
    codec = WireCodec("forward", WireMeter(0))
    values = torch.ones(8)
    assert codec.encode(values).data_ptr() == values.data_ptr()
    assert codec.decode(values).data_ptr() == values.data_ptr()


def test_take_starts_anew() -> None:
    meter = WireMeter(0)
    Fp8Codec(torch.float8_e4m3fn, 4, "forward", meter).encode(torch.ones(8))
    HalfCodec(torch.bfloat16, "backward", meter).encode(torch.ones(3))
    assert meter.take() == WireBytes(16, 6, 32, 12)
    assert meter.take() == WireBytes()


@pytest.mark.parametrize(
    "codec",
    [Fp8Codec(torch.float8_e4m3fn, 4, "forward", None), HalfCodec(torch.bfloat16, "forward", None)],
    ids=["fp8", "bf16"],
)
def test_a_lost_gradient_is_refused(codec: WireCodec) -> None:
    values = torch.ones(8, requires_grad=True)
    with pytest.raises(ValueError, match="synchronous collectives have no backward codec"):
        codec.encode(values)
    with torch.no_grad():
        assert codec.decode(codec.encode(values)).tolist() == [1.0] * 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_halves_of_an_expanded_empty_gradient(dtype: torch.dtype) -> None:
    codec = HalfCodec(dtype, "backward", None)
    assert codec.decode(codec.encode(torch.zeros(()).expand(0, 64))).shape == (0,)
