"""Runs, datasets and exports on S3, which is moto's server here."""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import jobs
import pytest
from moto.server import ThreadedMotoServer
from s3fs import S3FileSystem
from small_data import small_config, write_dataset

from logitmix.common.storage import fetch_run, path_of, push
from logitmix.serving.retriever import Retriever
from logitmix.trainer import api
from logitmix.trainer.cli import main
from logitmix.trainer.config import dump_toml
from logitmix.trainer.loop import train

DATA, RUN, EXPORT = "s3://bucket/data/small", "s3://bucket/runs/a", "s3://bucket/exports/a"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Its address."""
    moto = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    moto.start()
    yield "http://{}:{}".format(*moto.get_host_and_port())
    moto.stop()


@pytest.fixture
def s3(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3FileSystem]:
    """A store with one empty bucket, and an empty cache."""
    keys = {"AWS_ENDPOINT_URL": server, "AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}
    for name, value in keys.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(S3FileSystem, "retries", 1)
    S3FileSystem.clear_instance_cache()
    elsewhere(tmp_path, monkeypatch, "here")
    store = S3FileSystem()
    if store.exists("bucket"):
        store.rm("bucket", recursive=True)
    store.mkdir("bucket")
    yield store
    S3FileSystem.clear_instance_cache()


def elsewhere(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """What follows has a cache of this name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / f"cache-{name}"))


def put(local: Path, url: str) -> None:
    path = path_of(url)
    shutil.copytree(local, path)
    push(path)


def names(store: S3FileSystem, url: str) -> set[str]:
    store.invalidate_cache()
    return {name.removeprefix(f"{url.removeprefix('s3://')}/") for name in store.find(url)}


def test_from_data_to_answers(s3: S3FileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_dataset(tmp_path / "data")
    put(data, DATA)
    assert names(s3, DATA) == {path.relative_to(data).as_posix() for path in data.rglob("*") if path.is_file()}
    config = small_config(Path("unused"), {"data.path": DATA, "train.keep": 1})
    results = train(config, path_of(RUN))
    elsewhere(tmp_path, monkeypatch, "export")
    assert api.evaluate(RUN)["mrr"] == results["mrr"]
    api.export(RUN, EXPORT)
    elsewhere(tmp_path, monkeypatch, "server")
    assert len(Retriever.load(EXPORT).rows(["item-1", "item-2"], 5)) == 5
    assert not {name for url in (DATA, RUN, EXPORT) for name in names(s3, url) if name.startswith(".")}


def said(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[object, list[str]]:
    """Status, and the lines on standard error."""
    with pytest.raises(SystemExit) as end:
        main(words)
    return end.value.code, capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [("bucket", "prepare demo --out URL"), ("credentials", "train auto --data.path URL"), ("connection", "serve URL")],
)
def test_what_is_wrong_with_the_store_is_one_line(
    s3: S3FileSystem, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, wrong: str
) -> None:
    url, reason = "s3://bucket/a", "Unable to locate credentials"
    if wrong == "bucket":
        url, reason = "s3://nowhere/a", "The specified bucket does not exist"
    elif wrong == "credentials":
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    else:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        reason = 'Could not connect to the endpoint URL: "http://127.0.0.1:9/'
    S3FileSystem.clear_instance_cache()
    status, lines = said(words.replace("URL", url).split(), capsys)
    assert status == 1 and len(lines) == 1
    assert lines[0].startswith(f"logitmix: {url} could not be read ({reason}")


@pytest.mark.slow
@pytest.mark.parametrize("torchrun", [False, True])
def test_a_killed_job_goes_on_elsewhere(
    s3: S3FileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torchrun: bool
) -> None:
    """Two ranks, killed without notice, go on where the cache is empty; they end bit-equal to an undisturbed job on a
    disk, and the commands that follow work on what they leave."""
    settings = {"train.epochs": 10, "train.checkpoint_every": 2, "train.keep": 1, "model.encoder.dropout": 0.3}
    settings |= {"train.save_in_background": torchrun}
    data = write_dataset(tmp_path / "data")
    (tmp_path / "recipe.toml").write_text(dump_toml(small_config(data, settings)))
    words = ["train", str(tmp_path / "recipe.toml"), "--run"]
    jobs.run([*words, str(tmp_path / "undisturbed")], tmp_path, processes=2)
    put(data, DATA)
    words = [*words, RUN, "--data.path", DATA]
    process = jobs.start(words, tmp_path, processes=2, torchrun=torchrun)
    while process.poll() is None and not any("checkpoint.json" in name for name in names(s3, RUN)):
        time.sleep(0.05)
    assert process.poll() is None
    jobs.kill(process.pid)
    process.communicate()
    elsewhere(tmp_path, monkeypatch, "there")
    jobs.run(words, tmp_path, processes=2, torchrun=torchrun)
    elsewhere(tmp_path, monkeypatch, "third")
    run, undisturbed = fetch_run(RUN), tmp_path / "undisturbed"
    assert jobs.metrics(run) == jobs.metrics(undisturbed)
    assert jobs.results(run) == jobs.results(undisturbed)
    assert jobs.digests(run) == jobs.digests(undisturbed)
    found = json.loads(jobs.run(["evaluate", RUN, "--json"], tmp_path, processes=2))
    assert found["mrr"] == jobs.results(undisturbed)["mrr"]
    jobs.run(["export", RUN, "--out", EXPORT], tmp_path, processes=2)
    elsewhere(tmp_path, monkeypatch, "fourth")
    answers = jobs.run(["retrieve", EXPORT, "--history", "item-1,item-2", "--json"], tmp_path)
    assert len(json.loads(answers)["items"]) == 10
