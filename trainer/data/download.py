"""Fetches the public sources that have a published digest, and refuses anything else that arrives."""

import http.client
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress

from logitmix.common.files import file_digest

BLOCK = 1 << 18


@dataclass(frozen=True)
class Source:
    url: str
    digest: str
    """ALGORITHM:HEX, as the publisher gives it."""


PINNED = {
    "ml-100k": Source(
        "https://files.grouplens.org/datasets/movielens/ml-100k.zip", "md5:0e33842e24a9c977be4e0107933c0723"
    ),
    "ml-1m": Source("https://files.grouplens.org/datasets/movielens/ml-1m.zip", "md5:c4d9eecfca2ab87c1945afe126590906"),
    "ml-20m": Source(
        "https://files.grouplens.org/datasets/movielens/ml-20m.zip", "md5:cd245b17a1ae2cc31bb14903e1204af3"
    ),
}
"""By name. GroupLens publishes MD5 sums beside the archives, so these are MD5."""

_AMAZON = "https://cseweb.ucsd.edu/~jmcauley/datasets/amazon/links.html"
_UNPINNED = {
    "ml-latest": ("changes over time and so has no fixed digest", "https://grouplens.org/datasets/movielens/latest/"),
    "sequences": ("is a format, not one data set", ""),
    "table": ("is a format, not one data set", ""),
}


def source_for(name: str, pinned: dict[str, Source]) -> Source:
    """ValueError that says where to get the files when there is nothing to check a download against."""
    if name in pinned:
        return pinned[name]
    reason, page = _UNPINNED.get(name, ("has no published digest", _AMAZON))
    advice = f"download it from {page} and give the file with --source" if page else "give the file with --source"
    raise ValueError(f"{name} {reason}; {advice}")


def download(source: Source, path: Path, progress: Progress, timeout: float = 30.0) -> None:
    """Fetches `source.url` to `path`, which appears only once it is complete and its digest matches.

    `timeout` in seconds is for each wait on the network. A `path` that already holds the right bytes is left as it is.
    Raises ValueError, leaving no part behind, when the server refuses, breaks off or sends other bytes, and when `path`
    holds other bytes.
    """
    algorithm, _, wanted = source.digest.partition(":")
    if path.exists():
        found = file_digest(path, algorithm)
        if found != wanted:
            raise ValueError(
                f"{path}: its {algorithm} is {found}, not the published {wanted}; remove it, or read it with --source"
            )
        return
    part = path.with_name(path.name + ".part")
    try:
        _fetch(source.url, part, progress, timeout)
        found = file_digest(part, algorithm)
        if found != wanted:
            raise ValueError(f"{source.url}: the {algorithm} of what came is {found}, not the published {wanted}")
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
    except urllib.error.HTTPError as error:
        raise ValueError(f"{url}: the server answered {error.code} {error.reason}") from None
    except urllib.error.URLError as error:
        raise ValueError(f"{url}: no connection ({error.reason})") from None
    except (TimeoutError, ConnectionError, http.client.HTTPException) as error:
        raise ValueError(f"{url}: the connection broke off ({error or type(error).__name__}); try again") from None
    if received < size:
        raise ValueError(f"{url}: the connection broke off after {received:,} of {size:,} bytes; try again")
