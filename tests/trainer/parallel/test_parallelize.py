"""Sharded tables, dense gradients and the FP8 wire. That two ranks do what one process does: test_many_tables.py."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import two_ranks
from small_data import ITEMS, a_pipeline, assert_close, gather_table, small_config, table_rules
from test_many_tables import Seen, train_all, train_steps
from torch import Tensor

from logitmix.common.plugins import Plugin
from logitmix.modules.config import ModelConfig, MoLConfig
from logitmix.modules.schema import ITEM, Feature, Schema, Table
from logitmix.trainer.config import TABLE_OPTIMIZERS, Config, TableSettings, model_schema
from logitmix.trainer.parallel.optimizer import ADAM
from logitmix.trainer.parallel.parallelize import autocast, automatic_precision, embedding_tables

SHARDINGS = ["row_wise", "table_wise", "column_wise"]
COMPUTE = {"train.precision": "fp32"}
FP32 = {"comm.forward": "fp32", "comm.backward": "fp32", **COMPUTE}
SGD = {"tables.optimizer": "sgd", "tables.lr": 0.1, "dense.optimizer": "sgd", "dense.lr": 0.1}


SETTINGS: dict[str, dict[str, Any]] = {
    **{sharding: FP32 | {"tables.sharding": sharding} for sharding in SHARDINGS},
    "bf16 dense": FP32 | {"comm.dense": "bf16"},
    "fp8": COMPUTE | {"comm.emulate": True},
    "fp8 dot": COMPUTE | {"comm.emulate": True, "model.similarity.kind": "dot"},
}


@pytest.fixture(scope="module")
def sharded(data: Path) -> dict[str, tuple[Seen, Seen, Seen]]:
    """By name: both ranks of two, and one process alone, after one SGD step."""
    configs = {name: small_config(data, SGD | settings) for name, settings in SETTINGS.items()}
    pairs = zip(*two_ranks.run(train_all, list(configs.values()), 1), strict=True)
    return {name: (*pair, train_steps(config, 1)) for (name, config), pair in zip(configs.items(), pairs, strict=True)}


def rows_that_follow(configs: list[Config]) -> list[tuple[Tensor, Tensor]]:
    """Rows of a batch that were sent while those of the batch before were updated, and the same rows of the table."""
    pairs = []
    for config in configs:
        with a_pipeline(config, 2) as pipeline:
            pipeline.train_step()
            pipeline.receive_rows()
            pairs.append((pipeline.rows[ITEM].detach(), gather_table(pipeline.model)[pipeline.batch.id_V]))
    return pairs


def test_the_next_rows_are_those_of_the_table_once_moved(data: Path) -> None:
    options = [{"tables.sharding": sharding, "comm.parts": parts} for sharding in SHARDINGS for parts in (1, 3)]
    configs = [small_config(data, SGD | FP32 | option) for option in options]
    for results in (*two_ranks.run(rows_that_follow, configs), rows_that_follow(configs)):
        for option, (sent, moved) in zip(options, results, strict=True):
            assert torch.equal(sent, moved), option


def test_dense_gradients_in_bf16(sharded: dict) -> None:
    """The sum over the ranks rounds each part and the sum to 8 bits; one process rounds once. Tables are left alone."""
    first, second, alone = sharded["bf16 dense"]
    for key, exact in sharded["row_wise"][2].gradients.items():
        assert torch.equal(first.gradients[key], second.gradients[key])
        assert_close(first.gradients[key], exact, 2**-7)
        assert torch.equal(first.gradients[key].bfloat16().float(), first.gradients[key])
        assert_close(alone.gradients[key], exact, 2**-8)
    assert any((first.gradients[key] != exact).any() for key, exact in sharded["row_wise"][2].gradients.items())
    assert_close(first.after[ITEM], sharded["row_wise"][0].after[ITEM], 1e-6)


def test_tables_are_cut_as_told(sharded: dict) -> None:
    rows = ITEMS + 1
    cuts = {"row_wise": [(26, 8), (25, 8)], "table_wise": [(rows, 8)], "column_wise": [(rows, 4)] * 2}
    assert {name: sharded[name][0].cuts for name in cuts} == cuts


@pytest.mark.parametrize("name", ["fp8", "fp8 dot"])
def test_the_fp8_wire_rounds_as_the_codec_does_and_no_more(sharded: dict, name: str) -> None:
    """Beside one process that applies the codec's rounding itself: each row is rounded once on its way out, so losses
    agree; on the way back each rank's part of a gradient is rounded by itself, by at most 2^-3 (E5M2)."""
    first, second, alone = sharded[name]
    assert first.wire_bytes > 0
    assert_close(first.losses[0] + second.losses[0], alone.losses[0], 1e-5)
    change, expected = (of.after[ITEM] - of.before[ITEM] for of in (first, alone))
    assert 1e-3 < (change - expected).norm() / expected.norm() < 2**-3


def test_weights_come_from_the_seed_alone(data: Path) -> None:
    once, again, other = (train_steps(small_config(data, FP32 | {"train.seed": seed}), 1) for seed in (1, 1, 2))
    assert torch.equal(once.after[ITEM], again.after[ITEM]) and once.losses[0] == again.losses[0]
    assert not torch.equal(once.before[ITEM], other.before[ITEM])
    assert abs(float(once.before[ITEM].std()) / (0.02 * 0.8796) - 1) < 0.1  # std of a normal cut at 2 sigma


