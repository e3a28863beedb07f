"""Runs, datasets and exports in a store: whatever fsspec reaches by a URL, such as s3://bucket/runs/a.

All other code works on local paths. `path_of` gives a URL the path of a copy in the cache directory, `fetch` and
`fetch_run` give that path and bring the copy up to date, `fetch_names` all but its content, and `push` the store. They
leave other paths alone.

    CACHE/DIGEST/NAME       the copy; DIGEST is of the URL, and NAME its last part
    CACHE/DIGEST/copy.json  id, a random name of the copy; uploading, whether an upload of it has begun and not ended;
                            files: of each file in the store, when the two were last the same, [a digest of what the
                            store says of it, size and mtime_ns of the copy's]
    CACHE/DIGEST/lock       held by the process that fetches or pushes

What a store holds is an ordinary directory: other tools can copy it to and from there. An upload first writes the file
.uploading, with the copy's id, then all others, those with digests last; then it removes what is gone, checkpoints by
their checkpoint.json first, and in the end .uploading. So whoever finds that file knows that an upload has not ended,
and whose. A listing before and after a fetch tells whether another upload came in between. Files and folders whose
names begin with a dot are not copied.
"""

import fcntl
import hashlib
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from logitmix.common.checked import Checked, fields_of
from logitmix.common.files import write_whole
from logitmix.common.mappings import counted, from_mapping
from logitmix.common.messages import require_no_secrets, say, urls

MANIFESTS = ("dataset.json", "manifest.json", "digests.json", "checkpoint.json")
"""Files with the digests of others, in the order in which they are written."""
RENEWED = "digests.json"
"""Digests of a run's files, which are replaced under the same names: an upload removes it before it replaces them."""
UPLOADING = ".uploading"
MOST_ROUNDS = 20
"""How often a fetch begins again because the store has changed meanwhile."""
RECORD_BYTES = 2**28
"""Bytes between two records of a fetch: what is recorded is not fetched again if it is interrupted."""
COPY, FETCHED, LOCKED = "copy.json", "fetched", "lock"
"""Files beside a copy."""
LOCK = ".lock"
"""Held in a run directory by the job that trains there."""

_RECORD = Checked("copy of what is in a store", 1)

_alone: set[Path] = set()
"""Those that this process works on alone."""


def path_of(place: str | Path) -> Path:
    """The path of a directory that a user names; that of its copy if it is a URL. ValueError if the URL names no
    directory, or has a password or a signature."""
    if isinstance(place, Path) and re.match(r"[a-z0-9+.-]+:/", str(place)):
        raise ValueError(f"{place} was a URL, but a Path drops one of its slashes; give it as a text")
    if "://" not in str(place):
        return Path(place)
    require_no_secrets("a place", str(place))
    url = str(place).rstrip("/")
    name = url.rpartition("/")[2]
    if "://" not in url or name in ("", ".", ".."):
        raise ValueError(f"{place} names no directory; give a URL such as s3://bucket/folder/name")
    if name in (COPY, FETCHED, LOCKED):
        raise ValueError(f"{place}: the cache has files of that name; give a URL that ends in another")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").resolve()
    path = cache / "logitmix" / hashlib.sha256(url.encode()).hexdigest()[:16] / name
    urls[path] = url
    return path


def is_copy(path: Path) -> bool:
    """Whether this is a copy, or in one."""
    return _copy_of(path) is not None


