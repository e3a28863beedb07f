"""What checkpoints and run directories do when their files are damaged, edited, foreign or hostile, or cannot be
written."""

import errno
import io
import json
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hostile_json import VALUES, edited, lacking, places, refused
from safetensors.torch import load_file, save_file
from small_data import small_config, write_dataset

from logitmix.comm.process_group import Ranks, process_group
from logitmix.common.checked import Checked, check_file, entry_of
from logitmix.modules.schema import ITEM
from logitmix.serving.directory.reader import read
from logitmix.trainer.commands.report_page import write_report
from logitmix.trainer.config import Config, dump_toml
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.evaluation.evaluate import evaluate_run
from logitmix.trainer.export.export import export
from logitmix.trainer.loop import train
from logitmix.trainer.parallel.optimizer import dense_optimizer
from logitmix.trainer.parallel.parallelize import ParallelModel, model_schema, parallelize
from logitmix.trainer.run import checkpoint, checksums, manifest, saving, state, tensor_files
from logitmix.trainer.run.folder import read_config, read_schema, run_lock
from logitmix.trainer.run.metrics import RunProgress, append_row, keep_rows, read_rows
from logitmix.trainer.run.results import read_ranks, read_results, read_test_users
from logitmix.trainer.run.saving import Saver

PART = "part-00000-of-00001.safetensors"
SETTINGS = {"train.epochs": 3, "train.precision": "fp32", "evaluate.users": 4, "evaluate.baselines": False}
SETTINGS |= {"evaluate.exclude_history": "no"}
SETTINGS |= {"model.similarity.kind": "dot", "model.hindexer.weight": 0.0}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three epochs with the checkpoints of the last two, or of the best and these: steps 4, 8 and 12."""
    folder = tmp_path_factory.mktemp("finished")
    config = small_config(write_dataset(folder / "data"), SETTINGS | {"train.keep": 3})
    train(config, folder / "run")
    assert [path.name for path in steps(folder / "run")] == ["step-12", "step-4", "step-8"]
    return folder / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def steps(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").iterdir())


def newest(run: Path) -> Path:
    return run / "checkpoints" / "step-12"


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any] = lambda content: None) -> None:
    """Changes the manifest of a checkpoint, and makes all digests anew."""
    content = json.loads((path / manifest.MANIFEST).read_text())
    del content["sha256"]
    if isinstance(content.get("files"), dict):
        content["files"] = {name: entry_of(path / name) for name in content["files"] if (path / name).exists()}
    change(content)
    (path / manifest.MANIFEST).write_text(manifest.FORMAT.text(content))


def in_parts(path: Path, count: int) -> list[Path]:
    """Divides a checkpoint's tensors among the parts of several ranks."""
    tensors, parts = load_file(path / PART), [path / manifest.part_name(number, count) for number in range(count)]
    (path / PART).unlink()
    for number, part in enumerate(parts):
        save_file(dict(list(tensors.items())[number::count]), part)
    rewrite(path, lambda content: content.update(files={part.name: entry_of(part) for part in parts}))
    return parts


def resume(run: Path, settings: dict[str, Any] | None = None) -> RunProgress:
    """As train does, without the training."""
    config = small_config(Path(read_config(run).data.path), SETTINGS | (settings or {}))
    with process_group("cpu", 60) as ranks:
        model = parallelize(load_dataset(config.data.path).schema, config, ranks)
        return checkpoint.restore(run, model, dense_optimizer(model.tower, config.dense))


@contextmanager
def told(said: str) -> Iterator[None]:
    """A user's mistake, in one line that says this."""
    with pytest.raises(ValueError) as caught:
        yield
    assert said in str(caught.value) and "\n" not in str(caught.value)


# Hostile files


class _Runs:
    """Makes a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.canary,)


def hostile(kind: str, canary: Path) -> bytes:
    stream, attack = io.BytesIO(), _Runs(canary)
    if kind == "npy":
        np.save(stream, np.array([attack], object), allow_pickle=True)
        return stream.getvalue()
    if kind in ("zip", "legacy"):
        torch.save({"weight": attack}, stream, _use_new_zipfile_serialization=kind == "zip")
        return stream.getvalue()
    return pickle.dumps(attack, protocol=int(kind))


KINDS = ("0", "2", "4", "5", "zip", "legacy", "npy")


@pytest.mark.parametrize("kind", KINDS)
def test_the_hostile_files_would_run_code(tmp_path: Path, kind: str) -> None:
    content = hostile(kind, tmp_path / "canary")
    if kind == "npy":
        np.load(io.BytesIO(content), allow_pickle=True)
    elif kind in ("zip", "legacy"):
        torch.load(io.BytesIO(content), weights_only=False)
    else:
        pickle.loads(content)
    assert (tmp_path / "canary").exists()


PLACES = (PART, "checkpoint.json", ".metadata", "__0_0.distcp", "config.toml", "dataset.json", "metrics.jsonl")
HOSTILE = [
    (place, kind)
    for place in PLACES
    for kind in KINDS
    if place in (PART, "checkpoint.json", ".metadata") or kind in "4"
]
HOSTILE += [("header", kind) for kind in KINDS] + [("results.json", "2"), ("plan.json", "2"), ("another part", "2")]


def place_hostile(run: Path, place: str, attack: bytes) -> None:
    for step in steps(run):
        if place == "header":
            # A whole safetensors file, whose own metadata and whose bytes of a tensor are the attack.
            values = torch.tensor(list(attack), dtype=torch.uint8)
            save_file({"tables/item@0,0": values}, step / PART, {"__reduce__": attack.decode("latin1")})
        elif place == "another part":
            (step / "part-00001-of-00001.safetensors").write_bytes(attack)
        elif (run / place).exists():
            (run / place).write_bytes(attack)
            continue
        else:
            (step / place).write_bytes(attack)
        if place == "checkpoint.json":
            continue

        def add(content: dict[str, Any], step: Path = step) -> None:
            names = [path.name for path in step.iterdir() if path.name != manifest.MANIFEST]
            content["files"] = {name: entry_of(step / name) for name in sorted(names)}

        rewrite(step, add)


@pytest.mark.parametrize(("place", "kind"), HOSTILE)
def test_nothing_hostile_runs_code(run: Path, tmp_path: Path, place: str, kind: str) -> None:
    """In a checkpoint with digests made anew, or in a run's other files; train, evaluate and export."""
    canary, config = tmp_path / "canary", read_config(run)
    place_hostile(run, place, hostile(kind, canary))
    commands: list[Callable[[], object]] = [
        lambda: evaluate_run(run, "test", None, None, "cpu", 1),
        lambda: export(run, tmp_path / "served"),
        lambda: train(config, run),
    ]
    for command in commands:
        try:
            command()
        except ValueError as error:
            assert str(run) in str(error) and "\n" not in str(error)
        else:
            assert place in ("metrics.jsonl", "results.json", "plan.json")
        assert not canary.exists()


