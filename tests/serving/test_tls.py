"""HTTPS: handshakes that come about and others, the certificates of clients, and files that are none."""

import json
import re
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from http.client import HTTPSConnection
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from small_models import export_small, raw_ids, small_model
from test_server import head, read_all, require_cut_off, running
from waiting import until

from logitmix.serving import server as server_module
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


def metrics(port: int, context: ssl.SSLContext) -> str:
    with urlopen(f"https://localhost:{port}/metrics", timeout=10, context=context) as answer:
        text: str = answer.read().decode()
        return text


def test_who_does_not_shake_hands_hinders_nobody(
    folder: Path, pki: Path, capfd: pytest.CaptureFixture[str], caplog: Any
) -> None:
    tls, context = Tls(pki / "server.pem", pki / "server.key"), of_client(pki)
    with running(folder, Allowed(token=TOKEN), tls=tls) as server, server.connect() as silent:
        with server.connect() as strange, server.connect() as half:
            strange.sendall(head(0))
            half.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
            assert b"HTTP" not in read_all(strange)
            status, found = get(server.port, context, "/retrieve", {"history": [raw_ids(X)[3]], "k": 2}, TOKEN)
            assert status == 200 and len(found["items"]) == 2
            assert get(server.port, context, "/items")[0] == 401
        silent.settimeout(0.1)
        with pytest.raises(TimeoutError):
            silent.recv(1)
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


def test_who_does_not_read_is_cut_off(folder: Path, pki: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tls = Tls(pki / "server.pem", pki / "server.key")
    with running(folder, tls=tls) as server, server.connect() as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with of_client(pki).wrap_socket(plain, server_hostname="localhost") as client:
            require_cut_off(server, client, lambda: metrics(server.port, of_client(pki)), monkeypatch, 4000)


def test_an_answer_of_any_length_is_read(folder: Path, pki: Path) -> None:
    script = resources.files("fastapi_swagger.resources") / "swagger-ui-bundle.js"
    tls = Tls(pki / "server.pem", pki / "server.key")
    with running(folder, tls=tls) as server:
        client = HTTPSConnection("localhost", server.port, timeout=10, context=of_client(pki))
        for _ in range(2):
            client.request("GET", "/static/swagger-ui-bundle.js")
            assert client.getresponse().read() == script.read_bytes()
        client.close()


def test_files_that_are_replaced(folder: Path, pki: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "POLL_SECONDS", 0.02)
    for name in ("server.pem", "server.key"):
        shutil.copy(pki / name, tmp_path)
    tls = Tls(tmp_path / "server.pem", tmp_path / "server.key")
    with running(folder, tls=tls) as server:
        (tmp_path / "server.key").write_text("nothing")
        until(lambda: len(server.said) == 1)
        assert server.said[0].startswith("the TLS files stay as they were: --tls-certificate ")
        assert get(server.port, of_client(pki))[0] == 200
        shutil.copy(pki / "client.pem", tmp_path / "server.pem")
        shutil.copy(pki / "client.key", tmp_path / "server.key")
        until(lambda: server.said[-1] == "new TLS files")
        with pytest.raises(ssl.SSLCertVerificationError):
            get(server.port, of_client(pki))
        assert get(server.port, ssl.create_default_context(cafile=pki / "other.pem"))[0] == 200


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--tls-certificate server.pem", "HTTPS needs both --tls-certificate FILE and --tls-key FILE"),
        ("--tls-client-ca ca.pem", "HTTPS needs both --tls-certificate FILE and --tls-key FILE"),
        ("--tls-certificate none --tls-key server.key", "server.key cannot be used: [Errno 2] No such file"),
        ("--tls-certificate server.key --tls-key server.key", "--tls-key server.key cannot be used: [SSL] PEM lib"),
        ("--tls-certificate server.pem --tls-key ca.key", "--tls-key ca.key cannot be used: KEY_VALUES_MISMATCH"),
        ("--tls-certificate server.pem --tls-key server.locked --workers 2", "--tls-key is encrypted, and a server"),
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
