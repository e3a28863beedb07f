"""What GET /openapi.json says, from which /docs is made: FastAPI's description of the paths, with the docstrings of
what a request to /retrieve and its answer hold, and who may ask."""

from typing import Any, Literal, NotRequired

from fastapi import FastAPI
from pydantic import TypeAdapter
from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

from logitmix.common.docstrings import docs_of
from logitmix.serving.body import Body
from logitmix.serving.explain import Named, Product, Similar, Why
from logitmix.serving.guards import OPEN, Allowed
from logitmix.serving.request import Options, Request
from logitmix.serving.retriever import Row


class Identity(TypedDict):
    """What an answer comes from."""

    run: str
    """Name of the run that trained the model."""
    step: int
    """Step of the checkpoint."""
    dataset: str
    """Name of the dataset that it was trained on."""
    digest: str
    """Of the export's manifest."""
    delta: int
    """Number of the last delta that is applied, or 0."""
    logitmix: str
    """The server's version."""


class Answer(Identity):
    """The best items, and what they come from."""

    items: list[Row]
    """The best one first."""
    fallback: NotRequired[Literal["popular"]]
    """There where nothing is known of the user: the items are those with the most actions, and that number is their
    score."""


class Error(TypedDict):
    """What a client gets instead of an answer."""

    error: str
    """What is wrong, in one line."""


_DOCUMENTED: dict[type, tuple[type, ...]] = {
    Body: (Request, Options),
    Answer: (Answer, Identity),
    Row: (Named, Row),
    Similar: (Named, Similar),
    **{of: (of,) for of in (Why, Product, Error)},
}
"""What has the docstrings of a schema's fields, in their order."""


def describe(app: FastAPI, allowed: Allowed) -> dict[str, Any]:
    """The description, once the application has all paths."""
    found = app.openapi()
    schemas = {name: of for name, of in found["components"]["schemas"].items() if "ValidationError" not in name}
    schemas |= {"Body": Body.model_json_schema(), "Error": TypeAdapter(Error).json_schema()}
    for of, documented in _DOCUMENTED.items():
        docs = {name: {"description": text} for each in documented for name, text in docs_of(each).items()}
        fields = schemas[of.__name__]["properties"]
        schemas[of.__name__]["properties"] = {name: fields[name] | docs.get(name, {}) for name in docs | fields}
    found["components"] = {"schemas": schemas}
    if allowed.token:
        found["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    refusal = {
        "description": "The request is refused; the line says why.",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    for path, methods in found["paths"].items():
        for operation in methods.values():
            operation["responses"] = {"200": operation["responses"]["200"], "default": refusal}
            if allowed.token and path not in OPEN:
                operation["security"] = [{"token": []}]
    return found
