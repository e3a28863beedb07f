import hashlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from logitmix.common import files
from logitmix.common.checked import Checked
from logitmix.common.files import (
    DEEPEST,
    clean_up,
    file_digest,
    former,
    from_json,
    only_writer,
    restore,
    whole_directory,
    write_hashed,
    write_whole,
)


def entries(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


@pytest.mark.parametrize("depth", [1, DEEPEST, DEEPEST + 1, 900, 100_000])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_what_is_read_as_json_can_be_written(depth: int, opening: str) -> None:
    """At depths that the parser takes, the writer may come to Python's limit."""
    closing = "]" if opening == "[" else "}"
    text = f"{opening * (depth - 1)}{opening}1{closing * depth}"
    for given in (text, text.encode()):
        if depth <= DEEPEST:
            Checked("a", 1).text({"a": from_json(given)})
        else:
            with pytest.raises(ValueError, match="nested too deep"):
                from_json(given)
    assert len(from_json("[" + "[]," * DEEPEST + "[]]")) == DEEPEST + 1


def test_what_is_no_file_is_named_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    places = {tmp_path / kind: kind for kind in ("pipe", "folder")}
    for path, kind in (places | {Path("/dev/zero"): "device or socket", tmp_path / "link": "pipe"}).items():
        for read in (file_digest, Checked("a", 1).read, files.require_tensors):
            with pytest.raises(ValueError, match=f"^{path} is a {kind}, not a file$"):
                read(path)


def test_a_file_keeps_its_content_until_the_new_one_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    write_whole(file, "old")

    def full(path: Path) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(files, "sync", full)
        with pytest.raises(OSError, match="disk full"):
            write_whole(file, "new")
    assert file.read_text() == "old"
    write_whole(file, "näw")
    assert file.read_text(encoding="utf-8") == "näw"
    assert entries(tmp_path) == {"file"}


def test_a_directory_appears_when_it_is_complete(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    with whole_directory(out) as staging:
        (staging / "inner").mkdir()
        (staging / "inner/file").write_text("text")
        assert not out.exists() and staging.parent == out.parent and staging.name.startswith(".out.")
    assert entries(tmp_path / "new") == {"out", "out/inner", "out/inner/file"}


@pytest.mark.parametrize("at", ["filling", "sync", "rename"])
def test_what_fails_leaves_things_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    out = tmp_path / "out"
    with whole_directory(out) as staging:
        (staging / "before").touch()
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.suffix == ".part":
            raise OSError("no")
        return rename(path, target)

    def full(descriptor: int) -> None:
        raise OSError("no")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no"), whole_directory(out) as staging:
        (staging / "after").touch()
        if at == "filling":
            raise OSError("no")
        if at == "sync":
            patch.setattr(os, "fsync", full)
        else:
            patch.setattr(Path, "rename", refuse)
    assert entries(tmp_path) == {"out", "out/before"}


@contextmanager
def noted_on_disk(patch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Path]]]:
    """What is synced and renamed in turn: a power loss keeps no more than that."""
    done: list[tuple[str, Path]] = []
    rename, replace, fsync = Path.rename, Path.replace, os.fsync

    def noted(what: str, real: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
        def call(path: Path, target: Path) -> Path:
            done.append((what, Path(target)))
            return real(path, target)

        return call

    def synced(descriptor: int) -> None:
        done.append(("synced", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    with patch.context() as changes:
        changes.setattr(Path, "rename", noted("renamed", rename))
        changes.setattr(Path, "replace", noted("renamed", replace))
        changes.setattr(os, "fsync", synced)
        yield done


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_is_published_outlasts_a_power_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All content is on disk before it gets its name, and the name before the command says that it is done."""
    out = tmp_path / "out"
    for _ in range(2):  # new, and in place of another
        with noted_on_disk(monkeypatch) as done, whole_directory(out) as staging:
            (staging / "inner").mkdir()
            (staging / "inner/file").write_text("text")
        renamed = done.index(("renamed", out))
        assert {("synced", path) for path in (staging, staging / "inner", staging / "inner/file")} <= set(
            done[:renamed]
        )
        assert ("synced", tmp_path) in done[renamed:]
    with noted_on_disk(monkeypatch) as done:
        write_whole(tmp_path / "file", "text")
    (what, staging), *others = done
    assert what == "synced" and re.fullmatch(r"\.file\.[0-9a-f]{8}\.part", staging.name)
    assert others == [("renamed", tmp_path / "file"), ("synced", tmp_path)]


def test_a_hashed_file_is_on_disk_when_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank on another host than the one that publishes has nobody else to sync its part. One sync of tens of
    gigabytes takes minutes, in which nothing shows that the disk is at work: so there are several."""
    sizes = list[int]()
    monkeypatch.setattr(files, "SYNC_BYTES", 3)
    monkeypatch.setattr(os, "fsync", lambda descriptor: sizes.append(os.fstat(descriptor).st_size))
    digest = write_hashed(tmp_path / "part", [b"ab", b"cd", b"e"])
    assert digest == hashlib.sha256(b"abcde").hexdigest() and (tmp_path / "part").read_bytes() == b"abcde"
    assert sizes == [4, 5]


def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with whole_directory(out) as living:
        (living / "file").touch()
        others = [
            tmp_path / name for name in (".out.part", ".out.0123.old", ".other.01234567.part", ".xout.01234567.old")
        ]
        for path in (*others, tmp_path / ".out.01234567.part", tmp_path / ".out.89abcdef.part"):
            path.mkdir()
            (path / "file").touch()
        (tmp_path / ".out.00000000.part").touch()
        before = entries(tmp_path)
        clean_up(out)
        gone = {f".out.{name}.part{file}" for name in ("01234567", "89abcdef") for file in ("", "/file")}
        assert entries(tmp_path) == before - gone
    assert entries(out) == {"file"}


@pytest.mark.parametrize("staging", [True, False])
def test_what_a_killed_process_was_about_to_replace_gets_its_name_back(tmp_path: Path, staging: bool) -> None:
    out, old, part = (tmp_path / name for name in ("out", ".out.01234567.old", ".out.01234567.part"))
    old.mkdir()
    (old / "old").touch()
    if staging:
        part.mkdir()
    clean_up(out)
    assert entries(tmp_path) == {"out", "out/old"}
    out.rename(old)
    out.mkdir()
    clean_up(out)
    assert entries(tmp_path) == {"out"}


def test_what_a_living_process_replaces_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its two renames."""
    out, rename = tmp_path / "out", Path.rename
    with whole_directory(out) as staging:
        (staging / "old").touch()

    def look(path: Path, target: Path) -> Path:
        if path.suffix == ".part":
            before = entries(tmp_path)
            clean_up(out)
            assert entries(tmp_path) == before and not out.exists()
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", look)
    with whole_directory(out) as staging:
        (staging / "new").touch()
    assert entries(tmp_path) == {"out", "out/new"}


def content_of(path: Path) -> set[str]:
    return {of.name for of in path.iterdir()}


def test_what_is_replaced_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for name, keep in (("a", 2), ("b", 2), ("c", 2), ("d", 2), ("e", 1)):
        with whole_directory(out, keep) as staging:
            (staging / name).touch()
    assert {number: content_of(path) for number, path in former(out).items()} == {1: {"d"}}
    with whole_directory(out) as staging:
        (staging / "f").touch()
    assert content_of(out) == {"f"} and content_of(former(out)[1]) == {"d"}


def test_a_former_one_is_exchanged(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for name in "abc":
        with whole_directory(out, 2) as staging:
            (staging / name).touch()

    def there() -> list[set[str]]:
        return [content_of(path) for path in (out, *former(out).values())]

    assert there() == [{"c"}, {"b"}, {"a"}]
    restore(out, 1)
    assert there() == [{"b"}, {"c"}, {"a"}]
    restore(out, 2)
    assert there() == [{"a"}, {"b"}, {"c"}]
    with pytest.raises(KeyError):
        restore(out, 3)
    assert there() == [{"a"}, {"b"}, {"c"}] and len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("exchanges", [False, True])
def test_what_was_to_be_kept_by_a_killed_process_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool, at: int
) -> None:
    """Killed before its rename of that number."""
    out, rename = tmp_path / "out", Path.rename
    for name in "ab":
        with whole_directory(out, 2) as staging:
            (staging / name).touch()

    def killed(path: Path, target: Path) -> Path:
        nonlocal at
        at -= 1
        if at < 0:
            os._exit(0)
        return rename(path, target)

    if not (child := os.fork()):
        monkeypatch.setattr(Path, "rename", killed)
        if exchanges:
            restore(out, 1)
        else:
            with whole_directory(out, 2) as staging:
                (staging / "c").touch()
        os._exit(0)
    os.waitpid(child, 0)
    clean_up(out)
    there = [content_of(path) for path in (out, *former(out).values())]
    assert there in ([[{"b"}, {"a"}], [{"a"}, {"b"}]] if exchanges else [[{"b"}, {"a"}], [{"c"}, {"b"}, {"a"}]])
    assert not list(tmp_path.glob(".*"))


def test_one_writes_at_a_time(tmp_path: Path) -> None:
    """By whatever path."""
    out = tmp_path / "new" / "out"
    with only_writer(out), only_writer(out.parent / "other"):
        (tmp_path / "link").symlink_to(out)
        for path in (out, out.parent / ".." / "new" / "out", tmp_path / "link"):
            with pytest.raises(
                ValueError, match=f"^another process writes {path}; wait for it, or give another --out$"
            ):
                only_writer(path).__enter__()
    with only_writer(out):
        pass
    assert entries(tmp_path) == {"new", "link"}


def test_a_killed_writer_leaves_the_right_to_others(tmp_path: Path) -> None:
    out, (reading, writing) = tmp_path / "out", os.pipe()
    if not (child := os.fork()):
        with only_writer(out):
            os.write(writing, b"1")
            signal.pause()
        os._exit(0)
    os.read(reading, 1)
    with pytest.raises(ValueError, match="another process writes"):
        only_writer(out).__enter__()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert entries(tmp_path) == {".out.lock"}
    with only_writer(out):
        pass
    assert entries(tmp_path) == set()
