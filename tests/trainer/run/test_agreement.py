"""Ranks that differ do not train together: what is compared, and what each rank then says."""

import contextlib
import io
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import two_ranks
from small_data import forget_digests, small_config, write_dataset

from logitmix.common.checked import entry_of
from logitmix.common.code import code
from logitmix.trainer import cli
from logitmix.trainer.config import dump_toml
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.run.agreement import facts_of
from logitmix.trainer.run.manifest import FORMAT


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")


@pytest.mark.usefixtures("launched")
def test_settings_count_but_for_those_that_may_differ(tmp_path: Path) -> None:
    data = load_dataset(write_dataset(tmp_path / "data"))
    facts = facts_of("train", small_config(tmp_path), data)
    other = {"train.seed": 7, "comm.timeout_seconds": 5, "start.dense.lr": 0.5, "train.threads": 2}
    for name, value in other.items():
        now = facts_of("train", small_config(tmp_path, {name: value}), data)
        assert {of for of in facts | now if facts.get(of) != now.get(of)} == {name}
    elsewhere = small_config(tmp_path, {"data.path": "/mnt/data", "train.device": "cpu"})
    assert facts_of("train", elsewhere, data) == facts
    assert facts["the version of torch"] and facts.items() >= code().items()
    assert facts_of("evaluate", None, None, split="test")["--split"] == "test"


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("digests", [True, False], ids=["by prepare", "by another writer"])
def test_datasets_of_equal_counts_are_told_apart(tmp_path: Path, digests: bool) -> None:
    ring = load_dataset(write_dataset(tmp_path / "ring", ring=True))
    random = load_dataset(write_dataset(tmp_path / "random"))
    if not digests:
        # As if nothing in the description told them apart.
        for dataset in (ring, random):
            forget_digests(dataset.path)
        (random.path / "dataset.json").write_text(ring.description())
    one, other = (facts_of("train", None, dataset) for dataset in (ring, random))
    differ = [name for name in one if one[name] != other[name]]
    assert any(name.startswith("dataset.json: files.sequences/") for name in differ)
    copy = tmp_path / "copy"
    copy.symlink_to(ring.path)
    assert facts_of("train", None, load_dataset(copy)) == one


def test_one_process_compares_nothing(tmp_path: Path) -> None:
    assert facts_of("train", small_config(tmp_path), None) == {}


def command(of_ranks: list[list[str]], folders: list[str]) -> tuple[Any, str]:
    """Exit status and standard error of the command line on this rank, which is on a host of its own as far as the
    launcher says."""
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    os.environ.pop("TORCHELASTIC_ERROR_FILE", None)
    os.chdir(folders[rank])
    said = io.StringIO()
    with contextlib.redirect_stderr(said), pytest.raises(SystemExit) as stop:
        cli.main(of_ranks[rank])
    return stop.value.code, said.getvalue().splitlines()[-1]


def refused(of_ranks: list[list[str]], folders: list[Path]) -> str:
    """The one line that all ranks say of a user's mistake."""
    (first, one), (second, other) = two_ranks.run(command, of_ranks, [str(folder) for folder in folders])
    assert (first, second) == (2, 2)
    assert re.sub(r"rank \d \(on \S+\) failed: ", "", one) == re.sub(r"rank \d \(on \S+\) failed: ", "", other)
    return max(one, other, key=len)


@pytest.fixture
def hosts(tmp_path: Path) -> list[Path]:
    """The working directories of two ranks, which share nothing but have the same recipe and dataset."""
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        write_dataset(folder / "data")
        (folder / "recipe.toml").write_text(dump_toml(small_config(Path("data"), {"train.epochs": 1})))
    return folders


TRAIN = ["train", "recipe.toml"]


def test_another_seed_on_one_host(hosts: list[Path], tmp_path: Path) -> None:
    train = [*TRAIN, "--run", str(tmp_path / "run")]
    said = refused([train, [*train, "--train.seed", "77"]], hosts)
    assert re.search(r"the ranks differ: train.seed is 0 on rank 0 \(on \S+\) and 77 on rank 1 \(on \S+\); start", said)
    assert not (tmp_path / "run").exists()


def test_another_plugin_of_the_same_name_on_one_host(hosts: list[Path], tmp_path: Path) -> None:
    for rank, folder in enumerate(hosts):
        (folder / "some.py").write_text(f"from logitmix.trainer.schedule import SCHEDULES\n# {rank}\n")
    train = [*TRAIN, "--run", str(tmp_path / "run"), "--import", "some.py"]
    said = refused([train, train], hosts)
    digest = r"[0-9a-f]{12}"
    assert re.search(rf"the ranks differ: the plugin some\.py is {digest} on rank 0 .* and {digest} on rank 1 ", said)


def test_a_run_directory_that_is_not_shared(hosts: list[Path]) -> None:
    train = [*TRAIN, "--run", "run"]
    said = refused([train, train], hosts)
    assert re.search(r"/b/run of rank 1 \(on \S+\) is not \S+/a/run of rank 0 ", said)
    assert not any((folder / "run").exists() for folder in hosts)


def test_an_evaluation_of_another_run_of_the_same_settings(hosts: list[Path]) -> None:
    """Both have a checkpoint of the same name, but not the same weights."""
    with contextlib.chdir(hosts[0]):
        cli.main([*TRAIN, "--run", "run"])
    shutil.copytree(hosts[0] / "run", hosts[1] / "run")
    change_a_weight(hosts[1] / "run")
    said = refused([["evaluate", "run"]] * 2, hosts)
    assert re.search(r"/b/run/\S+ of rank 1 \(on \S+\) is another checkpoint than \S+/a/run/\S+ of rank 0", said)


def change_a_weight(run: Path) -> None:
    (manifest,) = run.glob("checkpoints/*/checkpoint.json")
    (part,) = run.glob("checkpoints/*/*.safetensors")
    content = json.loads(manifest.read_text())
    weights = bytearray(part.read_bytes())
    weights[-1] ^= 1
    part.write_bytes(weights)
    content["files"][part.name] = entry_of(part)
    manifest.write_text(FORMAT.text(content))
