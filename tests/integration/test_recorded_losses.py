"""Training with ids alone gives the losses that it gave before there were features and several tables.

recorded_losses.json holds them by CPU: products are summed in an order of its own on each kind. On the recorded kind
they are equal bit for bit; on others, FP32 ones to rounding. `python tests/integration/test_recorded_losses.py` records
this CPU's anew, which only a change of the computation itself excuses.
"""

import json
import platform
import sys
import tempfile
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
import two_ranks

from logitmix.trainer.cli import main

RECORDED = Path(__file__).with_name("recorded_losses.json")
COLUMNS = ("loss", "loss/similarity", "loss/hindexer", "gradient_norm")
MOL = """
kind = "mol", query_components = {k}, item_components = {k}, component_dim = 32, gate_hidden = {gate}, \
projection_hidden = {projection}, projection_dropout = 0.1, gate_dropout = 0.2
""".strip()
RUNS = {
    "demo-mol, bf16": ("demo", MOL.format(k=4, gate=64, projection=128), 1.0, 50, 64, 32, "bf16"),
    "demo-mol, fp32": ("demo", MOL.format(k=4, gate=64, projection=128), 1.0, 50, 64, 128, "fp32"),
    "ml-100k-dot, fp32": ("ml-100k", 'kind = "dot"', 0.0, 200, 128, 128, "fp32"),
    "ml-100k-mol, fp32": ("ml-100k", MOL.format(k=8, gate=128, projection=512), 1.0, 50, 64, 128, "fp32"),
}
"""Dataset, similarity, weight of the h-indexer, L, N, B, precision: an epoch each."""


def recipe(
    data: Path, epochs: float, similarity: str, weight: float, length: int, negatives: int, batch: int, precision: str
) -> str:
    return f"""
[data]
path = "{data}"

[model]
dim = 64
encoder = {{ blocks = 2, heads = 1, dropout = 0.2, max_length = {length} }}
similarity = {{ {similarity} }}
hindexer = {{ dim = 64, weight = {weight} }}
loss = {{ negatives = {negatives}, share = "sequence" }}

[train]
batch_size = {batch}
epochs = 1
stop_after_epochs = {epochs}
precision = "{precision}"
device = "cpu"
log_every = 1

[evaluate]
every_epochs = 0
"""


def prepared(dataset: str, folder: Path, real_data: Path | None) -> Path:
    out = folder / dataset
    if not out.exists():
        source = ["--source", str(real_data / f"{dataset}.zip")] if real_data else []
        main(["prepare", dataset, "--out", str(out), *source])
    return out


def losses(name: str, epochs: float, folder: Path, real_data: Path | None) -> list[list[float]]:
    """Rows of COLUMNS, a step each."""
    dataset, *rest = RUNS[name]
    data = prepared(dataset, folder, real_data)
    file = folder / "recorded.toml"
    file.write_text(recipe(data, epochs, *rest))
    run = folder / f"{name} {epochs}"
    two_ranks.command(["train", file.name, "--run", str(run)], folder)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [[row[column] for column in COLUMNS if column in row] for row in rows if row["kind"] == "train"]


def this_cpu() -> str:
    """What decides in which order its products are summed."""
    # The name alone does not tell Intel's models apart, whose units for BF16 differ.
    models = {line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model")}
    has = torch.cpu.get_capabilities()
    bf16 = "with" if has.get("avx512_bf16") else "without"
    amx = " and AMX" if has.get("amx_bf16") else ""
    capability = torch.backends.cpu.get_cpu_capability()
    return (
        f"{' '.join(sorted(models)) or platform.processor()}, {capability}, {bf16} BF16{amx}, torch {torch.__version__}"
    )


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recorded")


@pytest.mark.parametrize(
    "name", [pytest.param(of, marks=[pytest.mark.slow] if of == "ml-100k-mol, fp32" else []) for of in RUNS]
)
@pytest.mark.parametrize("epochs", [0.5, pytest.param(1, marks=pytest.mark.slow)])
def test_losses_are_those_recorded(name: str, epochs: float, folder: Path, request: pytest.FixtureRequest) -> None:
    recorded: dict[str, Any] = json.loads(RECORDED.read_text())
    real_data = request.getfixturevalue("real_data") if name.startswith("ml-") else None
    if (exact := recorded.get(this_cpu())) is not None:
        found = losses(name, epochs, folder, real_data)
        assert len(found) == ceil(epochs * len(exact[name])) and found == exact[name][: len(found)]
    elif name.endswith("fp32"):
        found, expected = losses(name, epochs, folder, real_data), next(iter(recorded.values()))[name]
        # Roundings of the first steps have not grown yet.
        torch.testing.assert_close(torch.tensor(found)[:4], torch.tensor(expected)[:4], rtol=1e-4, atol=0)


if __name__ == "__main__":
    known = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    with tempfile.TemporaryDirectory() as name:
        known[this_cpu()] = {
            run: losses(run, 1, Path(name), Path(sys.argv[1]) if "ml" in run else None) for run in RUNS
        }
    RECORDED.write_text(json.dumps(known, indent=1) + "\n")
