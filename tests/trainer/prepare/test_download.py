import hashlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from logitmix.trainer.prepare.config import PrepareOptions
from logitmix.trainer.prepare.download import Download, download
from logitmix.trainer.prepare.prepare import prepare
from logitmix.trainer.prepare.sources import movielens

BODY = b"".join(b"1\t%d\t5\t7\n" % item for item in range(10, 15)) * 40_000
DIGEST = f"md5:{hashlib.md5(BODY).hexdigest()}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/missing.zip":
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        self.wfile.write(BODY[: len(BODY) // 2] if self.path == "/truncated.zip" else BODY)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{listening.server_address[1]}"
        listening.shutdown()
        thread.join()


@pytest.fixture
def progress() -> Progress:
    return Progress(disable=True)


@pytest.mark.parametrize("digest", [DIGEST, f"sha256:{hashlib.sha256(BODY).hexdigest()}"])
def test_the_file_arrives_and_the_bar_is_full(server: str, digest: str, progress: Progress, tmp_path: Path) -> None:
    download(Download(f"{server}/a.zip", digest), tmp_path / "a.zip", progress)
    assert (tmp_path / "a.zip").read_bytes() == BODY
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.zip"]
    assert progress.finished and progress.tasks[0].completed == len(BODY)


@pytest.mark.parametrize(
    ("path", "digest", "message"),
    [
        ("/a.zip", "md5:" + "0" * 32, f"the md5 of what came is {DIGEST[4:]}, not the published {'0' * 32}"),
        ("/missing.zip", DIGEST, r"not downloaded \(HTTP Error 404"),
        ("/truncated.zip", DIGEST, f"the connection broke off after {len(BODY) // 2:,} of {len(BODY):,} bytes"),
    ],
)
def test_nothing_is_left_of_a_download_that_failed(
    server: str, path: str, digest: str, message: str, progress: Progress, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"^{server}{path}: {message}"):
        download(Download(server + path, digest), tmp_path / "a.zip", progress)
    assert list(tmp_path.iterdir()) == []


def test_a_refused_connection_is_one_line(monkeypatch: pytest.MonkeyPatch, progress: Progress, tmp_path: Path) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))  # bound but not listening
        url = f"http://127.0.0.1:{unheard.getsockname()[1]}/a.zip"
        with pytest.raises(ValueError, match=r"a\.zip: not downloaded \(.*refused"):
            download(Download(url, DIGEST), tmp_path / "a.zip", progress)
    assert list(tmp_path.iterdir()) == []


def test_a_silent_server_is_given_up(monkeypatch: pytest.MonkeyPatch, progress: Progress, tmp_path: Path) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/a.zip"
        with pytest.raises(ValueError, match="timed out"):
            download(Download(url, DIGEST), tmp_path / "a.zip", progress, timeout=0.1)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_already_is_checked_and_not_fetched(progress: Progress, tmp_path: Path) -> None:
    wanted = Download("http://127.0.0.1:9/a.zip", DIGEST)
    (tmp_path / "a.zip").write_bytes(BODY)
    download(wanted, tmp_path / "a.zip", progress)
    (tmp_path / "a.zip").write_bytes(BODY[:-1])
    with pytest.raises(ValueError, match=r"a\.zip: its md5 is \w+, not the published \w+; remove it"):
        download(wanted, tmp_path / "a.zip", progress)
    assert (tmp_path / "a.zip").read_bytes() == BODY[:-1]


def test_prepare_downloads_beside_the_output(server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(movielens.DOWNLOADS, "ml-100k", Download(f"{server}/all.txt", DIGEST))
    made = prepare(PrepareOptions("ml-100k", out=str(tmp_path / "made"), keep_duplicates=True), Console(quiet=True))
    assert (made["users"], made["items"], made["actions"]) == (1, 5, 200_000)
    assert made["source"] == {"name": "all.txt", "sha256": {"all.txt": hashlib.sha256(BODY).hexdigest()}}
    assert (tmp_path / "all.txt").read_bytes() == BODY


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("amazon-books", "amazon-books has no published digest; download it from https://.* and give .* --source"),
        ("ml-latest", "ml-latest changes over time .*; download it from https://grouplens.org/.* --source"),
        ("table", "table is a format, not one data set; give the file with --source"),
    ],
)
def test_what_cannot_be_checked_is_not_downloaded(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        prepare(PrepareOptions(name, out=str(tmp_path / "made")), Console(quiet=True))
    assert list(tmp_path.iterdir()) == []


def test_only_whole_md5_sums_of_grouplens_are_pinned() -> None:
    assert set(movielens.DOWNLOADS) == {"ml-100k", "ml-1m", "ml-20m"}
    for name, wanted in movielens.DOWNLOADS.items():
        assert wanted.url == f"https://files.grouplens.org/datasets/movielens/{name}.zip"
        assert wanted.digest.startswith("md5:") and len(bytes.fromhex(wanted.digest[4:])) == 16