def test_a_checkpoint_of_another_dataset_is_named(run: Path, tmp_path: Path) -> None:
    """Settings, counts and schema are equal, so all tensors fit; only the actions are others."""
    data = write_dataset(tmp_path / "data", seed=7)
    config = small_config(data, SETTINGS | {"train.epochs": 1})
    train(config, tmp_path / "other")
    assert read_schema(tmp_path / "other") == read_schema(run)
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(tmp_path / "other" / "checkpoints", run / "checkpoints")
    said = f"{steps(run)[-1] / manifest.MANIFEST}: dataset is not the SHA-256 of {run / 'dataset.json'}"
    warm = small_config(data, SETTINGS | {"warm_start": str(run)})
    commands: list[Callable[[], object]] = [
        lambda: train(read_config(run), run),
        lambda: evaluate_run(run, "test", None, None, "cpu", 1),
        lambda: export(run, tmp_path / "served"),
        lambda: train(warm, tmp_path / "warm"),
    ]
    for command in commands:
        with told(said):
            command()


def test_a_header_beyond_reason_is_not_parsed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in steps(run):
        with (path / PART).open("wb") as out:
            out.write((90_000_000).to_bytes(8, "little"))
            out.truncate(100_000_000)
        rewrite(path)
    monkeypatch.setattr(tensor_files, "safe_open", lambda *_, **__: pytest.fail("it is parsed"))
    with told(f"{newest(run) / PART} is not a safetensors file (its header would have 90,000,000 bytes"):
        resume(run)


def test_a_tensor_in_very_many_pieces_is_checked_in_no_time(tmp_path: Path) -> None:
    """Each with each other in Python takes minutes, and more than an hour for as many as a header can have."""
    file = tensor_files.TensorFile({"rows": [tensor_files.Piece((n, 0), torch.zeros(1, 1)) for n in range(20_000)]})
    (tmp_path / "part").write_bytes(b"".join(file.parts()))
    saved = tensor_files.SavedTensors([tmp_path / "part"])
    before = time.process_time()
    saved.check({"rows": tensor_files.Kind(torch.float32, (20_000, 1))})
    assert time.process_time() - before < 20


@pytest.mark.parametrize(
    "name",
    [
        "config.toml",
        "dataset.json",
        "metrics.jsonl",
        f"checkpoints/step-12/{PART}",
        "checkpoints/step-12/checkpoint.json",
    ],
)
def test_a_pipe_in_place_of_a_file_is_named_and_does_not_block(run: Path, name: str) -> None:
    (run / name).unlink()
    os.mkfifo(run / name)
    said = f"{run / name} is a pipe, not a file"
    if name == "metrics.jsonl":
        with told(said):
            read_rows(run)
    elif name == "config.toml":
        with told("is not a run directory (it has no config.toml)"):
            read_config(run)
    elif name == "dataset.json":
        with told(said):
            read_schema(run)
    else:
        with told(said):
            resume(run, {"train.on_damage": "stop"})


# Edited and foreign checkpoints: the digests are right


def set_(name: str, value: Any) -> Callable[[Path], None]:
    """Sets a field of the manifest, or of an object in it."""

    def edit(step: Path) -> None:
        def change(content: dict[str, Any]) -> None:
            *parents, key = name.split("/")
            for parent in parents:
                content = content[parent]
            content[key] = value

        rewrite(step, change)

    return edit


def without(name: str) -> Callable[[Path], None]:
    return lambda step: rewrite(step, lambda content: content.pop(name))


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    """Changes the tensors of the file."""

    def edit(step: Path) -> None:
        found = load_file(step / PART)
        change(found)
        save_file({name: of.contiguous() for name, of in found.items()}, step / PART)
        rewrite(step)

    return edit


def cast(name: str, dtype: torch.dtype) -> Callable[[Path], None]:
    return tensors(lambda found: found.update({name: found[name].to(dtype)}))


def shape(name: str, *index: Any) -> Callable[[Path], None]:
    return tensors(lambda found: found.update({name: found[name][index].clone()}))


def renamed(name: str, other: str) -> Callable[[Path], None]:
    return tensors(lambda found: found.update({other: found.pop(name)}))


def overlapping(found: dict[str, torch.Tensor]) -> None:
    """As many numbers as there should be, and of the right extent."""
    table = found.pop(TABLE)
    found |= {TABLE: table[:20], "tables/item@10,0": table[:20].clone(), "tables/item@40,0": table[40:]}


