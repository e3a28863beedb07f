"""Downloads the public sources that have a published digest, and refuses files with another digest."""

import http.client
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from rich.progress import Progress

from logitmix.common.files import file_digest
from logitmix.trainer.prepare.config import PrepareOptions

BLOCK = 1 << 18


@dataclass(frozen=True)
class Download:
    url: str
    digest: str
    """ALGORITHM:HEX, as the publisher gives it."""


def find_source(
    options: PrepareOptions,
    progress: Progress,
    downloads: Mapping[str, Download] = MappingProxyType({}),
    reason: str = "",
    page: str = "",
) -> Path:
    """The given --source, or else the download of that name, which is put beside the output.

    If there is neither, ValueError with the reason why this name is not downloaded, and the page to get it from.
    """
    if options.source:
        return Path(options.source)
    if options.name in downloads:
        wanted = downloads[options.name]
        path = options.directory.parent / wanted.url.rsplit("/", 1)[-1]
        download(wanted, path, progress)
        return path
    advice = f"download it from {page} and give the file with --source" if page else "give the file with --source"
    raise ValueError(f"{options.name} {reason}; {advice}")


def download(wanted: Download, path: Path, progress: Progress, timeout: float = 30.0) -> None:
    """Downloads `wanted.url` to `path`, which appears only once it is complete and its digest matches.

    `timeout`, in seconds, is for each wait on the network. A `path` that already holds the right bytes is left alone.
    Raises ValueError, and leaves no partial file, if the server refuses, breaks off or sends other bytes, and if `path`
    holds other bytes.
    """
    algorithm, _, published = wanted.digest.partition(":")
    if path.exists():
        found = file_digest(path, algorithm)
        if found != published:
            raise ValueError(
                f"{path}: its {algorithm} is {found}, not the published {published}; "
                "remove it, or read it with --source"
            )
        return
    part = path.with_name(path.name + ".part")
    try:
        _fetch(wanted.url, part, progress, timeout)
        found = file_digest(part, algorithm)
        if found != published:
            raise ValueError(f"{wanted.url}: the {algorithm} of what came is {found}, not the published {published}")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _fetch(url: str, part: Path, progress: Progress, timeout: float) -> None:
    try:
        with urllib.request.urlopen(url, timeout=timeout) as response, part.open("wb") as out:
            size = int(response.headers.get("Content-Length", 0))
            task = progress.add_task(f"downloading {url.rsplit('/', 1)[-1]}", total=size or None)
            received = 0
            while block := response.read(BLOCK):
                out.write(block)
                received += len(block)
                progress.advance(task, len(block))
    except (OSError, http.client.HTTPException) as error:
        raise ValueError(f"{url}: not downloaded ({error or type(error).__name__})") from None
    if received < size:
        raise ValueError(f"{url}: the connection broke off after {received:,} of {size:,} bytes; try again")
