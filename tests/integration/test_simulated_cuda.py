"""The product on a CUDA device that is simulated (simulated_cuda.py), held to what it does on the CPU."""

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import simulated_cuda
import torch
import torch.distributed as dist
import two_ranks
from simulated_cuda import Streams
from small_data import a_pipeline, small_config, whole_state
from torch import Tensor

from logitmix.modules.batch import Batch
from logitmix.modules.schema import ITEM
from logitmix.modules.transfer import copy_all
from logitmix.trainer import api
from logitmix.trainer.config import Config
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.evaluation.evaluate import Evaluation
from logitmix.trainer.parallel import flat
from logitmix.trainer.parallel.parallelize import ParallelModel
from logitmix.trainer.step.pipeline import Pipeline, Skip

pytestmark = pytest.mark.long
SLOW = pytest.mark.slow

Settings = Mapping[str, Any]
SMALL: Settings = {
    "train.batch_size": 2,
    "train.precision": "fp32",
    "train.clip": 10.0,
    "model.encoder.max_length": 6,
    "model.loss.negatives": 3,
    "model.hindexer.weight": 0.0,
    "evaluate.users": 2,
    "dense.eps": 1e-3,
    "tables.eps": 1e-3,
}
"""Kernels run in Triton's interpreter. With Adam's usual eps, a gradient that is nearly zero moves its weight by the
whole rate, in a direction that is one of rounding."""


def configured(data: Path, settings: Settings, device: str = "cuda") -> Config:
    """SMALL with these settings; without eps for optimizers that refuse it."""
    flat = {**SMALL, **settings, "train.device": device}
    for section in ("tables", "dense"):
        if flat.get(f"{section}.optimizer") == "sgd":
            del flat[f"{section}.eps"]
    return small_config(data, flat)


ONE_BLOCK = {"sasrec": {"blocks": 1}, "hstu": {"blocks": 1, "heads": 1, "times": True}, "pooled": {}}
SIMILARITIES = ("dot", "mlp", "neumf", "deepfm", "mol")
PAIRS: dict[str, Settings] = {
    f"{encoder}-{similarity}": {
        "model.encoder.kind": encoder,
        "model.similarity.kind": similarity,
        "model.hindexer.weight": 0.5 if similarity == "dot" else 0.0,
        **{f"model.encoder.{name}": value for name, value in ONE_BLOCK[encoder].items()},
    }
    for encoder, similarity in product(ONE_BLOCK, SIMILARITIES)
}
FEATURES: Settings = {"model.features": ["all"], "tables.tags.pooled": True, "model.similarity.kind": "dot"}
MORE: dict[str, Settings] = {
    "parts": {"comm.parts": 2, "tables.optimizer": "rowwise_adagrad", "model.similarity.kind": "dot"},
    "bf16": {"train.precision": "bf16", "comm.dense": "bf16", "model.similarity.kind": "dot"},
    "all pooled": {**FEATURES, "tables.brand.pooled": True},
    "sgd, bce": {"tables.optimizer": "sgd", "model.loss.kind": "bce", "model.similarity.kind": "mlp"},
    "table-wise": {"tables.sharding": "table_wise", "model.loss.share": "batch", "model.loss.in_batch": 3},
    "column-wise": {"tables.sharding": "column_wise", "comm.backward": "fp32", "model.loss.in_batch": 3},
    "information": {"model.similarity.mutual_information": 0.01, "model.hindexer.weight": 0.5},
    "user": {"model.features": ["user"], "model.similarity.user_component": True},
    "joint": {"model.similarity.gating": "joint", **PAIRS["hstu-mol"]},
    "ligr": {"model.encoder.kind": "ligr", "model.similarity.kind": "dot"},
    "fuxi": {"model.encoder.kind": "fuxi", "model.encoder.times": True, "model.similarity.kind": "dot"},
    "positions": {"model.loss.share": "position", "model.encoder.history_dropout": 0.2, "model.item_id_dropout": 0.3},
    "16 bits": {"comm.forward": "bf16", "comm.backward": "fp16", "dense.optimizer": "sgd", "model.encoder.heads": 2},
}