TABLE, WEIGHT = "tables/item@0,0", "tower/query_tower.encoder.position_LD@0,0"
MOMENT, COUNT = "table_optimizers/item/exp_avg@0,0", "dense_optimizer/query_tower.encoder.position_LD/step@"
FILE = "step-12/checkpoint.json"
EDITS: list[tuple[Callable[[Path], None], str]] = [
    (without("step"), f"{FILE}: step is missing"),
    (without("files"), f"{FILE}: files is missing"),
    (without("settings"), f"{FILE}: settings is missing"),
    (set_("step", -1), f"{FILE}: step is -1; it must be 0 or more"),
    (set_("step", 10**9), f"{FILE}: step is 1000000000, but the folder is step-12"),
    (set_("step", "12"), f"{FILE}: step is '12'; it must be of type int"),
    (set_("step", True), f"{FILE}: step is True; it must be of type int"),
    (set_("format_version", 2), f"{FILE}: format_version is 2, and this logitmix reads 5"),
    (set_("format_version", "4"), f"{FILE}: format_version is '4', and this logitmix reads 5"),
    (set_("seconds", float("nan")), f"{FILE}: seconds is nan; it must be 0 or more and finite"),
    (set_("examples", -5), f"{FILE}: examples is -5; it must be 0 or more"),
    (set_("examples", None), f"{FILE}: examples is None; it must be of type int"),
    (set_("skipped", 13), f"{FILE}: skipped is 13; it must be from 0 to the step, 12"),
    (set_("validation", []), f"{FILE}: validation is a section, not a value"),
    (set_("validation/hr@10", "high"), f"{FILE}: validation.hr@10 is 'high'; it must be of type float"),
    (set_("validation/hr@10", float("inf")), f"{FILE}: validation.hr@10 is inf; it must be finite"),
    (set_("files", {}), f"{FILE}: files is []; it must be all parts, in order"),
    (set_("files", {"../../config.toml": "0"}), f"{FILE}: files is ['../../config.toml']; it must be all parts"),
    (set_(f"files/{PART}", 3), f"{FILE}: files.{PART} is 3, not a mapping"),
    (set_(f"files/{PART}/bytes", -1), f"{FILE}: files.{PART}.bytes is -1, not a number of bytes"),
    (set_(f"files/{PART}/sha256", None), f"{FILE}: files.{PART}.sha256 is None, not a text"),
    (set_("kind", "another"), f"{FILE}: kind is 'another', not 'logitmix checkpoint'"),
    (set_("schema", {}), f"{FILE}: schema is not that of the run's dataset.json"),
    (set_("schema/tables", [{"name": ITEM, "rows": 9}]), f"{FILE}: schema is not that of the run's dataset.json"),
    (set_("dataset", "0" * 64), f"{FILE}: dataset is not the SHA-256 of "),
    (set_("settings/model.dim", 16), f"{FILE}: settings.model.dim is 16, but the run's is 8"),
    (set_("settings/dense.lr", None), f"{FILE}: settings.dense.lr is None, but the run's is 0.001"),
    (set_("settings/new", 1), f"{FILE}: settings.new is 1, but the run's is None"),
    (set_("more", 1), f"{FILE}: unknown key more"),
    (lambda step: (step / manifest.MANIFEST).write_text("[" * 100_000), f"{FILE} is damaged (nested too deep)"),
    (lambda step: (step / manifest.MANIFEST).write_text("[]"), f"{FILE} is damaged"),
    (lambda step: (step / manifest.MANIFEST).write_bytes(b"\xff"), f"{FILE} is damaged"),
    (lambda step: (step / manifest.MANIFEST).unlink(), f"{FILE} is missing"),
    (lambda step: shutil.copy(step.parent / "step-4" / "checkpoint.json", step), f"{FILE}: step is 4, but the folder"),
    (tensors(lambda found: found.pop(TABLE)), "step-12: it has no tensor tables/item"),
    (tensors(lambda found: found.pop(WEIGHT)), "step-12: it has no tensor tower/query_tower.encoder.position_LD"),
    (tensors(lambda found: found.update({"tables/x@0": torch.ones(1)})), "it has a tensor tables/x, which the model d"),
    (cast(TABLE, torch.float16), "its tensor tables/item is torch.float16, but the model's is torch.float32"),
    (cast(WEIGHT, torch.float64), "its tensor tower/query_tower.encoder.position_LD is torch.float64, but"),
    (shape(TABLE, slice(0, 9)), "its tensor tables/item is [9, 8], but the model"),
    (shape(TABLE, slice(None), slice(0, 4)), "its tensor tables/item is [51, 4], but the model"),
    (shape(WEIGHT, 0), "position_LD has pieces with another number of dim"),
    (renamed(TABLE, "tables/item@1,0"), "its tensor tables/item is [52, 8], but the model"),
    (renamed(TABLE, "tables/item@0"), "its tensor tables/item has pieces with another number of dimensions than"),
    (renamed(TABLE, "tables/item"), f"step-12/{PART}: 'tables/item' does not name a piece of a tensor"),
    (renamed(TABLE, "tables/item@-1,0"), f"step-12/{PART}: 'tables/item@-1,0' does not name a piece of a tensor"),
    (tensors(overlapping), "its tensor tables/item has pieces that overlap or leave a gap"),
]  # fmt: skip
OF_OPTIMIZERS: list[tuple[Callable[[Path], None], str]] = [
    (tensors(lambda found: found.pop(MOMENT)), "step-12: it has no tensor table_optimizers/item/exp_avg"),
    (tensors(lambda found: found.pop(COUNT)), "it has no tensor dense_optimizer/query_tower"),
    (tensors(lambda found: found.update({"table_optimizers/item/sum@0": torch.ones(51)})), "it has a tensor table_o"),
    (cast(MOMENT, torch.float16), "its tensor table_optimizers/item/exp_avg is torch.float16, but the model's"),
    (shape(MOMENT, slice(0, 50)), "its tensor table_optimizers/item/exp_avg is [50, 8], but the model"),
    (tensors(lambda found: found.update({COUNT: torch.ones(2)})), "step has pieces with another number of"),
]  # fmt: skip


