"""Runs, datasets and exports at URLs: the promises of docs/reliability.md, on fsspec's memory, with several hosts that
have a cache each. tests/integration/test_s3.py has the commands on S3."""

import concurrent.futures
import fcntl
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
from damages import PART, SETTINGS
from small_data import a_model, small_config, write_dataset
from stores import Memory
from waiting import until

from logitmix.comm.process_group import _Place, process_group
from logitmix.common.files import file_digest
from logitmix.common.messages import shown
from logitmix.common.storage import fetch_run, path_of, push
from logitmix.launch.processes import Stopped
from logitmix.serving import live
from logitmix.serving.live import LiveExport
from logitmix.serving.programs import load_program
from logitmix.serving.retriever import Retriever
from logitmix.trainer import api
from logitmix.trainer.config import Config
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.export import export as exporting
from logitmix.trainer.logs.telemetry import Telemetry
from logitmix.trainer.loop import train
from logitmix.trainer.prepare import prepare as preparing
from logitmix.trainer.run.checkpoint import load_saved
from logitmix.trainer.run.folder import checkpoint_paths, require_one_host, run_lock
from logitmix.trainer.run.metrics import RunProgress, read_rows
from logitmix.trainer.run.saving import Saver
from logitmix.trainer.run.stages import final_run