class Seen(NamedTuple):
    numbers: list[dict[str, float]]
    """The losses of each step and the gradients' norm; last, the metrics."""
    launches: Mapping[str, int]
    faults: Sequence[str]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if torch.version.cuda:
        pytest.skip("torch has a CUDA of its own")
    found = simulated_cuda.compiled(tmp_path_factory.mktemp("simulated"))
    if found is None:
        pytest.skip("no C++ compiler")
    return found


def trained(
    data: Path, cases: Mapping[str, Settings], steps: int, evaluated: Sequence[str], library: Path | None, streams: bool
) -> dict[str, Seen]:
    """Each case trained, and some evaluated, on a rank: on the CPU, or with a library on the simulated device."""
    device = None if library is None else simulated_cuda.begin(library)
    found = {}
    for name, settings in cases.items():
        config = configured(data, settings, "cuda" if device else "cpu")
        if device:
            device.launches.clear()
            device.streams = Streams() if streams else None
        numbers = []
        with a_pipeline(config, steps) as pipeline:
            seen = []
            for _ in range(steps):
                seen.append({**pipeline.train_step(), "norm": pipeline.gradient_norm.clone()})
            # Only now: whoever asks the device for a number waits for it, and then nothing is wrong any more.
            numbers += [{of: number.item() for of, number in of_step.items()} for of_step in seen]
            assert not pipeline.skipped
            if name in evaluated:
                evaluation = Evaluation(
                    config.evaluate, config.data, config.model, load_dataset(config.data.path), pipeline.model.ranks
                )
                numbers.append(evaluation("test", *pipeline.model.evaluated()))
        del pipeline
        gc.collect()
        found[name] = Seen(numbers, dict(device.launches) if device else {}, device.faults() if device else [])
    return found


def compare(
    data: Path, cases: Mapping[str, Settings], steps: int, evaluated: Sequence[str], library: Path, world_size: int
) -> dict[str, Seen]:
    """What rank 0 saw on the device, once it is what the CPU gives up to rounding, and no rank has found a fault."""
    on_cpu, on_device = (
        two_ranks.run(trained, data, cases, steps, evaluated, of, world_size > 1, world_size=world_size)
        for of in (None, library)
    )
    for name, settings in cases.items():
        for rank in on_device:
            assert not rank[name].faults, name
        tolerance = 2e-2 if settings.get("train.precision") == "bf16" else 1e-4
        for got, expected in zip(on_device[0][name].numbers, on_cpu[0][name].numbers, strict=True):
            assert got == pytest.approx(expected, rel=tolerance, abs=tolerance), name
    return on_device[0]


def test_each_encoder_and_similarity_gives_what_it_gives_on_the_cpu(data: Path, library: Path) -> None:
    """Each in one pair; `make soak` has all pairs, on two ranks."""
    pairs = {name: PAIRS[name] for name in ("sasrec-dot", "hstu-mlp", "pooled-neumf", "pooled-deepfm", "pooled-mol")}
    seen = compare(data, pairs, 1, ["sasrec-dot", "pooled-mol"], library, 1)
    kernels = {"hstu": "_keys_backward", "mol": "_negatives_backward", "dot": "_items"}
    kernels["sasrec"] = "efficient attention, backward"
    for name, case in seen.items():
        assert {"_dropout", *(kernels[part] for part in name.split("-") if part in kernels)} <= case.launches.keys()
    assert "_scores" in seen["pooled-mol"].launches


def test_two_gpus_give_what_two_processes_give(featured: Path, library: Path) -> None:
    settings = {**FEATURES, "train.ema": 0.9, "model.loss.share": "sequence", "model.loss.resample": 2}
    seen = compare(featured, {"features": settings}, 2, ["features"], library, 2)
    assert {"_quantize_kernel", "_dequantize_kernel"} <= seen["features"].launches.keys()


PLACED: dict[str, Settings] = {
    "row-wise": {"tables.brand.pooled": True},
    "table-wise": {"tables.tags.sharding": "table_wise"},
    "column-wise": {"tables.tags.sharding": "column_wise", "tables.tags.dim": 16},
}
"""Of pooled tables."""


