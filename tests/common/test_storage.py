"""Copies of what is in a store: what is fetched and uploaded, in which order, and what is said."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from rich.console import Console
from stores import Memory

from logitmix.common import messages, storage
from logitmix.common.messages import shown
from logitmix.common.storage import COPY, LOCKED, fetch, fetch_names, fetch_run, path_of, place_of, push
from logitmix.trainer import cli

URL = "memory://bucket/a"


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Memory:
    return Memory(monkeypatch, tmp_path)


def write(path: Path, **files: str) -> Path:
    for name, text in files.items():
        file = path / name.replace("__", "/").replace("_json", ".json")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return path


def content(path: Path) -> dict[str, str]:
    return {file.relative_to(path).as_posix(): file.read_text() for file in sorted(path.rglob("*")) if file.is_file()}


def fails(memory: Memory, at: str, act: Callable[..., object], *arguments: Any) -> None:
    """At an operation of this name, or on a file whose name ends so."""
    with memory.watched(lambda _, name, file: name == at or file.endswith(at)), pytest.raises(OSError, match=URL):
        act(*arguments)


def test_ordinary_paths_are_left_alone(memory: Memory, tmp_path: Path) -> None:
    path = write(tmp_path / "data", x="1")
    with memory.watched() as done:
        for each in (path, str(path)):
            assert path_of(each) == fetch(each) == fetch_run(each) == path
        fetch_names(path)
        push(path)
    assert not done and content(path) == {"x": "1"}
    assert not (tmp_path / "cache-here").exists()


def test_only_what_differs_is_moved(memory: Memory) -> None:
    path = write(path_of(URL), x="1", y="1")
    push(path)
    assert {file.name for file in path.parent.iterdir()} == {path.name, COPY, LOCKED}
    memory.host("elsewhere")
    other = fetch(f"{URL}/")
    assert content(other) == {"x": "1", "y": "1"}
    write(other, y="22")
    (other / "x").unlink()
    with memory.watched() as done:
        push(other)
        push(other)
    assert [of for of in done if "uploading" not in of] == [
        "put_file /bucket/a/y",
        "rm_file /bucket/a/x",
        "find /bucket/a",
    ]
    memory.host("here")
    with memory.watched() as done:
        assert content(fetch(URL)) == content(fetch(URL)) == {"y": "22"}
    assert done == ["find /bucket/a", "get_file /bucket/a/y", "find /bucket/a", "find /bucket/a"]


def test_files_with_digests_are_written_last_and_removed_first(memory: Memory) -> None:
    path = write(
        path_of(URL), manifest_json="", z="", checkpoints__step_8__checkpoint_json="", checkpoints__step_8__x=""
    )
    with memory.watched() as done:
        push(path)
    names = [re.sub("/bucket/a/", "", of) for of in done]
    assert names == [
        "pipe_file .uploading",
        "put_file checkpoints/step_8/x",
        "put_file z",
        "put_file manifest.json",
        "put_file checkpoints/step_8/checkpoint.json",
        "find /bucket/a",
        "rm_file .uploading",
    ]
    shutil.rmtree(path / "checkpoints")
    with memory.watched() as done:
        push(path)
    removed = [of.removeprefix("rm_file /bucket/a/") for of in done if of.startswith("rm_file")]
    assert removed == ["checkpoints/step_8/checkpoint.json", "checkpoints/step_8/x", ".uploading"]


def test_a_changed_copy_is_made_what_the_store_has(memory: Memory) -> None:
    """Of a dataset or export: what somebody wrote into the cache does not count. Who has mapped a file keeps it."""
    path = write(path_of(URL), x="1", y__z="1")
    push(path)
    write(path, x="2", new__x="1")
    (path / "y" / "z").unlink()
    with (path / "x").open() as file:
        fetch(path)
        assert file.read() == "2"
    assert content(path) == {"x": "1", "y/z": "1"} and not (path / "new").exists()


def test_names_alone(memory: Memory) -> None:
    """Enough to see what would be replaced, without fetching it."""
    push(write(path_of(URL), manifest_json="{}", x="1"))
    memory.host("elsewhere")
    path = path_of(URL)
    with memory.watched() as done:
        fetch_names(path)
    assert content(path) == {"manifest.json": "{}", "x": ""}
    assert sum(of.startswith("get_file") for of in done) == 1
    fetch(path)
    assert content(path) == {"manifest.json": "{}", "x": "1"}


def changed(memory: Memory) -> Path:
    """A copy that differs from the store: a file to change, one to add, one to remove."""
    memory.host("here")
    path = write(path_of(URL), manifest_json="1", x="1", y="1")
    push(path)
    write(path, manifest_json="222", x="22", z="2")
    (path / "y").unlink()
    return path


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("at", range(7))
def test_an_upload_that_fails_anywhere_is_not_taken_for_whole(memory: Memory, at: int, late: bool) -> None:
    path = changed(memory)
    before, after = memory.files("bucket/a"), {"manifest.json": b"222", "x": b"22", "z": b"2"}
    said = f"^{URL} could not be (written|read) .the store is gone.(; what it lacks is in {path})?$"
    with memory.watched(lambda number, *_: number == at, late) as done, pytest.raises(OSError, match=said):
        push(path)
    assert len(done) == at + 1
    memory.host("elsewhere")
    if memory.files("bucket/a") in (before, after):
        assert {name: text.encode() for name, text in content(fetch(URL)).items()} == memory.files("bucket/a")
    else:
        with pytest.raises(ValueError, match=f"^an upload to {URL} has not ended; wait for it, or run again"):
            fetch(URL)
        # Who writes anew finds nothing that is in the way.
        fetch_names(path_of(URL))
        assert content(path_of(URL)) == {}
        push(write(path_of(URL), manifest_json="222", x="22", z="2"))
        assert memory.files("bucket/a") == after
    memory.host("here")
    push(path)
    assert memory.files("bucket/a") == after


@pytest.mark.parametrize("at", range(5))
def test_a_fetch_that_fails_anywhere_is_made_up_for(memory: Memory, at: int) -> None:
    path = changed(memory)
    memory.host("elsewhere")
    fetch(URL)
    memory.host("here")
    push(path)
    memory.host("elsewhere")
    with memory.watched(lambda number, *_: number == at) as done, pytest.raises(OSError, match=URL):
        fetch(URL)
    assert len(done) > at
    assert content(fetch(URL)) == {"manifest.json": "222", "x": "22", "z": "2"}
    assert not list(path_of(URL).parent.glob("fetched"))


def test_a_fetch_that_was_interrupted_goes_on(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    push(write(path_of(URL), a="1", b="1", c="1"))
    memory.host("elsewhere")
    monkeypatch.setattr(storage, "RECORD_BYTES", 0)
    fails(memory, "/c", fetch, URL)
    with memory.watched() as done:
        assert content(fetch(URL)) == {"a": "1", "b": "1", "c": "1"}
    assert [of for of in done if of.startswith("get_file")] == ["get_file /bucket/a/c"]


def test_what_changes_while_it_is_fetched_is_fetched_again(memory: Memory) -> None:
    """A file that is removed, and one that is replaced after it was fetched."""
    push(write(path_of(URL), a="1", b="1", c="1"))

    def replace(number: int, name: str, file: str) -> bool:
        if name == "get_file" and file.endswith("/b") and number < 4:
            memory.write("bucket/a/a", b"2")
            memory.remove("bucket/a/b")
        return False

    memory.host("elsewhere")
    with memory.watched(replace):
        assert content(fetch(URL)) == {"a": "2", "c": "1"}


def test_processes_of_one_host_fetch_once(memory: Memory) -> None:
    push(write(path_of(URL), **{f"x{number}": "1" for number in range(20)}))
    memory.host("elsewhere")
    path_of(URL)
    with memory.watched() as done, ThreadPoolExecutor(4) as threads:
        for path in threads.map(fetch, [URL] * 4):
            assert len(content(path)) == 20
    assert sum(of.startswith("get_file") for of in done) == 20


def test_a_folder_of_the_disk_as_a_store(memory: Memory, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/there/a"
    push(write(path_of(url), x="1", y__z="1"))
    assert content(tmp_path / "there" / "a") == {"x": "1", "y/z": "1"}
    memory.host("elsewhere")
    path = fetch(url)
    assert content(path) == {"x": "1", "y/z": "1"}
    (path / "y" / "z").unlink()
    push(path)
    memory.host("here")
    assert content(fetch(url)) == {"x": "1"}


def test_a_copy_whose_upload_was_interrupted_is_read_here_and_ended_by_the_next(memory: Memory) -> None:
    path = changed(memory)
    here = content(path)
    fails(memory, "/z", push, path)
    assert content(fetch(URL)) == here
    push(path)
    memory.host("elsewhere")
    assert content(fetch(URL)) == here


# Runs


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("at", range(7))
def test_a_run_whose_upload_failed_anywhere_is_kept(memory: Memory, at: int, late: bool) -> None:
    path = changed(memory)
    here = content(path)
    with memory.watched(lambda number, *_: number == at, late), pytest.raises(OSError, match=URL):
        push(path)
    write(path, later="3")
    fetch_run(path)
    assert content(path) == here | {"later": "3"}
    push(path)
    assert {name: text.decode() for name, text in memory.files("bucket/a").items()} == content(path)


def test_what_another_copy_of_a_run_has_uploaded_since_counts(memory: Memory) -> None:
    here = write(path_of(URL), x="1")
    push(here)
    write(here, x="22", y="2")
    fails(memory, "/y", push, here)
    memory.host("elsewhere")
    there = fetch_run(URL)
    assert content(there) == {"x": "22"}
    push(write(there, x="333"))
    memory.host("here")
    fetch_run(here)
    assert content(here) == {"x": "333"}
    push(write(here, x="4444"))
    assert memory.files("bucket/a") == {"x": b"4444"}


def test_a_run_that_was_removed_from_the_store_begins_anew(memory: Memory) -> None:
    path = write(path_of(URL), x="1", checkpoints__step__x="1")
    push(path)
    for name in memory.files("bucket/a"):
        memory.remove(f"bucket/a/{name}")
    fetch_run(path)
    assert not path.exists()


def test_a_run_whose_copy_was_removed_is_fetched(memory: Memory) -> None:
    """Or emptied but for the lock of the job that trained there: training would begin anew, and its first upload would
    empty the store."""

    def whole() -> None:
        fetch_run(path)
        assert content(path).keys() - {".lock"} == {"x", "checkpoints/step_8"}
        push(path)
        assert memory.files("bucket/a") == {"x": b"1", "checkpoints/step_8": b"1"}

    path = write(path_of(URL), x="1", checkpoints__step_8="1")
    push(path)
    shutil.rmtree(path)
    whole()
    write(path, **{".lock": ""})
    (path / "x").unlink()
    shutil.rmtree(path / "checkpoints")
    whole()


def test_what_the_copy_of_a_run_lacks_of_its_checkpoints_is_fetched(memory: Memory) -> None:
    """A cache is cleaned of old files while the run that leads goes on."""
    names = [f"checkpoints/step-{step}/{name}" for step in (4, 8) for name in ("checkpoint.json", "part")]
    for name in names:
        memory.write(f"bucket/a/{name}", b"1")
    path = write(fetch_run(URL), x="1")
    shutil.rmtree(path / "checkpoints" / "step-4")
    (path / names[-1]).unlink()
    with memory.watched() as done:
        fetch_run(path)
    assert [of.removeprefix("get_file /bucket/a/") for of in done if of.startswith("get_file")] == [
        "checkpoints/step-4/part",
        "checkpoints/step-8/part",
        "checkpoints/step-4/checkpoint.json",
    ]
    push(path)
    assert set(memory.files("bucket/a")) == set(content(path)) == {*names, "x"}


def test_half_a_checkpoint_is_not_fetched_and_goes_with_the_next_upload(memory: Memory) -> None:
    for name in ("checkpoints/step-4/checkpoint.json", "checkpoints/step-4/part", "checkpoints/step-8/part"):
        memory.write(f"bucket/a/{name}", b"1")
    path = fetch_run(URL)
    assert set(content(path)) == {"checkpoints/step-4/checkpoint.json", "checkpoints/step-4/part"}
    push(write(path, x="1"))
    assert set(memory.files("bucket/a")) == {"checkpoints/step-4/checkpoint.json", "checkpoints/step-4/part", "x"}


def test_changing_files_are_uploaded_without_their_digests(memory: Memory) -> None:
    """Whatever interrupts an upload, the digests that are there are those of the files that are there."""
    path = write(path_of(URL), digests_json="1", config="1")
    push(path)
    write(path, digests_json="22", config="22")
    seen = []

    def look(number: int, name: str, file: str) -> bool:
        there = memory.files("bucket/a")
        seen.append((there.get("digests.json", b""), there["config"]))
        return False

    with memory.watched(look):
        push(path)
    assert set(seen) == {(b"1", b"1"), (b"", b"1"), (b"", b"22"), (b"22", b"22")}


def test_a_part_of_a_copy_is_uploaded_by_itself(memory: Memory) -> None:
    path = write(path_of(URL), x="1", refit__x="1")
    push(path / "refit")
    assert memory.files("bucket/a") == {"refit/x": b"1"}
    fails(memory, "/a/x", push, path)
    # It ends the upload of another part.
    push(path / "refit")
    assert memory.files("bucket/a") == {"refit/x": b"1", "x": b"1"}


def test_hidden_names_and_those_that_lead_elsewhere_are_not_copied(memory: Memory, tmp_path: Path) -> None:
    for name in ("../x", "b/../../x", ".x", "b/.x/y", "b//x"):
        memory.write(f"bucket/a/{name}", b"1")
    memory.write("bucket/ab", b"1")
    memory.write("bucket/a/b/x..y", b"1")
    path = fetch(URL)
    assert content(path) == {"b/x..y": "1"}
    assert not list(tmp_path.rglob("x"))
    push(write(path, **{".lock": "1", "y": "1"}))
    assert "bucket/a/.lock" not in memory.files() and memory.files()["bucket/ab"] == b"1"


# Words


@pytest.mark.parametrize(
    ("place", "said"),
    [
        *[(url, "names no directory; give a URL such as") for url in ("memory://", "memory://x/..")],
        ("s3://b/copy.json/", "the cache has files of that name; give a URL that"),
        (Path("s3://b/x"), "s3:/b/x was a URL, but a Path drops one of its slashes; give it as a text"),
    ],
)
def test_places_that_cannot_have_a_copy_are_refused(place: str | Path, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        path_of(place)


def test_a_copy_goes_by_its_url(memory: Memory, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = path_of(URL)
    names = {path: URL, path / "b" / "c": f"{URL}/b/c", tmp_path: str(tmp_path), Path("a/b"): "a/b"}
    assert {place: place_of(place) for place in names} == names
    messages.say(f"reads {path / 'b'}")
    messages.say_of_disk(f"{path} is full")
    messages.show(f"writes {path}")
    console = Console(width=200)
    messages.tell(console, f"waits for {path}")
    said = capsys.readouterr()
    assert (said.err, said.out) == (f"reads {URL}/b\n{path} is full\n", f"writes {URL}\nwaits for {URL}\n")


def test_texts_and_mistakes_name_the_url(memory: Memory) -> None:
    path = path_of(URL)
    assert shown(f"{path}: x, {path}/y, {path}.tsv, {path}-2") == f"{URL}: x, {URL}/y, {path}.tsv, {path}-2"
    with pytest.raises(ValueError, match=f"^{URL}: what$"), messages.naming_urls():
        raise ValueError(f"{path}: what")
    # What is wrong with a file of the local disk is not wrong with the store.
    with pytest.raises(OSError) as caught, messages.naming_urls():
        raise OSError(28, "No space left on device", str(path))
    assert caught.value.filename == str(path)


SECRET = "S3cr3t+/x"
WITH_SECRETS = [
    f"s3://KEY:{SECRET}@bucket/runs/a",
    f"sftp://me:{SECRET}@host:22/runs/a",
    f"https://{SECRET}@host/runs/a".replace("/x@", "x@"),
    f"https://host/runs/a?X-Amz-Credential=K&X-Amz-Signature={SECRET}",
    f"https://account.blob/c/a?sv=2024&sig={SECRET}&se=2027",
    f"https://host/a#access_token={SECRET}",
    f"simplecache::https://host/a?token={SECRET}",
    f"s3://KEY:two words{SECRET}@bucket/runs/a",
]
WITHOUT = [
    "s3://bucket/runs/a", "https://host:8080/runs/a@2", "abfs://container@account.dfs/runs/a", "sftp://me@host/runs/a",
    "https://host/a?page=3",
]  # fmt: skip


@pytest.mark.parametrize("url", WITH_SECRETS)
def test_secrets_of_urls_are_refused_and_never_shown(url: str) -> None:
    with pytest.raises(ValueError, match=r"AWS_ACCESS_KEY_ID .* ~/\.config/fsspec") as caught:
        path_of(url)
    said = [str(caught.value), str(caught.value.__cause__)]
    for word in (url, f"'{url}', and more", url.replace("://", ":/")) if " " not in url else ():
        said.append(shown(f"cannot open {word}"))
        assert "bucket" not in url or "bucket" in said[-1]
    assert not any("3cr3t" in each for each in said)


@pytest.mark.parametrize("url", WITHOUT)
def test_urls_without_secrets_are_shown_as_they_are(memory: Memory, url: str) -> None:
    path_of(url)
    assert shown(f"{url}: what") == f"{url}: what"


def test_what_a_driver_quotes_is_masked(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(*arguments: object, **options: object) -> None:
        raise PermissionError(f"403 for https://endpoint/a?X-Amz-Signature={SECRET}\nby http://me:{SECRET}@proxy:80/")

    monkeypatch.setattr(MemoryFileSystem, "find", refuses)
    for words in (["report", URL], ["export", URL, "--out", "x"]):
        with pytest.raises(SystemExit):
            cli.main(words)
        said = capsys.readouterr().err
        assert "3cr3t" not in said and "X-Amz-Signature=***" in said and said.count("\n") == 1


def test_characters_that_control_a_terminal_are_shown_as_escapes() -> None:
    assert shown("a\x1b[31m\x9b2J\r\x00\u202eb\ud800 \u2028ü 中 \u200d\n") == (
        r"a\x1b[31m\x9b2J\r\x00\u202eb\ud800 \u2028ü 中 " + "\u200d\n"
    )


def test_a_protocol_without_a_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ValueError, match=r"^gs://b/x: Please install gcsfs .*: pip install gcsfs$"):
        fetch("gs://b/x")
    with pytest.raises(OSError, match=r"^foo://b/x could not be reached \(Protocol not known: foo\)$"):
        fetch("foo://b/x")


def test_fsspec_is_loaded_where_a_url_is_used() -> None:
    words = "import sys; import logitmix.trainer.config, logitmix.common.storage; assert 'fsspec' not in sys.modules"
    subprocess.run([sys.executable, "-c", words], check=True)