DATA, RUN, EXPORT = "memory://bucket/data/small", "memory://bucket/runs/a", "memory://bucket/exports/a"


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Memory:
    return Memory(monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset, data, and an undisturbed run of three epochs on it, run, on a disk: steps 4, 8 and 12."""
    folder = tmp_path_factory.mktemp("local")
    train(small_config(write_dataset(folder / "data"), SETTINGS | {"train.keep": 3}), folder / "run")
    return folder


@pytest.fixture
def bucket(memory: Memory, local: Path) -> Memory:
    """The store, with the dataset."""
    put(local / "data", DATA)
    return memory


def put(local: Path, url: str) -> Path:
    """Puts a directory there, and the copy of this host."""
    path = path_of(url)
    shutil.copytree(local, path, ignore=shutil.ignore_patterns(".lock"))
    push(path)
    return path


def config(**settings: Any) -> Config:
    return small_config(Path("unused"), SETTINGS | {"train.keep": 1, "data.path": DATA} | settings)


def ended_as(undisturbed: Path, run: Path) -> None:
    """Weights, optimizers' states and rows of metrics."""
    last = "checkpoints/step-12"
    assert file_digest(run / last / PART) == file_digest(undisturbed / last / PART)
    kept = ("kind", "step", "loss", "hr@10", "mrr", "gradient_norm")

    def rows(of: Path) -> list[dict[str, Any]]:
        return [{name: row[name] for name in kept if name in row} for row in read_rows(of)]

    assert rows(run) == rows(undisturbed)
    results = [json.loads((of / "results.json").read_text()) for of in (run, undisturbed)]
    assert results[0]["step"] == results[1]["step"] and results[0]["mrr"] == results[1]["mrr"]


def test_a_run_goes_on_elsewhere_bit_equal(
    bucket: Memory, local: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:

    def killed(telemetry: Telemetry, pipeline: Any, epoch: float) -> None:
        if pipeline.step == 10:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Telemetry, "log_step", killed)
        with pytest.raises(KeyboardInterrupt):
            train(config(), path_of(RUN))
    bucket.host("elsewhere")
    results = train(config(), path_of(RUN))
    assert f"continuing {RUN} after step 8" in capsys.readouterr().err.replace("\n", "")
    bucket.host("third")
    run = fetch_run(RUN)
    assert json.loads((run / "results.json").read_text()) == results
    assert 'path = "memory://bucket/data/small"' in (run / "config.toml").read_text()
    # The first rows came without a log, see above.
    last = "checkpoints/step-12"
    assert file_digest(run / last / PART) == file_digest(local / "run" / last / PART)


def test_a_store_that_takes_nothing_from_start_to_end(bucket: Memory, capsys: pytest.CaptureFixture[str]) -> None:
    """Each failure is said; the results are there, and the same command uploads the run."""
    settings = config(**{"train.on_save_failure": "continue", "train.epochs": 2, "train.refit": True})
    with bucket.watched(lambda number, name, file: name in ("put_file", "pipe_file")):
        results = train(settings, path_of(RUN))
    said = [line for line in capsys.readouterr().err.splitlines() if "could not be written" in line]
    assert said[0].endswith(f"(the store is gone); what it lacks is in {path_of(RUN)}; training goes on")
    at_the_end = f"{said[0].removesuffix('training goes on')}the run is finished there, and the same command uploads it"
    # Of the run and of its refit.
    assert said.count(at_the_end) == 2 and said[-1] == at_the_end and bucket.files("bucket/runs/a") == {}
    assert train(settings, path_of(RUN))["mrr"] == results["mrr"]
    bucket.host("elsewhere")
    run = fetch_run(RUN)
    assert (run / "results.json").exists() and load_saved(final_run(run)).step == results["step"]


@pytest.fixture
def step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is saved in the background is uploaded before the next step ends."""
    poll = Saver.poll

    def until_uploaded(saver: Saver) -> None:
        poll(saver)
        while saver._pending or saver._upload:
            poll(saver)

    monkeypatch.setattr(Saver, "poll", until_uploaded)


def test_uploads_in_the_background(bucket: Memory, local: Path, step_by_step: None) -> None:
    train(config(**{"train.save_in_background": True}), path_of(RUN))
    bucket.host("elsewhere")
    ended_as(local / "run", fetch_run(RUN))


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("in_background", [False, True])
def test_what_could_not_be_uploaded_is_with_the_next_upload(
    bucket: Memory,
    local: Path,
    step_by_step: None,
    capsys: pytest.CaptureFixture[str],
    goes_on: bool,
    in_background: bool,
) -> None:
    """Of the same job if it goes on, or else of the next one."""
    settings = {"train.save_in_background": in_background, "train.on_save_failure": "continue" if goes_on else "stop"}
    said = f"{RUN} could not be written (the store is gone); what it lacks is in {path_of(RUN)}"
    fails = bucket.watched(lambda number, name, file: name == "put_file" and "step-8" in file)
    with fails, nullcontext() if goes_on else pytest.raises(OSError, match=f"^{re.escape(said)}$"):
        train(config(**settings), path_of(RUN))
    assert (f"{said}; training goes on\n" in capsys.readouterr().err) == goes_on
    if not goes_on:
        assert not any("step-8" in name for name in bucket.files("bucket/runs/a"))
        train(config(), path_of(RUN))
    bucket.host("elsewhere")
    ended_as(local / "run", fetch_run(RUN))


@pytest.fixture
def savers(memory: Memory, local: Path) -> Iterator[Callable[..., Saver]]:
    """Makes a Saver of a run there with these settings, which saves in the background."""
    with ExitStack() as held:

        def saver(**settings: Any) -> Saver:
            of = config(**{"train.save_in_background": True}, **settings)
            path_of(RUN).mkdir(parents=True, exist_ok=True)
            (path_of(RUN) / "dataset.json").touch()
            model = held.enter_context(a_model(of, load_dataset(local / "data").schema))
            return held.enter_context(Saver(path_of(RUN), of, *model))

        yield saver


def saved(saver: Saver) -> list[str]:
    return [path.name for path in checkpoint_paths(saver.run)]


@pytest.mark.parametrize("goes_on", [False, True])
def test_an_upload_that_fails_drops_no_checkpoint(
    memory: Memory, savers: Callable[..., Saver], capsys: pytest.CaptureFixture[str], goes_on: bool
) -> None:
    settings = {"train.keep": 3, "train.on_save_failure": "continue" if goes_on else "stop"}
    saver, said = savers(**settings), f"{RUN} could not be written (the store is gone); what it lacks is in"
    with memory.watched(lambda *_: True):
        saver.save(RunProgress(1), wait=False)
        while not saver._upload:
            saver.poll()
        concurrent.futures.wait([saver._upload])
    with nullcontext() if goes_on else pytest.raises(OSError, match=re.escape(said)):
        assert saver.save(RunProgress(2))
    assert capsys.readouterr().err.count(said) == goes_on
    assert saved(saver) == ["step-1", "step-2"]


def test_nothing_is_removed_during_an_upload(memory: Memory, savers: Callable[..., Saver]) -> None:
    saver, during = savers(), []

    def slow(*_: object) -> bool:
        until(lambda: bool(during) or len(saved(saver)) == 2)
        during.append(saved(saver))
        return False

    with memory.watched(slow):
        saver.save(RunProgress(1), wait=False)
        while not saver._upload:
            saver.poll()
        assert saver.save(RunProgress(2))
    assert during[0] == ["step-1", "step-2"] and saved(saver) == ["step-2"]


@pytest.mark.parametrize(("fails", "said"), [("put_file", RUN), ("", f"^{RUN} could not be read")])
def test_where_the_store_takes_nothing_or_does_not_answer_no_step_is_trained(
    bucket: Memory, fails: str, said: str
) -> None:
    with bucket.watched(lambda number, name, file: fails in name), pytest.raises(OSError, match=said):
        train(config(), path_of(RUN))
    assert not path_of(RUN).exists()


def test_a_job_that_fails_before_there_is_anything_to_keep_leaves_nothing(
    bucket: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Telemetry, "__init__", None)
    with bucket.watched() as done, pytest.raises(TypeError):
        train(config(), path_of(RUN))
    assert any(of.endswith("config.toml") for of in done)
    assert bucket.files("bucket/runs/a") == {}


def test_a_damaged_checkpoint_is_set_aside_in_the_store_too(
    bucket: Memory, local: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(local / "run", RUN)
    name = f"bucket/runs/a/checkpoints/step-12/{PART}"
    content = bytearray(bucket.files()[name])
    content[-1] ^= 1
    bucket.write(name, bytes(content))
    bucket.host("elsewhere")
    train(config(), path_of(RUN))
    said = capsys.readouterr().err
    assert f"{RUN}/checkpoints/step-12/{PART} is damaged (its SHA-256" in said
    assert f"(kept in {RUN}/checkpoints/damaged-step-12), and training continues from step 8" in said
    bucket.host("third")
    run = fetch_run(RUN)
    assert (run / "checkpoints" / "damaged-step-12" / PART).read_bytes() == bytes(content)
    ended_as(local / "run", run)


def test_two_jobs_of_one_host(bucket: Memory, local: Path) -> None:
    """The second one does not touch the copy, and is refused; where nobody trains, the store counts again."""
    run = put(local / "run", RUN)
    with process_group("cpu", 60) as ranks, run_lock(run, ranks):
        (run / "new").write_text("")
        bucket.write("bucket/runs/a/metrics.jsonl", b"another host's")
        # Others read what there is.
        assert fetch_run(RUN) == run and (run / "new").exists()
        with pytest.raises(ValueError, match="another job is training"), run_lock(run, ranks):
            pass
    assert fetch_run(RUN) == run and not (run / "new").exists()


def test_ranks_on_several_hosts_are_refused(bucket: Memory, local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    require_one_host(Path("runs/a"))
    said = "is written by ranks on one host alone"
    for write in (
        lambda: api.train("auto", RUN, {"data.path": DATA}),
        lambda: api.export(local / "run", EXPORT),
        lambda: api.compare(DATA, RUN, 1),
    ):
        with monkeypatch.context() as patch, pytest.raises(ValueError, match=f"^memory://.* {said}"):
            patch.setattr("logitmix.comm.process_group._place_from", lambda environment: _Place())
            write()
    assert not path_of(RUN).exists()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    require_one_host(path_of(RUN))


# Datasets and exports


@pytest.mark.long
def test_prepare_writes_there(memory: Memory, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused where something is; an upload that fails leaves nothing that passes for a dataset, and is made up for."""
    with memory.watched(lambda number, name, file: file.endswith("items.parquet")), pytest.raises(OSError) as caught:
        api.prepare("demo", out=DATA)
    assert str(caught.value) == f"{DATA} could not be written (the store is gone); what it lacks is in {path_of(DATA)}"
    memory.host("elsewhere")
    with pytest.raises(ValueError, match=f"^an upload to {DATA} has not ended"):
        load_dataset(DATA)
    memory.host("here")
    made = api.prepare("demo", out=DATA)
    memory.host("elsewhere")
    assert json.loads(load_dataset(DATA).description()) == made
    with pytest.raises(ValueError, match=f"^there is a dataset at {DATA} already; replace it with --overwrite"):
        api.prepare("demo", out=DATA)
    memory.write("bucket/mine/notes.txt", b"mine")
    with pytest.raises(ValueError, match=r"^memory://bucket/mine exists and is not only a dataset"):
        api.prepare("demo", out="memory://bucket/mine", overwrite=True)
    assert memory.files("bucket/mine") == {"notes.txt": b"mine"}


def test_nobody_fetches_between_writing_and_uploading(
    memory: Memory, local: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another process would put the old files into the copy again, and those would be uploaded."""
    held: list[str] = []

    def watch(module: Any, name: str, path: Path) -> None:
        original = getattr(module, name)

        def checked(*arguments: Any, **options: Any) -> Any:
            with (path.parent / "lock").open("w") as lock, pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held.append(name)
            return original(*arguments, **options)

        monkeypatch.setattr(module, name, checked)

    put(write_dataset(tmp_path / "data"), DATA)
    train(config(**{"train.epochs": 1}), path_of(RUN))
    watch(exporting, "publish", path_of(EXPORT))
    api.export(RUN, EXPORT)
    watch(preparing, "whole_directory", path_of(DATA))
    api.prepare("demo", out=DATA, overwrite=True)
    assert held == ["publish", "whole_directory"]


def test_a_run_that_is_taken_for_a_dataset_stays(bucket: Memory) -> None:
    train(config(**{"train.epochs": 1}), path_of(RUN))
    (path_of(RUN) / "ahead").write_text("")
    for mistake in (
        lambda: api.train("auto", "memory://bucket/runs/b", {"data.path": RUN}),
        lambda: Retriever.load(RUN),
        lambda: api.prepare("demo", out=RUN, overwrite=True),
        lambda: api.export(RUN, RUN, overwrite=True),
    ):
        with pytest.raises(ValueError):
            mistake()
        assert (path_of(RUN) / "ahead").exists()


def test_a_signal_saves_there(bucket: Memory, monkeypatch: pytest.MonkeyPatch) -> None:

    def end(telemetry: Telemetry, pipeline: Any, epoch: float) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)

    monkeypatch.setattr(Telemetry, "log_step", end)
    with pytest.raises(Stopped, match=rf"after step \d, which is saved in {RUN}$"):
        train(config(), path_of(RUN))
    bucket.host("elsewhere")
    assert load_saved(fetch_run(RUN), "last").step in (1, 2)


def test_an_export_there_answers_elsewhere(bucket: Memory) -> None:
    train(config(**{"train.epochs": 1}), path_of(RUN))
    api.export(RUN, EXPORT)
    bucket.host("elsewhere")
    with pytest.raises(ValueError, match=f"^{EXPORT} exists already; give --overwrite"):
        api.export(RUN, EXPORT)
    retriever = Retriever.load(EXPORT)
    assert retriever.source.run == "a" and len(retriever.rows(["item-1", "item-2"], 5)) == 5
    assert api.evaluate(RUN)["step"] == 4
    (path_of(EXPORT) / "tower.safetensors").write_bytes(b"")
    push(path_of(EXPORT))
    for load in (lambda: Retriever.load(EXPORT), lambda: load_program(EXPORT, "query_tower", trust=True)):
        with pytest.raises(ValueError, match=f"^{EXPORT}[ /]"):
            load()


def test_a_server_takes_over_what_is_exported_there(
    bucket: Memory, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(local / "run", RUN)
    api.export(RUN, EXPORT)
    bucket.host("server")
    said: list[str] = []
    monkeypatch.setattr(live, "STORE_SECONDS", 0.01)
    export = LiveExport(path_of(EXPORT), lambda line: said.append(shown(line)))
    before = export.retriever.rows(["item-1"], 3)
    with bucket.watched(lambda *_: True) as done:
        until(lambda: len(done) > 3)
    assert not export.refresh()
    assert said == [f"no new export can be fetched: {EXPORT} could not be read (the store is gone)"]
    bucket.host("elsewhere")
    exporting.export(fetch_run(RUN), path_of(EXPORT), overwrite=True, precision="bf16")
    until(export.refresh)
    assert said[-1].startswith("new export: ") and export.retriever.rows(["item-1"], 3) != before
    export.release()


def test_a_warm_start_from_there(bucket: Memory, capsys: pytest.CaptureFixture[str]) -> None:
    train(config(**{"train.epochs": 1}), path_of(RUN))
    bucket.host("elsewhere")
    train(config(**{"train.epochs": 1, "warm_start": RUN}), path_of("memory://bucket/runs/b"))
    assert f"warm start from {RUN}, step 4" in capsys.readouterr().err