@pytest.mark.parametrize("edit", range(len(EDITS)))
def test_an_edited_checkpoint_is_told_in_one_line(run: Path, edit: int) -> None:
    change, said = EDITS[edit]
    change(newest(run))
    for step in steps(run):
        if step != newest(run):
            shutil.rmtree(step)
    with told(said):
        checkpoint.load_saved(run)
    with told(said):
        resume(run)


@pytest.mark.parametrize("edit", range(len(OF_OPTIMIZERS)))
def test_an_edited_state_of_an_optimizer_is_told_in_one_line(run: Path, edit: int) -> None:
    """To training: evaluation and export do not need it."""
    change, said = OF_OPTIMIZERS[edit]
    for step in steps(run):
        change(step)
    assert checkpoint.load_saved(run, "last").step == 12
    with told(said):
        resume(run)


# Edited files of a run


@pytest.mark.parametrize("name", ["step-63.bak", "step-", "step-x", "step-07", "step-\u0663", "step", "step--1"])
def test_other_names_beside_the_checkpoints_are_left_alone(
    run: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    shutil.copytree(newest(run), run / "checkpoints" / name)
    (run / "checkpoints" / "step-99").touch()
    assert checkpoint.load_saved(run, "last").step == resume(run).step == 12
    assert (run / "checkpoints" / name).exists() and (run / "checkpoints" / "step-99").is_file()
    assert capsys.readouterr().err == ""


ROW = "metrics.jsonl, line 2"
LINES = [
    (b"[]", f"{ROW} is not a JSON object"),
    (b"3", f"{ROW} is not a JSON object"),
    (b"null", f"{ROW} is not a JSON object"),
    (b"{", f"{ROW} is damaged ("),
    (b"\xff\xfe", f"{ROW} is damaged ("),
    (b"[" * 100_000, f"{ROW} is damaged (nested too deep)"),
    (b"{}", f"{ROW}: kind is None; it must be a text"),
    (b'{"kind": 3, "step": 1}', f"{ROW}: kind is 3; it must be a text"),
    (b'{"kind": "train"}', f"{ROW} has no field step"),
    (b'{"kind": "train", "step": -1}', f"{ROW}: step is -1; it must be a count"),
    (b'{"kind": "train", "step": "1"}', f"{ROW}: step is '1'; it must be a number"),
    (b'{"kind": "train", "step": 1.5}', f"{ROW}: step is 1.5; it must be a count"),
    (b'{"kind": "train", "step": 1, "loss": "low"}', f"{ROW}: loss is 'low'; it must be a number"),
    (b'{"kind": "validation", "step": 1}', f"{ROW} has no field hr@10"),
    (b'{"kind": "validation", "step": 1, "hr@10": null}', f"{ROW}: hr@10 is None; it must be a number"),
]


@pytest.mark.parametrize("line", range(len(LINES)))
def test_a_line_that_is_no_row_of_metrics_is_told(run: Path, tmp_path: Path, line: int) -> None:
    content, said = LINES[line]
    (run / "digests.json").unlink()
    path = run / "metrics.jsonl"
    rows = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([rows[0], content + b"\n", *rows[2:]]))
    commands: list[Callable[[], object]] = [lambda: train(replace_train(read_config(run), refit=True), run)]
    if b"validation" not in content:
        commands.append(lambda: write_report([run], tmp_path / "report.html"))
    for command in commands:
        with told(said):
            command()


def replace_train(config: Config, **settings: Any) -> Config:
    return replace(config, train=replace(config.train, **settings))


RESULTS = [
    (b"{", "results.json is damaged"),
    (b"\xff", "results.json is damaged"),
    (b"[]", "results.json is not a JSON object"),
    (b"{}", "results.json has no numbers"),
    (b'{"mrr": 1}', "results.json has no field"),
    (b'{"step": "x"}', "results.json: step is 'x'; it must be a number"),
    (b'{"step": 12, "seconds": null}', "results.json: seconds is None; it must be a number"),
    (b'{"step": 12, "validation": {"hr@10": "x"}}', "results.json: validation: hr@10 is 'x'; it must be a number"),
]


@pytest.mark.parametrize("edit", range(len(RESULTS)))
def test_edited_results_are_told(run: Path, tmp_path: Path, edit: int) -> None:
    content, said = RESULTS[edit]
    (run / "digests.json").unlink()
    (run / "results.json").write_bytes(content)
    for command in (lambda: export(run, tmp_path / "out"), lambda: write_report([run], tmp_path / "report.html")):
        with told(said):
            command()


@pytest.mark.parametrize(
    "content", [b"{}", b"[0]", b"[1.5]", b'["1"]', b"[true]", b"[1, [2]]", b"[99999999999999999999]"]
)
def test_edited_ranks_are_told(run: Path, content: bytes) -> None:
    (run / "digests.json").unlink()
    (run / "test_ranks.json").write_bytes(content)
    with told("test_ranks.json is not a list of ranks from 1"):
        read_ranks(run)


@pytest.mark.parametrize("content", [b"{}", b"[0]", b"[null]", b'["u", ["v"]]'])
def test_edited_lists_of_users_are_told(run: Path, content: bytes) -> None:
    (run / "digests.json").unlink()
    (run / "test_users.json").write_bytes(content)
    with told("test_users.json is not a list of raw ids of users"):
        read_test_users(run)


DESCRIPTIONS = [
    (b"{", "dataset.json is damaged"),
    (b"\xff", "dataset.json is damaged"),
    (b"[]", "dataset.json is not a JSON object"),
    (b"{}", "dataset.json: users is None; it must be a count"),
    (b'{"users": -1}', "dataset.json: users is -1; it must be a count"),
    (b'{"users": 1, "items": 2, "actions": 3}', "dataset.json: name is None; it must be a text"),
    (b'{"users": 1, "items": 2, "actions": 3, "name": ""}', "dataset.json has no field schema"),
    (b'{"users": 1, "items": 2, "actions": 3, "name": "", "schema": 3}', "dataset.json: schema is not a JSON object"),
    (b'{"users": 1, "items": 2, "actions": 3, "name": "", "schema": {}}', "dataset.json: schema.features is missing"),
]  # fmt: skip