def waited(data: Path, library: Path) -> dict[str, dict[str, int]]:
    """Where the host waits for the device in a step that is not logged and sends the rows of one that is not."""
    device, found = simulated_cuda.begin(library), {}
    for name, settings in PLACED.items():
        with a_pipeline(configured(data, {**FEATURES, "train.log_every": 100, **settings}), 4) as pipeline:
            pipeline.train_step()
            device.waits.clear()
            pipeline.train_step()
            found[name] = dict(device.waits)
            pipeline.train_step()
    return found


def test_no_step_waits_for_the_device(featured: Path, library: Path) -> None:
    """Nor copies what is not pinned."""
    for of_rank in two_ranks.run(waited, featured, library):
        assert of_rank == {name: {} for name in PLACED}


SKIPPING: dict[str, Settings] = {
    "adam, clipped, averaged": {**FEATURES, "train.ema": 0.9},
    "adagrad, parts": {"comm.parts": 2, "tables.optimizer": "rowwise_adagrad", "train.clip": 0.0},
    "adam": {**FEATURES, "train.clip": 0.0},
    "logged": {"train.log_every": 1},
    "sgd": {"tables.optimizer": "sgd", "dense.optimizer": "sgd", "comm.dense": "bf16"},
    "copies": {"tables.group_size": 1, "train.clip": 0.0},
}
"""Ways to leave a step out."""


