"""HTTPS: handshakes that come about and others, the certificates of clients, and files that are none."""

import json
import re
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from small_models import export_small, raw_ids, small_model
from test_server import head, read_all, running
from test_workers import given, worker_of
from waiting import until

from logitmix.serving import connection as connection_module
from logitmix.serving import server as server_module
from logitmix.serving import tls as tls_module
from logitmix.serving.guards import Allowed
from logitmix.serving.tls import Tls

X = 60
TOKEN = "0123456789abcdef"
CN, DAY = x509.OID_COMMON_NAME, timedelta(days=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_small(small_model("dot", X), tmp_path_factory.mktemp("tls") / "served")


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates and keys: of two authorities, of the server by the first, and of a client by the second."""
    folder, now = tmp_path_factory.mktemp("pki"), datetime.now(UTC)
    made: dict[str, tuple[x509.Name, Any]] = {}
    for name, issuer in (("ca", "ca"), ("other", "other"), ("server", "ca"), ("client", "other")):
        key, subject = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(CN, name)])
        made[name], number = (subject, key), x509.random_serial_number()
        builder = x509.CertificateBuilder(made[issuer][0], subject, key.public_key(), number, now - DAY, now + DAY)
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), False)
        builder = builder.add_extension(x509.BasicConstraints(name == issuer, None), True)
        certificate = builder.sign(made[issuer][1], hashes.SHA256())
        (folder / f"{name}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        for file, encryption in (
            (f"{name}.key", serialization.NoEncryption()),
            (f"{name}.locked", serialization.BestAvailableEncryption(b"secret")),
        ):
            pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
            (folder / file).write_bytes(key.private_bytes(pem, form, encryption))
    return folder


def of_client(pki: Path, with_certificate: bool = False) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=pki / "ca.pem")
    if with_certificate:
        context.load_cert_chain(pki / "client.pem", pki / "client.key")
    return context


def get(
    port: int, context: ssl.SSLContext, path: str = "/healthz", body: Any = None, token: str = ""
) -> tuple[int, Any]:
    with closing(HTTPSConnection("localhost", port, timeout=10, context=context)) as client:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        client.request("POST" if body else "GET", path, json.dumps(body) if body else None, headers)
        answer = client.getresponse()
        return answer.status, json.loads(answer.read())


@contextmanager
def encrypted(port: int, pki: Path) -> Iterator[ssl.SSLSocket]:
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
        of_client(pki).wrap_socket(plain, server_hostname="localhost") as client,
    ):
        yield client


def test_who_does_not_shake_hands_hinders_nobody(
    folder: Path, pki: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: Any
) -> None:
    monkeypatch.setattr(tls_module, "PATIENCE_SECONDS", 100.0)
    tls, context = Tls(pki / "server.pem", pki / "server.key"), of_client(pki)
    with running(folder, Allowed(token=TOKEN), tls=tls) as server:
        with server.connect() as silent, server.connect() as strange, server.connect() as half:
            strange.sendall(head(0))
            half.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
            assert b"HTTP" not in read_all(strange)
            status, found = get(server.port, context, "/retrieve", {"history": [raw_ids(X)[3]], "k": 2}, TOKEN)
            assert status == 200 and len(found["items"]) == 2
            assert get(server.port, context, "/items")[0] == 401
            until(lambda: len(server.server._given) == 2)  # type: ignore[attr-defined]
            silent.settimeout(0.1)
            with pytest.raises(TimeoutError):
                silent.recv(1)
        until(lambda: not server.server._given)  # type: ignore[attr-defined]
        monkeypatch.setattr(tls_module, "PATIENCE_SECONDS", 0.2)
        with server.connect() as silent:
            assert read_all(silent) == b""
        # Nor do they take the place of others beyond a number.
        monkeypatch.setattr(server_module, "CONNECTIONS", 1)
        monkeypatch.setattr(server_module, "SPARE", 0)
        monkeypatch.setattr(tls_module, "PATIENCE_SECONDS", 100.0)
        until(lambda: not server.server._given)  # type: ignore[attr-defined]
        with server.connect(), server.connect() as another:
            assert read_all(another) == b""
        until(lambda: not server.server._given)  # type: ignore[attr-defined]
        with server.connect() as silent:  # the server ends all the same
            until(lambda: bool(server.server._given))  # type: ignore[attr-defined]
            server.server.should_exit = True
            assert read_all(silent) == b""
    assert (caplog.records, capfd.readouterr()) == ([], ("", ""))


def test_clients_must_have_a_certificate(folder: Path, pki: Path) -> None:
    with running(folder, tls=Tls(pki / "server.pem", pki / "server.key", pki / "other.pem")) as server:
        assert get(server.port, of_client(pki, with_certificate=True))[0] == 200
        with pytest.raises((ssl.SSLError, ConnectionError)):
            get(server.port, of_client(pki))


@pytest.mark.parametrize("encrypts", [False, True])
def test_the_health_check_of_the_image_takes_no_proxy(folder: Path, pki: Path, tmp_path: Path, encrypts: bool) -> None:
    dockerfile = (Path(__file__).parents[2] / "Dockerfile").read_text().replace("\\\n", "")
    (words,) = re.findall('^ENV HEALTH="(.*)"$', dockerfile, re.MULTILINE)
    command = tmp_path / "cmdline"
    command.write_bytes(b"python\0logitmix\0serve\0--tls-key\0KEY\0" if encrypts else b"python\0logitmix\0serve\0")
    tls = Tls(pki / "server.pem", pki / "server.key") if encrypts else None
    with running(folder, tls=tls) as server:
        words = words.replace("/proc/1/cmdline", str(command)).replace("8080", str(server.port))
        check = [sys.executable, "-c", words]
        proxies = dict.fromkeys(["http_proxy", "https_proxy"], "http://127.0.0.1:9")
        assert subprocess.run(check, env=proxies, capture_output=True).returncode == 0
    assert subprocess.run(check, env=proxies, capture_output=True).returncode == 1


@pytest.mark.parametrize("count", [1, 3])
def test_who_does_not_read_is_cut_off(folder: Path, pki: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """What is not read is counted, which asyncio's own protocol hides, and no further answer is made."""
    monkeypatch.setattr(connection_module, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(connection_module, "READ_RATE", 2**30)
    page, made, sizes = server_module._page("page", True), list[int](), list[int]()
    monkeypatch.setattr(server_module, "_page", lambda *_: made.append(1) or ("~" * 2**24, page[1]))
    add = connection_module.Unread.add
    monkeypatch.setattr(connection_module.Unread, "add", lambda of, size: sizes.append(size) or add(of, size))
    tls = Tls(pki / "server.pem", pki / "server.key")
    with running(folder, tls=tls) as server, encrypted(server.port, pki) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * count)
        until(lambda: bool(sizes))
        until(lambda: not server.server.server_state.connections)
        assert len(made) == len(sizes) == 1 and sizes[0] > 2**23


def test_an_answer_of_any_length_is_read(folder: Path, pki: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = server_module._page("page", True)
    monkeypatch.setattr(server_module, "_page", lambda *_: ("~" * 2**23, page[1]))
    with (
        running(folder, tls=Tls(pki / "server.pem", pki / "server.key")) as server,
        encrypted(server.port, pki) as client,
    ):
        for _ in range(2):
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            left = 2**23
            while left:
                left -= client.recv(2**20).count(b"~")
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert read_all(client).count(b"~") == 2**23


def test_files_that_are_replaced(folder: Path, pki: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "POLL_SECONDS", 0.02)
    for name in ("server.pem", "server.key"):
        shutil.copy(pki / name, tmp_path)
    tls = Tls(tmp_path / "server.pem", tmp_path / "server.key")
    with running(folder, tls=tls) as server:
        (tmp_path / "server.key").write_text("nothing")
        until(lambda: len(server.said) == 1)
        assert server.said[0].startswith("the TLS files stay as they were: --tls-key ")
        assert get(server.port, of_client(pki))[0] == 200
        shutil.copy(pki / "client.pem", tmp_path / "server.pem")
        shutil.copy(pki / "client.key", tmp_path / "server.key")
        until(lambda: server.said[-1] == "new TLS files")
        with pytest.raises(ssl.SSLCertVerificationError):
            get(server.port, of_client(pki))
        assert get(server.port, ssl.create_default_context(cafile=pki / "other.pem"))[0] == 200


def test_a_worker_shakes_hands(folder: Path, pki: Path, tmp_path: Path) -> None:
    """And says so when there is no connection after all, which its supervisor counts."""
    tls = Tls(pki / "server.pem", pki / "server.key")
    with worker_of(0, folder, tmp_path, tls) as (control, _), given(control) as silent, given(control) as plain:
        with of_client(pki).wrap_socket(plain, server_hostname="localhost") as client:
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert read_all(client).startswith(b"HTTP/1.1 200 ")
        assert control.recv(100) == b"closed\n"
        silent.sendall(head(0))
        assert b"HTTP" not in read_all(silent)
        assert control.recv(100) == b"closed\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--tls-certificate server.pem", "HTTPS needs both --tls-certificate FILE and --tls-key FILE"),
        ("--tls-client-ca ca.pem", "HTTPS needs both --tls-certificate FILE and --tls-key FILE"),
        ("--tls-certificate none --tls-key server.key", "--tls-certificate none cannot be read: No such file"),
        ("--tls-certificate . --tls-key server.key", "--tls-certificate . cannot be read: Is a directory"),
        ("--tls-certificate server.key --tls-key server.key", "--tls-certificate server.key has no certificate in PEM"),
        ("--tls-certificate server.pem --tls-key ca.pem", "--tls-key ca.pem has no private key in PEM"),
        (
            "--tls-certificate server.pem --tls-key ca.key",
            "--tls-key ca.key is not the key of --tls-certificate server",
        ),
        ("--tls-certificate server.pem --tls-key server.locked --workers 2", "--tls-key is encrypted, and a server"),
        ("--tls-certificate cut.pem --tls-key server.key", "--tls-certificate cut.pem and --tls-key server.key cannot"),
        ("--tls-certificate server.pem --tls-key server.key --tls-client-ca cut.pem", "--tls-client-ca cut.pem cannot"),
    ],
)
def test_what_the_command_refuses(
    folder: Path, pki: Path, refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch, words: str, said: str
) -> None:
    """In one line, before it listens."""
    monkeypatch.chdir(pki)
    text = (pki / "server.pem").read_text()
    (pki / "cut.pem").write_text(text[:200] + text[260:])
    last = refusal("serve", str(folder), "--port", "0", *words.split()).strip()
    assert said in last and "\n" not in last and "serving" not in last