@pytest.mark.parametrize("edit", range(len(DESCRIPTIONS)))
def test_an_edited_description_of_the_dataset_is_told(run: Path, edit: int) -> None:
    content, said = DESCRIPTIONS[edit]
    (run / "digests.json").unlink()
    (run / "dataset.json").write_bytes(content)
    with told(said):
        checkpoint.load_saved(run)
    config = read_config(run)
    for command in (lambda: evaluate_run(run, "test", None, None, "cpu", 1), lambda: train(config, run)):
        with told("dataset"):
            command()


CONFIGS = [
    (b"\xff", "config.toml is damaged"),
    (b"[", "config.toml: not valid TOML"),
    (b"a = " + b"[" * 100_000, "config.toml: not valid TOML"),
    (b"what = 3", "config.toml: unknown key what"),
    (b"[model]\ndim = 'wide'", "config.toml: model.dim is 'wide'; it must be of type int"),
    (b"[model]\ndim = -8", "config.toml: model.dim (-8) must be divisible by 4"),
    (b"model = 3", "config.toml: model is a section, not a value"),
]


@pytest.mark.parametrize("edit", range(len(CONFIGS)))
def test_an_edited_configuration_is_told(run: Path, tmp_path: Path, edit: int) -> None:
    content, said = CONFIGS[edit]
    (run / "digests.json").unlink()
    config = read_config(run)
    (run / "config.toml").write_bytes(content)
    for command in (lambda: export(run, tmp_path / "out"), lambda: train(config, run)):
        with told(said):
            command()


