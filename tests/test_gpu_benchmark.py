"""What `make gpu` decides with, on the CPU; its figures need a GPU."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import two_ranks

from benchmarks import gpu
from logitmix.comm.process_group import process_group
from logitmix.modules.config import DotConfig, MoLConfig
from logitmix.modules.similarity.base import Similarity
from logitmix.modules.similarity.dot import Dot
from logitmix.modules.similarity.mol import MoL

CPU = torch.device("cpu")


def test_a_wrong_part_is_named_and_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong() -> None:
        raise gpu.Wrong("rows are others")

    row = gpu.Row("a kernel", 2.0, 6.0, 1.0)
    for name, part in {
        "gpu_tests": wrong,
        "nccl": wrong,
        "training": lambda: (["held"], []),
        "more_ranks": lambda: (["more"], []),
        "steps": lambda: (["| a |\n"], []),
    }.items():
        monkeypatch.setattr(gpu, name, part)
    monkeypatch.setattr(gpu, "kernels", lambda: ([], [row]))
    monkeypatch.setattr(gpu, "versions", lambda: ["a machine"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    out = tmp_path / "gpu.md"
    with pytest.raises(SystemExit) as stopped:
        gpu.main(gpu.Options(out=str(out)))
    assert str(stopped.value) == "WRONG: tests: Wrong: rows are others\nWRONG: NCCL: Wrong: rows are others"
    assert not out.exists()
    assert "| a kernel | 2.000 | 6.000 | 3.00 | 1.000 | 2.00 |" in capsys.readouterr().out

    for name in ("gpu_tests", "nccl"):
        monkeypatch.setattr(gpu, name, lambda: ([], []))
    gpu.main(gpu.Options(out=str(out)))
    assert out.read_text().startswith("# On GPUs\n") and "- held\n" in out.read_text()


def test_losses_apart() -> None:
    assert gpu.apart([1.0, 2.002], [1.0, 2.0], 2e-3) == pytest.approx(1e-3)
    for found in ([1.0, 2.1], [1.0, math.nan], [1.0], []):
        with pytest.raises(gpu.Wrong):
            gpu.apart(found, [1.0, 2.0], 2e-3)


def on_a_rank() -> tuple[dict[str, float], str]:
    """What it measured, and what it said where rows did not arrive."""
    with process_group("cpu", 60) as ranks:
        speeds = gpu.collectives(ranks, megabytes=1)["gb_per_second"]
        torch.distributed.all_to_all_single = lambda incoming, *_, **__: incoming.zero_()
        with pytest.raises(gpu.Wrong) as wrong:
            gpu.collectives(ranks, megabytes=1)
    return speeds, str(wrong.value)


def test_collectives_of_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1])  # the ranks import this file
    for rank, (speeds, wrong) in enumerate(two_ranks.run(on_a_rank)):
        assert set(speeds) == {"all_reduce", "all_to_all"} and min(speeds.values()) > 0
        assert wrong == f"all_to_all on rank {rank} gave other rows"


@pytest.mark.parametrize(
    "similarity",
    [
        MoL(64, MoLConfig(query_components=2, item_components=3, gate_hidden=8, projection_dropout=0.0)),
        Dot(64, DotConfig()),
    ],
)
def test_the_compiled_loss_must_be_the_eager_one(monkeypatch: pytest.MonkeyPatch, similarity: Similarity) -> None:
    monkeypatch.setattr(gpu, "ITEMS", 50)
    row = gpu.loss_row(similarity, torch.float32, CPU, 250, repetitions=1)
    assert min(row.ms, row.eager_ms, row.floor_ms) > 0

    right = similarity.sampled_softmax
    monkeypatch.setattr(similarity, "sampled_softmax", lambda *arguments: 1.001 * right(*arguments))
    with pytest.raises(gpu.Wrong, match="loss is off by"):
        gpu.loss_row(similarity, torch.float32, CPU, 250, repetitions=1)


def test_the_compiled_attention_must_be_the_eager_one(monkeypatch: pytest.MonkeyPatch) -> None:
    row = gpu.attention_row(torch.float32, 3, CPU, repetitions=1)
    assert min(row.ms, row.eager_ms, row.floor_ms) > 0

    right = gpu.attend
    monkeypatch.setattr(gpu, "attend", lambda *arguments: 1.001 * right(*arguments))
    with pytest.raises(gpu.Wrong, match=r"positions: output are off by 1\.0e-03"):
        gpu.attention_row(torch.float32, 3, CPU, repetitions=1)


@pytest.mark.parametrize("allowed", [None, 0.5])
def test_stage_1_must_find_what_the_cpu_finds(monkeypatch: pytest.MonkeyPatch, allowed: float | None) -> None:
    row = gpu.stage1_row(2, 3000, 100, allowed, CPU, repetitions=1)
    assert min(row.ms, row.eager_ms, row.floor_ms) > 0

    right, calls = gpu.hindexer_topk, []

    def wrong_in(call: int, *arguments: object) -> object:
        found = right(*arguments)
        calls.append(call)
        return replace(found, items_BK=found.items_BK.flip(1)) if len(calls) == call else found

    for call, said in ((1, "other items than on the CPU$"), (3, "other items than on the CPU the second time$")):
        calls.clear()
        monkeypatch.setattr(gpu, "hindexer_topk", partial(wrong_in, call))
        with pytest.raises(gpu.Wrong, match=said):
            gpu.stage1_row(2, 3000, 100, allowed, CPU, repetitions=1)


def test_scores_of_candidates_must_be_the_eager_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    mol = MoL(64, MoLConfig(query_components=2, item_components=3, gate_hidden=8))
    row = gpu.scores_row(mol, torch.float32, 3, 500, 40, CPU, repetitions=3)
    assert min(row.ms, row.eager_ms, row.floor_ms) > 0

    right = mol.candidates
    monkeypatch.setattr(mol, "candidates", lambda *arguments: 1.001 * right(*arguments))
    with pytest.raises(gpu.Wrong, match=r"3 queries x 40 of 500 items: scores are off by 1\.0e-03"):
        gpu.scores_row(mol, torch.float32, 3, 500, 40, CPU, repetitions=3)


def test_the_codec_is_timed_both_ways() -> None:
    encode, decode = gpu.codec_rows(64, torch.float8_e4m3fn, CPU, megabytes=1)
    assert encode.what == "encode float8_e4m3fn, 1 MiB of FP32 rows of 64"
    assert min(encode.ms, decode.ms, encode.eager_ms, decode.eager_ms, encode.floor_ms) > 0