CACHED = {"tables.item.cache_load_factor": 0.1}
ONLY = (
    r"^tables\.cache_load_factor is 0\.1 for table item, but only GPUs cache rows of the host's memory, with FBGEMM's"
)


@pytest.mark.parametrize(
    ("device", "settings", "message"),
    [
        ("cuda", {"comm.parts": 2}, r"give --comm\.parts 1"),
        ("cuda", {"comm.parts": 2, "tables.optimizer": "sgd"}, None),
        ("cpu", {"comm.parts": 2}, None),
        ("cuda", CACHED, None),
        ("cpu", CACHED, ONLY),
        ("cuda", CACHED | {"train.ema": 0.9}, ONLY),
        ("cuda", CACHED | {"comm.parts": 2, "tables.optimizer": "sgd"}, ONLY),
        ("cuda", {"tables.zip.cache_load_factor": 0.1, "tables.zip.capacity": 3}, "for table zip, .* and no capacity"),
        ("cuda", CACHED | {"tables.optimizer": "signs"}, ONLY),
        (
            "cpu",
            {"tables.itme.lr": 1.0},
            r"^tables\.itme: no table itme \(did you mean item\?\); there are: item, zip$",
        ),
        (
            "cpu",
            {"tables.zip.precision": "fp16"},
            "the precision of table zip is fp16, .* and adam on CUDA only",
        ),
        ("cpu", {"tables.item.pooled": True}, r"^tables\.item\.pooled is true, but items are needed one by one"),
    ],
)
def test_settings_that_no_table_can_have_are_refused(
    data: Path, monkeypatch: pytest.MonkeyPatch, device: str, settings: dict, message: str | None
) -> None:
    monkeypatch.setitem(TABLE_OPTIMIZERS.plugins, "signs", Plugin("signs", "", ""))
    monkeypatch.setitem(TABLE_OPTIMIZERS.data, "signs", ADAM)
    monkeypatch.setitem(TableSettings.__annotations__, "optimizer", str)
    zip_code = Feature("zip", "user", "id", "zip")
    schema = Schema((Feature(ITEM, "item", "id", ITEM), zip_code), (Table(ITEM, ITEMS + 1), Table("zip", 5)))
    config = small_config(data, {"model.features": ["zip"]} | settings)
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        embedding_tables(model_schema(schema, config), table_rules(config), torch.device(device))


@pytest.mark.parametrize(
    ("components", "device", "has_bf16", "expected"),
    [(4, "cpu", True, "fp32"), (8, "cpu", True, "bf16"), (8, "cpu", False, "fp32"), (1, "cuda", True, "bf16")],
)
def test_the_precision_auto(components: int, device: str, has_bf16: bool, expected: str) -> None:
    similarity = MoLConfig(query_components=components, item_components=8, component_dim=16)
    assert automatic_precision(ModelConfig(similarity=similarity), device, has_bf16) == expected
    assert automatic_precision(ModelConfig(), "cpu", has_bf16=True) == "fp32"


@pytest.mark.parametrize(
    ("precision", "has_bf16", "bf16"), [("bf16", True, True), ("bf16", False, False), ("fp32", True, False)]
)
def test_a_cpu_without_bf16_computes_in_fp32(
    data: Path, monkeypatch: pytest.MonkeyPatch, precision: str, has_bf16: bool, bf16: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_bf16})
    x = torch.ones(2, 2)
    with autocast(precision, torch.device("cpu")):
        assert (x @ x).dtype == (torch.bfloat16 if bf16 else torch.float32)


@pytest.mark.gpu
def test_the_next_rows_on_a_gpu(data: Path) -> None:
    settings = SGD | FP32 | {"train.device": "cuda"}
    for sent, moved in rows_that_follow([small_config(data, settings | {"comm.parts": parts}) for parts in (1, 3)]):
        assert torch.equal(sent, moved)


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
def test_rows_in_the_host_s_memory_move_like_those_of_the_gpu(data: Path, optimizer: str) -> None:
    settings = FP32 | {"tables.optimizer": optimizer, "train.device": "cuda"}
    there, cached = (
        train_steps(small_config(data, settings | {"tables.cache_load_factor": factor}), 3) for factor in (1.0, 0.3)
    )
    assert_close(cached.after[ITEM] - cached.before[ITEM], there.after[ITEM] - there.before[ITEM], 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad", "sgd"])
def test_a_gpu_does_what_the_cpu_does(data: Path, optimizer: str) -> None:
    settings = FP32 | {"tables.optimizer": optimizer}
    on_cpu, on_gpu = (train_steps(small_config(data, settings | {"train.device": d}), 3) for d in ("cpu", "cuda"))
    assert torch.equal(on_gpu.before[ITEM].cpu(), on_cpu.before[ITEM])
    for gpu, cpu in zip(on_gpu.losses, on_cpu.losses, strict=True):
        assert_close(gpu.cpu(), cpu, 1e-4)
    # Sums in another order.
    moved, expected = (of.after[ITEM].cpu() - of.before[ITEM].cpu() for of in (on_gpu, on_cpu))
    assert_close(moved, expected, 1e-3)