def place_of(path: Path) -> str:
    """What a user names a directory by: the URL of a copy, or of a folder in one; else the path."""
    copy = _copy_of(path)
    return f"{copy.url}/{path.relative_to(copy.path)}".removesuffix("/.") if copy else str(path)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Other processes of this host that fetch or push this copy wait meanwhile: what is written within is what is
    pushed."""
    if (copy := _copy_of(path)) is None:
        yield
        return
    with copy.locked():
        _alone.add(copy.path)
        try:
            yield
        finally:
            _alone.remove(copy.path)


def fetch(place: str | Path) -> Path:
    """The path of a dataset or export that a user names. A copy is made what is in the store; only files that differ
    are fetched. Its readers check their digests.

    This and the next ones raise ValueError for a URL that fsspec has no driver for, and OSError if the store does not
    answer or the disk is full; this one ValueError also where the upload of another copy has not ended. The copy whose
    upload was interrupted is whole, and stays as it is.
    """
    path = path_of(place)
    if (copy := _copy_of(path)) is None:
        return path
    if _locks(copy.path):
        return fetch_run(path)  # there are runs, and whoever takes them for a dataset must not harm them

    def take(there: dict[str, str]) -> bool:
        if UPLOADING in there:
            if copy.here() and copy.uploader() == copy.record().id:
                return False
            raise ValueError(f"an upload to {copy.url} has not ended; wait for it, or run again what was interrupted")
        return copy.take(there)

    with copy.locked():
        copy.settle(take)
    return path


def fetch_run(place: str | Path) -> Path:
    """As `fetch`, for a run or a folder of runs, whose copy may be newer than the store: a copy that was not uploaded
    whole, or in which a job trains, stays as it is. If another copy has been uploaded since, what is in the store
    counts."""
    path = path_of(place)
    if (copy := _copy_of(path)) is None:
        return path

    def take(there: dict[str, str]) -> bool:
        record, here = copy.record(), copy.here()
        ours = UPLOADING in there and copy.uploader() == record.id
        there = {name: of for name, of in there.items() if name != UPLOADING}
        recorded = {name: of for name, of in record.files.items() if of[0]}
        # From a copy that somebody has emptied, or that has names alone, an upload would empty the store.
        is_whole = here and not any(size is None for name, (_, size, _) in recorded.items() if name in here)
        if not is_whole or not (ours or there == {name: of[0] for name, of in recorded.items()}):
            return copy.take(there)
        # Somebody has cleaned the cache, or a job was killed after it had removed old checkpoints. The next upload
        # would remove them there.
        of_checkpoints = [name for name in record.files if name in there and _IN_CHECKPOINT.fullmatch(name)]
        lacking = [name for name in of_checkpoints if name not in here and there[name] == record.files[name][0]]
        lacking = [name for name in lacking if not _in_half_a_checkpoint(name, there)]
        if lacking:
            copy.get_all(record, there, lacking)
        return bool(lacking)

    with copy.locked():
        if not _is_training(copy.path):
            copy.settle(take)
    return path


def fetch_names(path: Path) -> None:
    """Before a dataset or export is written: the copy gets all files that are in the store, empty ones except those
    with digests. If an upload has not ended, the copy is emptied."""
    if (copy := _copy_of(path)) is None:
        return
    if _locks(copy.path):
        fetch_run(path)
        return
    with copy.locked():
        there = copy.listing()
        if UPLOADING in there:
            copy.take(there, wanted=())
        else:
            copy.take(there, content=False)


def push(path: Path) -> None:
    """Makes the store what is in a copy, or in a folder of it; only files that have changed are uploaded. OSError if
    the store does not take them; a reader elsewhere then finds what was there before, or that an upload has not
    ended."""
    if (copy := _copy_of(path)) is None:
        return
    with copy.locked():
        record = copy.record()
        # An upload that was interrupted may have been of another part.
        whole = path == copy.path or record.uploading
        part = "" if whole else path.relative_to(copy.path).as_posix() + "/"
        here = {name: of for name, of in copy.here().items() if name.startswith(part)}
        new = [name for name, of in here.items() if record.files.get(name, ("",))[1:] != of]
        gone = [name for name in record.files if name.startswith(part) and name not in here]
        if new or gone or record.uploading:
            copy.upload(record, new, gone)


@dataclass
class _Record:
    """What copy.json records of the local copy of a store."""

    id: str
    uploading: bool
    files: dict[str, tuple[Any, ...]]
    """(what the store says, size, mtime_ns); the last two are None for what the copy does not have, and the first is
    empty for what it may have uploaded."""


@dataclass(frozen=True)
class _Copy:
    path: Path
    url: str

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Alone among the processes that share the cache."""
        if self.path in _alone:
            yield
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with (self.path.parent / LOCKED).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def record(self) -> _Record:
        file = self.path.parent / COPY
        if not file.exists():
            return _Record(secrets.token_hex(8), False, {})
        try:
            return from_mapping(_Record, fields_of(_RECORD.read(file)), str(file))
        except ValueError as error:
            # What the copy has may not be in the store yet.
            raise ValueError(f"{error}; move {file.parent}, the copy of {self.url}, and all is fetched again") from None

    def write(self, record: _Record) -> None:
        write_whole(self.path.parent / COPY, _RECORD.text(vars(record)))

    def here(self) -> dict[str, tuple[int, int]]:
        """Size and mtime_ns of each file of the copy."""
        files = {file.relative_to(self.path).as_posix(): file for file in _files(self.path)}
        return {name: _stamp(file) for name, file in files.items() if not _hidden(name)}

    def listing(self) -> dict[str, str]:
        """For each file in the store, a text that changes with it."""
        store, root = self._store()
        with self._reaching("read"):
            store.invalidate_cache()
            found = store.find(root, detail=True)
        # By their order, because some drivers add to the entries.
        said = {name.removeprefix(root).lstrip("/"): repr(sorted(of.items())) for name, of in found.items()}
        return {
            name: hashlib.sha256(of.encode()).hexdigest()[:16]
            for name, of in said.items()
            if name == UPLOADING or not _hidden(name)
        }

    def settle(self, take: Callable[[dict[str, str]], bool]) -> None:
        """Calls `take` until the store has not changed during the call, so that what was taken is of one upload. `take`
        says whether it has fetched anything; its OSError may be for a file that was removed."""
        there = self.listing()
        for _ in range(MOST_ROUNDS):
            before = there
            try:
                if not take(there) or before == (there := self.listing()):
                    return
            except OSError:
                if before == (there := self.listing()):
                    raise
        raise OSError(f"{self.url} has changed {MOST_ROUNDS} times while it was fetched; try again")

    def uploader(self) -> str:
        """The id of the copy whose upload has not ended."""
        store, root = self._store()
        with self._reaching("read"):
            return str(store.cat_file(f"{root}/{UPLOADING}").decode())

    def take(self, there: dict[str, str], wanted: Collection[str] | None = None, content: bool = True) -> bool:
        """Makes the copy what is `there`, or the `wanted` names of it; without `content`, most files are empty. Whether
        it fetched any."""
        there = {name: of for name, of in there.items() if name != UPLOADING}
        record, here = self.record(), self.here()
        wanted = {name for name in there if not _in_half_a_checkpoint(name, there)} if wanted is None else wanted
        differ = [name for name in wanted if name not in here or record.files.get(name) != (there[name], *here[name])]
        # What is not known to be the same is fetched again, should this be interrupted.
        record.files = {name: of for name, of in record.files.items() if name in there and name not in differ}
        # And what it makes is not the copy whose upload was interrupted.
        record.id, record.uploading = secrets.token_hex(8), False
        self.write(record)
        for name in _digests_last(here.keys() - wanted)[::-1]:
            self._remove(self.path / name)
        self.get_all(record, there, differ, content)
        record.files |= {name: (of, None, None) for name, of in there.items() if name not in record.files}
        self.write(record)
        return bool(differ)

    def upload(self, record: _Record, new: list[str], gone: list[str]) -> None:
        """Uploads and removes these files."""
        store, root = self._store()
        renewed = [name for name in new if Path(name).name == RENEWED and name in record.files]
        record.uploading = True
        # Should this fail, they may be there; they are to be removed if they are no longer here then.
        record.files = {name: ("", None, None) for name in new} | record.files
        self.write(record)
        stamps = {name: _stamp(self.path / name) for name in new}
        with self._reaching("written", f"; what it lacks is in {self.path}"):
            store.pipe_file(f"{root}/{UPLOADING}", record.id.encode())
            for name in renewed:
                self._remove_there(name)
            for name in _digests_last(new):
                store.put_file(str(self.path / name), f"{root}/{name}")
            for name in _digests_last(gone)[::-1]:
                self._remove_there(name)
        there = self.listing()
        record.files = {name: of for name, of in record.files.items() if name not in gone}
        record.files |= {name: (there.get(name, ""), *stamps[name]) for name in new}
        self.write(record)
        with self._reaching("written", f"; what it lacks is in {self.path}"):
            store.rm_file(f"{root}/{UPLOADING}")
        record.uploading = False
        self.write(record)

    def get_all(self, record: _Record, there: dict[str, str], names: list[str], content: bool = True) -> None:
        """Fetches these files and records them; without `content`, most are made empty."""
        if names and content:
            say(f"fetching {counted(len(names), 'file')} of {self.url}")
        unrecorded = 0
        for name in _digests_last(names):
            whole = content or Path(name).name in MANIFESTS
            self._get(name, whole)
            if whole:
                record.files[name] = (there[name], *_stamp(self.path / name))
                unrecorded += record.files[name][1]
            if unrecorded > RECORD_BYTES:
                self.write(record)
                unrecorded = 0
        self.write(record)

    def _get(self, name: str, content: bool) -> None:
        """Fetches a file, or makes an empty one."""
        store, root = self._store()
        part, target = self.path.parent / FETCHED, self.path / name
        try:
            if content:
                with self._reaching(f"read: {name}"):
                    store.get_file(f"{root}/{name}", str(part))
            else:
                part.touch()
            target.parent.mkdir(parents=True, exist_ok=True)
            # Whoever has mapped the file that was there keeps it.
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)

    def _remove_there(self, name: str) -> None:
        store, root = self._store()
        # An upload that was interrupted may have done it.
        with suppress(FileNotFoundError):
            store.rm_file(f"{root}/{name}")

    def _remove(self, file: Path) -> None:
        """And the folders that are empty without it: readers take a folder for a checkpoint."""
        file.unlink()
        for folder in file.relative_to(self.path.parent).parents[:-1]:
            with suppress(OSError):
                (self.path.parent / folder).rmdir()

    def _store(self) -> tuple[Any, str]:
        """fsspec's file system, and the URL's path in it."""
        import fsspec

        options = {"auto_mkdir": True} if self.url.startswith(("file:", "local:")) else {}
        with self._reaching("reached"):
            return fsspec.core.url_to_fs(self.url, **options)

    @contextmanager
    def _reaching(self, how: str, more: str = "") -> Iterator[None]:
        """Turns whatever a driver raises within into an OSError of one line that names the URL. ValueError if fsspec
        has no driver for it, or not all that the driver needs."""
        try:
            yield
        except ImportError as error:
            missing = getattr(error.__cause__, "name", None)
            raise ValueError(f"{self.url}: {error}{f': pip install {missing}' if missing else ''}") from None
        except Exception as error:
            reason = " ".join((str(error) or type(error).__name__).split())
            raise OSError(f"{self.url} could not be {how} ({reason}){more}") from None