# Damaged checkpoints give way to others


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a flipped bit": lambda step: flip(step / PART),
    "a missing file": lambda step: (step / PART).unlink(),
    "a damaged manifest": lambda step: flip(step / manifest.MANIFEST),
    "no manifest": lambda step: (step / manifest.MANIFEST).unlink(),
    "an edited manifest": set_("examples", -1),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_training_goes_on_from_the_checkpoint_before(
    run: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    DAMAGES[damage](newest(run))
    with pytest.raises(
        ValueError, match=r"step-12\S* .*; remove .*step-12 to use another checkpoint, or set train.on_d"
    ):
        resume(run, {"train.on_damage": "stop"})
    (run / "checkpoints" / "damaged-step-12").mkdir()
    rewrite(run / "checkpoints" / "step-8")
    capsys.readouterr()
    assert resume(run).step == 8
    (line,) = capsys.readouterr().err.splitlines()
    file = manifest.MANIFEST if "manifest" in damage else PART
    assert line.startswith(f"{newest(run) / file}") and line.endswith(
        f": step 12 is lost (kept in {newest(run).parent}/damaged-step-12.2), and training continues from step 8"
    )
    names = [path.name for path in steps(run)]
    assert names == ["damaged-step-12", "damaged-step-12.2", "step-4", "step-8"]
    assert resume(run).step == 8
    assert capsys.readouterr().err == ""


def test_a_start_removes_the_checkpoints_that_a_killed_job_did_not(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not in favor of damaged ones, and though there is nothing to train."""
    config, rmtree = replace_train(read_config(run), keep=1), shutil.rmtree
    set_("validation/hr@10", 0.9)(run / "checkpoints" / "step-4")

    def broken(path: Path) -> None:
        rmtree(path)
        raise OSError(errno.EIO, "broken", "a file")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", broken)
        with pytest.raises(OSError, match=r"^a file could not be removed \(broken\)$"):
            train(config, Path(shutil.copytree(run, run.with_name("other"))))
        train(replace_train(config, on_save_failure="continue"), run)
    assert "a file could not be removed (broken)\n" in capsys.readouterr().err
    assert [path.name for path in steps(run)] == ["step-12", "step-4"]
    run = run.with_name("other")
    shutil.copytree(newest(run), run / "checkpoints" / "step-8")
    set_("step", 8)(run / "checkpoints" / "step-8")
    flip(newest(run) / PART)
    train(config, run)
    assert "training continues from step 8" in capsys.readouterr().err
    assert [path.name for path in steps(run)] == ["damaged-step-12", "step-12", "step-4"]


def test_training_ends_as_if_nothing_had_been_damaged(run: Path, finished: Path) -> None:
    flip(newest(run) / PART)
    flip(run / "checkpoints" / "step-8" / PART)
    config = read_config(run)
    whole = train(config, finished)
    again = train(config, run)
    timing = ("seconds", "examples_per_second")
    assert {name: of for name, of in again.items() if name not in timing} == {
        name: of for name, of in whole.items() if name not in timing
    }
    assert load_file(newest(run) / PART).keys() == load_file(newest(finished) / PART).keys()
    for name, values in load_file(newest(finished) / PART).items():
        assert torch.equal(load_file(newest(run) / PART)[name], values)


def test_where_none_is_intact_nothing_is_moved(run: Path) -> None:
    for step in steps(run):
        flip(step / PART)
    before = steps(run)
    with told(
        f"{newest(run) / PART} is damaged (its SHA-256 is not that in checkpoint.json), and no other checkpoint in"
    ):
        resume(run)
    assert steps(run) == before


@pytest.mark.parametrize("which", ["best", "last"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_export_and_evaluation_say_what_they_take_instead(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str, which: Any
) -> None:
    best = checkpoint.load_saved(run, which).step
    assert capsys.readouterr().err == ""
    DAMAGES[damage](run / "checkpoints" / f"step-{best}")
    source = export(run, tmp_path / "served", which=which)["step"]
    assert source != best
    said = [capsys.readouterr().err]
    if which == "best":
        assert evaluate_run(run, "test", None, None, "cpu", 1)["step"] == source
        said.append(capsys.readouterr().err)
    for line in said:
        assert line.startswith(f"{run}/checkpoints/step-{best}/") and line.count("\n") == 1
        assert line.endswith(f": instead of step-{best}, step {source} of {run} is taken\n")
    assert len(steps(run)) == 3


# Checkpoints that cannot be written


class Failure:
    """Lets the n-th write, sync or rename fail, and counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, code: int) -> None:
        self.count = 0

        def failing(name: str) -> None:
            real = getattr(os, name)

            def call(*arguments: Any) -> Any:
                self.count += 1
                if self.count == number:
                    raise OSError(code, os.strerror(code))
                # A short write now and then, and no waiting for the disk.
                if name == "write" and self.count % 3 == 0:
                    return real(arguments[0], arguments[1][: len(arguments[1]) // 2 + 1])
                return None if name == "fsync" else real(*arguments)

            monkeypatch.setattr(os, name, call)

        for name in ("write", "fsync", "rename"):
            failing(name)


@pytest.fixture
def trained(finished: Path) -> Iterator[tuple[ParallelModel, torch.optim.Optimizer]]:
    config = replace_train(read_config(finished), keep=9)
    with process_group("cpu", 60) as ranks:
        model = parallelize(load_dataset(config.data.path).schema, config, ranks)
        yield model, dense_optimizer(model.tower, config.dense)


@pytest.mark.parametrize(("step", "in_background"), [(12, False), (16, False), (16, True)])
def test_whatever_fails_the_checkpoint_before_stays(
    run: Path,
    trained: tuple[ParallelModel, torch.optim.Optimizer],
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    in_background: bool,
) -> None:
    """Also where it is saved again, as a step is that was saved before it was evaluated."""
    model, optimizer = trained
    model = replace(model, config=replace_train(model.config, save_in_background=in_background))
    before, number, messages = steps(run), 0, set()
    out = run / "checkpoints" / f"step-{step}"
    while True:
        number += 1
        append_row(run, "train", step, {"loss": 0.5})
        with monkeypatch.context() as patch:
            failure = Failure(patch, number, errno.EIO if number % 2 else errno.ENOSPC)
            try:
                with Saver(run, model, optimizer) as saver:
                    saver.save(RunProgress(step, number), wait=False)
                    while saver._pending:
                        saver.poll()
                assert failure.count < number
                break
            except OSError as error:
                said = str(error)
        messages.add(re.split(r" \(|, and ", said)[0])
        kept = out in steps(run) and manifest.read_manifest(out).seconds == number
        assert said.startswith(f"{out} is saved, but ") if kept else said.endswith("; nothing of it was kept")
        assert steps(run) == sorted({*before, out} if kept else before)
        assert checkpoint.load_saved(run, "last").step == (step if kept else 12)
        if out not in before:
            shutil.rmtree(out, ignore_errors=True)
    needed = (newest(run) / PART).stat().st_size
    assert messages == {f"{out} could not be written", f"no room for {out}: it needs {needed:,} bytes"} | {
        f"{out} is saved, but {path} could not be updated"
        for path in (run, run / "checkpoints", run / "digests.json", run / "metrics.jsonl")
    }
    assert failure.count > 40 and checkpoint.load_saved(run, "last").step == step


def test_a_power_loss_at_any_moment_of_a_save(
    run: Path, trained: tuple[ParallelModel, torch.optim.Optimizer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can take the rows that were not synced: the others pass for whole, and are all up to the newest checkpoint."""
    after, rows, out, checks = tmp_path / "after", run / "metrics.jsonl", run / "checkpoints" / "step-16", 0
    on_disk = rows.stat().st_size
    append_row(run, "train", 16, {"loss": 0.5})
    after.mkdir()

    def checked(name: str) -> None:
        real = getattr(os, name)

        def call(first: Any, *others: Any) -> None:
            nonlocal on_disk, checks
            real(first, *others)
            if name == "fsync" and os.path.samestat(os.fstat(first), rows.stat()):
                on_disk = rows.stat().st_size
            shutil.copy(run / "digests.json", after)
            (after / "metrics.jsonl").write_bytes(rows.read_bytes()[:on_disk])
            assert 16 in [row["step"] for row in read_rows(after)] or not out.exists()
            checks += 1

        monkeypatch.setattr(os, name, call)

    for name in ("fsync", "rename", "replace"):
        checked(name)
    Saver(run, *trained).save(RunProgress(16))
    assert checks > 6 and on_disk == rows.stat().st_size


def test_training_is_the_same_with_saves_in_the_background(finished: Path, tmp_path: Path) -> None:
    config = replace_train(read_config(finished), save_in_background=True, checkpoint_every=2)
    train(config, tmp_path / "run")
    for step in ("step-4", "step-12"):
        ours, expected = (
            json.loads((of / "checkpoints" / step / manifest.MANIFEST).read_text())["files"]
            for of in (tmp_path / "run", finished)
        )
        assert ours == expected
    assert [path.name for path in steps(tmp_path / "run")] == ["step-10", "step-12", "step-4", "step-8"]


def test_a_full_disk_is_noticed_before_anything_is_written(
    run: Path,
    trained: tuple[ParallelModel, torch.optim.Optimizer],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, optimizer = trained
    before, needed = steps(run), (newest(run) / PART).stat().st_size
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9**9, 9**9, needed - 1))
    said = (
        f"no room for {run}/checkpoints/step-16: it needs {needed:,} bytes, and {needed - 1:,} are free; nothing of it"
    )
    with pytest.raises(OSError, match=said):
        Saver(run, model, optimizer).save(RunProgress(16))
    goes_on = replace(model, config=replace_train(model.config, on_save_failure="continue"))
    for wait in (False, True):
        Saver(run, goes_on, optimizer).save(RunProgress(16), wait)
        assert capsys.readouterr().err == f"{said} was kept{'' if wait else '; training goes on'}\n"
    assert steps(run) == before
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9**9, 9**9, needed))
    Saver(run, model, optimizer).save(RunProgress(16))


def test_a_step_is_saved_though_what_follows_fails(
    run: Path,
    trained: tuple[ParallelModel, torch.optim.Optimizer],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, optimizer = trained

    def broken(run: Path) -> None:
        raise OSError(errno.EIO, "broken", "rows")

    monkeypatch.setattr(saving, "checksum_rows", broken)
    goes_on = replace(model, config=replace_train(model.config, on_save_failure="continue"))
    assert Saver(run, goes_on, optimizer).save(RunProgress(16), wait=False)
    said = f"{run}/checkpoints/step-16 is saved, but rows could not be updated (broken)"
    assert capsys.readouterr().err == f"{said}; training goes on\n"
    with pytest.raises(OSError, match=re.escape(said)):
        Saver(run, model, optimizer).save(RunProgress(16))


def test_what_a_killed_job_left_is_removed_before_anything_is_written(run: Path) -> None:
    folder = run / "checkpoints"
    for name in (".step-16.0123abcd.part", ".step-8.0123abcd.old"):
        shutil.copytree(newest(run), folder / name)
    # Killed between the two renames of a step that is saved again.
    newest(run).rename(folder / ".step-12.0123abcd.old")
    before = {path: path.stat().st_mtime_ns for path in run.iterdir() if path.name != ".lock"}
    with process_group("cpu", 60) as ranks, run_lock(run, ranks):
        assert [path.name for path in steps(run)] == ["step-12", "step-4", "step-8"]
        assert {path: path.stat().st_mtime_ns for path in before if path != folder} == {
            path: time for path, time in before.items() if path != folder
        }
    assert checkpoint.load_saved(run, "last").step == 12


@pytest.mark.parametrize("kills", [20, pytest.param(300, marks=pytest.mark.slow)])
def test_saves_that_are_killed_at_any_moment_leave_the_newest_that_was_acknowledged(run: Path, kills: int) -> None:
    """In the background or not."""
    config = replace_train(read_config(run), save_in_background=True)
    checksums.write_checksummed(run / "config.toml", dump_toml(config))
    program = Path(__file__).with_name("killed_saves.py")
    done = subprocess.run([sys.executable, program, run, str(kills)], capture_output=True, text=True, timeout=1_000)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == kills
    for kill in found:
        # What was committed just before the kill was perhaps not acknowledged.
        assert kill["loaded"] - kill["acknowledged"] in (0, 1)
    assert sum(bool(kill["left"]) for kill in found) > kills // 4, "most are killed while they save"
    assert all(path.name.startswith("step-") for path in steps(run))


# Every file, every kind of damage


def damaged(content: bytes, chance: random.Random, flips: int, cuts: int) -> Iterator[bytes]:
    for _ in range(flips):
        at, bit = chance.randrange(len(content)), 1 << chance.randrange(8)
        yield content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :]
    for length in {0, 1, *range(0, len(content), max(1, len(content) // cuts)), len(content) - 1}:
        yield content[:length]
    yield bytes(len(content))
    yield content + b"\0"
    yield content + b"\n"


def test_every_damage_to_a_checkpoint_is_found(run: Path) -> None:
    config, step, chance = read_config(run), newest(run), random.Random(0)
    with process_group("cpu", 60) as ranks:
        model = parallelize(load_dataset(config.data.path).schema, config, ranks)
        expected = state.kinds_in(state.state_of(model, dense_optimizer(model.tower, config.dense)))
        schema = model.tower.schema

    def opened() -> checkpoint._Opened:
        return checkpoint._open(step, config, schema, expected, None, ())

    opened()
    found = 0
    for file in sorted(step.iterdir()):
        content = file.read_bytes()
        for other in damaged(content, chance, 1050, 100):
            file.write_bytes(other)
            with pytest.raises(ValueError, match=file.name):
                opened()
            found += 1
        file.write_bytes((step.parent / "step-8" / file.name).read_bytes())
        with pytest.raises(ValueError, match=file.name):
            opened()
        file.unlink()
        with pytest.raises(ValueError, match=f"{file.name} is missing"):
            opened()
        file.write_bytes(content)
    assert found > 2200
    opened()


READERS: dict[str, Callable[[Path], object]] = {
    "config.toml": read_config,
    "dataset.json": read_schema,
    "metrics.jsonl": read_rows,
    "results.json": read_results,
    "test_ranks.json": read_ranks,
    "test_users.json": read_test_users,
}


@pytest.fixture(scope="module")
def another(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of other data."""
    folder = tmp_path_factory.mktemp("another")
    train(small_config(write_dataset(folder / "data", users=30, items=25), SETTINGS), folder / "run")
    return folder / "run"


@pytest.mark.parametrize("number", range(3))
def test_every_part_is_verified(run: Path, number: int) -> None:
    part = in_parts(newest(run), 3)[number]
    assert checkpoint.load_saved(run, "last").step == 12
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    with told(f"{part} is damaged (its SHA-256 is not that in checkpoint.json)"):
        resume(run, {"train.on_damage": "stop"})


@pytest.mark.parametrize("world_size", range(1, 6))
def test_the_ranks_verify_all_parts_between_them(run: Path, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path, verified = newest(run), []
    parts = in_parts(path, 4)

    def check(file: Path, *given: Any) -> None:
        verified.append(file)
        check_file(file, *given)

    monkeypatch.setattr(checkpoint, "check_file", check)
    config = read_config(run)
    schema = model_schema(read_schema(run), config)
    for rank in range(world_size):
        ranks = Ranks(rank, world_size, rank, torch.device("cpu"), group=None)  # type: ignore[arg-type]
        # Nothing of the model is expected.
        checkpoint._open(path, config, schema, {}, ranks, beside=("",))
    assert sorted(verified) == parts


@pytest.mark.parametrize("name", READERS)
def test_every_damage_to_a_file_of_a_run_is_found(run: Path, another: Path, name: str) -> None:
    chance, file, reader = random.Random(1), run / name, READERS[name]
    content = file.read_bytes()
    swapped = [another / name, *(run / of for of in READERS if of != name)]
    for other in [*damaged(content, chance, 400, 30), *(of.read_bytes() for of in swapped)]:
        if name == "metrics.jsonl" and other.startswith(content):
            continue  # rows may follow
        file.write_bytes(other)
        with pytest.raises(ValueError, match=rf"{file} is damaged .*; restore it, or remove .*/digests\.json"):
            reader(run)
    file.unlink()
    with pytest.raises((ValueError, FileNotFoundError)) as missing:
        reader(run)
    assert name in str(missing.value)
    file.write_bytes(content)
    reader(run)


def test_every_damage_to_the_digests_of_a_run_is_found(run: Path) -> None:
    file = run / "digests.json"
    content = file.read_bytes()
    for other in damaged(content, random.Random(1), 400, 30):
        file.write_bytes(other)
        with pytest.raises(ValueError, match=f"{file} is damaged"):
            read_config(run)
    # Without it, files are read as they are.
    file.unlink()
    (run / "config.toml").write_text((run / "config.toml").read_text() + "\n")
    assert read_config(run).train.epochs == 3


def test_digests_of_another_kind_or_run_are_refused(run: Path, tmp_path: Path) -> None:
    file, content = run / "digests.json", json.loads((run / "digests.json").read_text())
    export(run, tmp_path / "served")
    others = [run / "dataset.json", newest(run) / "checkpoint.json", tmp_path / "served" / "manifest.json"]
    entries = {name: of for name, of in content["files"].items() if name == "dataset.json"}
    made = [
        content | {"kind": "digests of others"},
        content | {"files": content["files"] | {"tower.safetensors": None}},
        content | {"files": content["files"] | {"config.toml": {"bytes": "1", "sha256": ""}}},
        content | {"files": {}},
        content | {"files": entries},
    ]
    for other in [*(of.read_text() for of in others), *map(signed, made)]:
        file.write_text(other)
        with told("digests.json"):
            write_report([run], tmp_path / "report.html")
    # Moved or copied as a whole, it is the same run.
    file.write_text(signed(content))
    write_report([shutil.copytree(run, tmp_path / "moved")], tmp_path / "report.html")


def signed(content: dict[str, Any]) -> str:
    return Checked("", 1).text(content)


def test_a_run_that_was_killed_while_it_notes_a_digest_goes_on(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each write of a start: whatever stays is taken for whole."""
    config, wrote = read_config(run), checksums.write_whole
    for last in range(1, 20):
        left = last

        def killed(path: Path, text: str) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
            wrote(path, text)

        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(checksums, "write_whole", killed)
            for interval in (2, 3):
                changed = replace_train(config, log_every=interval)
                checksums.write_checksummed(run / "config.toml", dump_toml(changed))
                keep_rows(run, 12 - interval)
        assert read_config(run).train.log_every in (2, 3, config.train.log_every)
        assert read_rows(run)
    assert left > 0  # the last time, nothing killed it


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl"])
@pytest.mark.parametrize("writes", range(4))
def test_a_file_that_is_replaced_while_it_is_read_is_not_damaged(
    run: Path, monkeypatch: pytest.MonkeyPatch, name: str, writes: int
) -> None:
    """A job that starts again has done so many of its writes between the reads of the digest and of the file."""
    file, left, digests, wrote = run / name, writes, checksums.digests_of, checksums.write_whole
    old = file.read_text()
    new = old[: old.index("\n") + 1]

    def ended(path: Path, text: str) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        wrote(path, text)

    def read_before(run: Path) -> dict[str, Any]:
        found = digests(run)
        monkeypatch.setattr(checksums, "digests_of", digests)
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(checksums, "write_whole", ended)
            checksums.write_checksummed(file, new)
        return found

    monkeypatch.setattr(checksums, "digests_of", read_before)
    assert checksums.read_checksummed(file) == (new if writes > 1 else old).encode()
    assert left == (-1 if writes < 3 else 0)


def test_every_damage_to_an_export_is_found(run: Path, tmp_path: Path) -> None:
    served = tmp_path / "served"
    export(run, served)
    chance = random.Random(2)
    for file in sorted(served.iterdir()):
        content = file.read_bytes()
        for other in damaged(content, chance, 60, 20) if file.name != "README.md" else ():
            file.write_bytes(other)
            with pytest.raises(ValueError, match=file.name):
                read(served)
        file.write_bytes(content)
    read(served)


def test_every_field_of_a_manifest_edited(run: Path) -> None:
    """With its digest made anew: it is taken, or refused in one line that names the file and the field."""
    chance, file, taken = random.Random(0), newest(run) / manifest.MANIFEST, 0
    for other in steps(run)[1:]:
        shutil.rmtree(other)
    tree = json.loads(file.read_text())
    del tree["sha256"]
    for at in places(tree):
        values = chance.sample(VALUES, 4)
        for text in [*(edited(tree, (at, value)) for value in values), *([lacking(tree, at)] if at else [])]:
            file.write_text(signed_text(text))
            taken += not refused(lambda: checkpoint.load_saved(run), "checkpoint.json", at)
    assert taken < 40


def signed_text(text: str) -> str:
    try:
        content = json.loads(text)
        return manifest.FORMAT.text(content) if isinstance(content, dict) else text
    except (ValueError, RecursionError):
        return text


@pytest.mark.parametrize("seconds", [0, 1e-320, 1e99])
def test_a_checkpoint_that_took_no_time_or_for_ever(run: Path, seconds: float) -> None:
    for step in steps(run):
        rewrite(step, lambda content: content.update(seconds=seconds))
    train(read_config(run), run)
    assert read_results(run)["examples_per_second"] >= 0