@contextmanager
def not_finite(where: str) -> Iterator[None]:
    """What is computed within has a loss, a tower's or a row's gradient that is not finite, on the second rank."""

    def loss(self: ParallelModel, rows: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        losses = of_step(self, rows, batch)
        if where == "rows":
            rows[ITEM].register_hook(lambda gradient: gradient.index_fill(0, torch.zeros_like(batch.id_V[:1]), inf))
        return losses | {"loss": losses["loss"] + (inf if where == "loss" else 0.0)}

    def copied(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        pairs = [*pairs]
        copy_all(pairs)
        if where == "tower":
            pairs[0][0].fill_(torch.nan)

    of_step = ParallelModel.loss
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(ParallelModel, "loss", loss)
            patch.setattr(flat, "copy_all", copied)
        yield


BROKEN = ("loss", "tower", "rows")


def checked(pipeline: Pipeline) -> list[Skip]:
    """A step but for its end; the steps that it finds to be skipped."""
    for name in ("receive_rows", "loss", "backward", "check_gradients"):
        getattr(pipeline, name)()
    return [*pipeline.skips]


def after_skips(config: Config, broken: bool) -> tuple[list[Tensor], list[Skip]]:
    """The whole state after a step, as many that are not finite as there are ways to be, if they are taken, and one
    more; and the steps that were found to be skipped."""
    last = len(BROKEN) + 2
    with a_pipeline(config, last) as pipeline:
        skips = checked(pipeline)
        pipeline.apply_gradients(prefetch=broken, settle=True)
        if average := pipeline.model.average:
            # So that it moves though the weights do not.
            for weight in average.tower.parameters():
                weight.data.add_(1.0)
        if broken:
            before = whole_state(pipeline)
            for where in BROKEN:
                with not_finite(where):
                    skips += checked(pipeline)
                found = len(pipeline.skips)
                pipeline.apply_gradients(settle=where == "tower")
                skips += pipeline.skips[found:]
                assert where != "tower" or all(map(torch.equal, whole_state(pipeline), before))
        else:
            assert pipeline._next
            pipeline._next[1].abandon()
            pipeline._next, pipeline._making, pipeline.step, pipeline.skipped = None, None, last - 1, len(BROKEN)
        skips += checked(pipeline)
        pipeline.apply_gradients(settle=True)
        assert (pipeline.progress.step, pipeline.progress.skipped) == (last, len(BROKEN))
        return whole_state(pipeline), skips


def skipped(data: Path, library: Path, names: Sequence[str]) -> dict[str, list[Skip]]:
    simulated_cuda.begin(library)
    found = {}
    for name in names:
        config = configured(data, {"model.similarity.kind": "dot", "train.log_every": 100, **SKIPPING[name]})
        (expected, _), (state, found[name]) = (after_skips(config, broken) for broken in (False, True))
        assert all(map(torch.equal, state, expected)), name
    return found


@pytest.mark.parametrize(
    "names", [["adam, clipped, averaged", "adagrad, parts"], pytest.param([*SKIPPING], marks=SLOW)], ids=["some", "all"]
)
def test_all_gpus_skip_what_is_not_finite_on_one(featured: Path, library: Path, names: list[str]) -> None:
    """Bit for bit as if the steps had not been; the host knows of each a step later."""
    first, second = two_ranks.run(skipped, featured, library, names)
    assert first == second
    for name in names:
        assert first[name] == [Skip(2, 1), Skip(3, -1), Skip(4, 1)], name


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_gpus_in_more_ways(featured: Path, library: Path) -> None:
    # In FP8, a gradient that rounding has on the other side of a step is an eighth larger.
    cases = {name: {"comm.forward": "fp32", "comm.backward": "fp32", **of} for name, of in {**PAIRS, **MORE}.items()}
    seen = compare(featured, cases, 3, [*cases], library, 2)
    assert "flash attention, backward" in seen["bf16"].launches


def served(data: Path, library: Path | None, folder: Path) -> dict[str, Any]:
    """Trains a run, evaluates and exports it, and asks the export: on the CPU, or on the simulated device."""
    device = "cpu" if library is None else "cuda"
    if library:
        simulated_cuda.begin(library)
    settings = {**SMALL, "model.similarity.kind": "dot", "train.epochs": 0.1, "data.path": str(data)}
    run, out = folder / device, folder / f"{device}-export"
    trained = api.train("demo-mol", run, {**settings, "train.device": device})
    evaluated = api.evaluate(run)
    api.export(run, out)
    retriever = api.Retriever.load(out, device=device)
    rows = [retriever.rows(history, k=5) for history in (["item-1", "item-7"], ["item-3"])]
    return {"trained": trained, "evaluated": evaluated, "rows": rows}


@SLOW
def test_a_run_is_evaluated_exported_and_served(data: Path, library: Path, tmp_path: Path) -> None:
    (on_cpu,), (on_device,) = (two_ranks.run(served, data, of, tmp_path, world_size=1) for of in (None, library))
    for part in ("trained", "evaluated"):
        for name, number in on_cpu[part].items():
            assert on_device[part][name] == pytest.approx(number, rel=1e-4) or "second" in name, name
    for got, expected in zip(on_device["rows"], on_cpu["rows"], strict=True):
        assert [row["id"] for row in got] == [row["id"] for row in expected]


def nothing(*_: object, **__: object) -> None:
    pass


STREAMING: Settings = {**FEATURES, "model.features": ["tags"], "train.clip": 0.0, "train.log_every": 100}
PLANTED: dict[str, tuple[Any, str, str]] = {
    "a batch is not recorded": (Batch, "record_stream", "record_stream is missing"),
    "ids are not waited for": (simulated_cuda.Stream, "wait_stream", "may still"),
    "rows are not waited for": (simulated_cuda.Work, "_wait", "may still"),
}


def planted(data: Path, library: Path, names: Sequence[str]) -> dict[str, Sequence[str]]:
    """The faults that are found where a method does nothing, by the name of what is missing."""
    found = {}
    for name in names:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*PLANTED[name][:2], nothing)
            found[name] = trained(data, {name: STREAMING}, 2, [], library, True)[name].faults
    return found


# Between two ranks, NCCL's stream orders more than the product asks for.
@pytest.mark.parametrize(
    ("names", "world_size"),
    [
        (["a batch is not recorded", "ids are not waited for"], 1),
        pytest.param(["a batch is not recorded", "rows are not waited for"], 2, marks=SLOW),
    ],
)
def test_what_is_wrong_with_streams_is_found(featured: Path, library: Path, names: list[str], world_size: int) -> None:
    ranks = two_ranks.run(planted, featured, library, names, world_size=world_size)
    for name in names:
        said = PLANTED[name][-1]
        assert any(said in fault for rank in ranks for fault in rank[name]), name