def _copy_of(path: Path) -> _Copy | None:
    """The copy that this is, or is in."""
    return next((_Copy(root, url) for root, url in list(urls.items()) if path.is_relative_to(root)), None)


def _files(folder: Path) -> Iterator[Path]:
    """All in a folder and those within; folders that another process removes meanwhile are left out."""
    for path, _, names in os.walk(folder):
        yield from (Path(path, name) for name in names)


def _stamp(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def _hidden(name: str) -> bool:
    """Also names that would lead out of the directory, which a store may have."""
    return any(part == "" or part.startswith(".") for part in name.split("/"))


_IN_CHECKPOINT = re.compile(r"((?:.*/)?checkpoints/step-\d+)/.*")


def _in_half_a_checkpoint(name: str, there: Collection[str]) -> bool:
    """Whether a file is of a checkpoint whose upload, or removal, has not ended."""
    found = _IN_CHECKPOINT.fullmatch(name)
    return found is not None and f"{found[1]}/checkpoint.json" not in there


def _digests_last(names: Collection[str]) -> list[str]:
    order = {name: number for number, name in enumerate(MANIFESTS)}
    return sorted(names, key=lambda name: (order.get(Path(name).name, -1), name))


def _locks(folder: Path) -> list[Path]:
    """Those of the runs in a folder that were trained on this host."""
    return [path for path in _files(folder) if path.name == LOCK]


def _is_training(folder: Path) -> bool:
    """Whether a job trains a run that is here."""
    for path in _locks(folder):
        # The job may remove it meanwhile.
        with suppress(FileNotFoundError), path.open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False
