"""/openapi.json says what the server does, and /docs shows it."""

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from small_models import every_feature, export_small, small_model
from test_server import TOKEN, Running, running

from logitmix.serving import openapi
from logitmix.serving import server as server_module
from logitmix.serving.connection import MAX_BODY
from logitmix.serving.guards import Allowed
from logitmix.serving.live import LiveExport
from logitmix.serving.metrics import PATHS

X = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_small(small_model("mol", X, schema=every_feature(X)), tmp_path_factory.mktemp("openapi") / "served")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    """With all paths."""
    with running(folder, shadow=LiveExport(folder, print)) as found:
        yield found


def described(server: Running) -> Any:
    return server.ask(b"", "GET", "/openapi.json")[1]


def operations(description: Any) -> dict[str, tuple[str, Any]]:
    """By path, the method and what is said of it."""
    return {
        path: (method.upper(), of) for path, methods in description["paths"].items() for method, of in methods.items()
    }


def sent(port: int, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, str, bytes]:
    """Status, type and content of an answer."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request(method, path, body if body is None or isinstance(body, bytes) else json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, answer.headers.get_content_type(), answer.read()


def content_of(description: Any, path: str, status: int) -> Any:
    """By type, what is said of the content of an answer."""
    _, operation = operations(description)[path.partition("?")[0]]
    response = operation["responses"]["200" if status == 200 else "default"]
    assert response["description"]
    return response["content"]


def require_as_described(description: Any, path: str, answer: tuple[int, str, bytes]) -> None:
    """By status, type, and all entries of JSON."""
    status, kind, content = answer
    schema = content_of(description, path, status)[kind]["schema"]
    if "$ref" in schema:
        model = getattr(openapi, schema["$ref"].rpartition("/")[2])
        TypeAdapter(model).validate_json(content, strict=True, extra="forbid")


def test_all_paths_and_entries_are_described(server: Running) -> None:
    found = described(server)
    assert sorted(operations(found)) == sorted(PATHS)
    for _, of in operations(found).values():
        assert of["summary"] and of["description"] and "422" not in of["responses"]
        assert all(each["description"] for each in of.get("parameters", []))
    assert len({of["operationId"] for _, of in operations(found).values()}) == len(PATHS)
    for schema in found["components"]["schemas"].values():
        assert all(each["description"] for each in schema["properties"].values())
    assert set(found["components"]["schemas"]["Body"]["properties"]) > {"history", "k", "stage1"}


def test_refusals_are_described(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(folder, Allowed(("here",), token=TOKEN)) as server:
        token = {"Authorization": f"Bearer {TOKEN}"}
        found = json.loads(sent(server.port, "GET", "/openapi.json", **token)[2])
        body = {"history": ["id 7"]}
        for status, path, headers in (
            (400, "/items?limit=0", token),
            (401, "/retrieve", {}),
            (403, "/openapi.json", {"Origin": "http://stranger.example"}),
            (403, "/retrieve", {"Origin": "http://stranger.example"}),
            (404, "/shadow", token),
            (421, "/docs", {"Host": "stranger.example"}),
        ):
            answer = sent(server.port, operations(found)[path.partition("?")[0]][0], path, body, **headers)
            assert answer[0] == status
            require_as_described(found, path, answer)
        require_as_described(found, "/retrieve", sent(server.port, "POST", "/retrieve", b"{", **token))
        require_as_described(found, "/retrieve", sent(server.port, "POST", "/retrieve", b" " * (MAX_BODY + 1), **token))
        monkeypatch.setattr(server_module, "UNREAD", -1)
        require_as_described(found, "/items", sent(server.port, "GET", "/items", **token))


def test_who_needs_a_token_is_said(server: Running, folder: Path) -> None:
    assert "securitySchemes" not in described(server)["components"]
    with running(folder, Allowed(token=TOKEN)) as guarded:
        found = json.loads(sent(guarded.port, "GET", "/openapi.json", Authorization=f"Bearer {TOKEN}")[2])
        assert found["components"]["securitySchemes"] == {"token": {"type": "http", "scheme": "bearer"}}
        for path, (method, of) in operations(found).items():
            assert (sent(guarded.port, method, path)[0] == 401) == (of.get("security") == [{"token": []}]), path
