"""What GET /openapi.json says, from which /docs is made: FastAPI's description of the paths, with the docstrings of all
entries, who may ask, and what the export that answers has."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, Literal, NotRequired

from fastapi import FastAPI
from pydantic import TypeAdapter
from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

from logitmix.common.docstrings import docs_of
from logitmix.serving.body import Body
from logitmix.serving.columns import Kind
from logitmix.serving.explain import Named, Product, Similar, Why
from logitmix.serving.guards import OPEN, Allowed
from logitmix.serving.request import Options, Request
from logitmix.serving.retriever import Missing, Retriever, Row


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


class Answer(Missing, Identity):
    """The best items, and what they come from."""

    items: list[Row]
    """The best one first."""
    fallback: NotRequired[Literal["popular"]]
    """There where nothing is known of the user: the items are those with the most actions, and that number is their
    score."""


class Found(Named):
    """An item."""

    columns: dict[str, float | str]
    """Its values of the filterable columns, without those that it lacks."""


class Search(TypedDict):
    """What a search finds."""

    items: list[Found]
    """The most popular first, if there is a column `actions`."""
    more: bool
    """Whether there may be others."""
    columns: dict[str, Kind]
    """Kinds of the filterable columns."""
    most_score: float | None
    """The largest score that an item can have, if it is known."""


class Health(Missing, Identity):
    """What answers."""

    status: Literal["ok"]
    """Always the same."""
    num_items: int
    """Items of the export."""
    shadow: Identity | None
    """What the shadow's answers come from."""
    attributes: str | None
    """What values of filterable columns are changed."""
    refused: str | None
    """Why there are deltas or values that are not taken over."""


class Ready(Missing):
    """That requests shall be sent here."""

    status: Literal["ready"]
    """Always the same."""


class Error(TypedDict):
    """What a client gets instead of an answer."""

    error: str
    """What is wrong, in one line."""


_DOCUMENTED: dict[type, tuple[type, ...]] = {
    Body: (Request, Options),
    Answer: (Answer, Identity, Missing),
    Health: (Health, Identity, Missing),
    Ready: (Ready, Missing),
    Row: (Named, Row),
    Similar: (Named, Similar),
    Found: (Named, Found),
    **{of: (of,) for of in (Why, Product, Search, Identity, Error)},
}
"""What has the docstrings of a schema's fields, in their order."""


def describe(app: FastAPI, allowed: Allowed) -> dict[str, Any]:
    """What holds for all exports, once the application has all paths."""
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
    for path, operation in _operations(found):
        answered = operation["responses"]["200"]
        (answer,) = answered["content"].values()
        schema = schemas.get(answer["schema"].get("$ref", "").rpartition("/")[2], {})
        answered["description"] = schema.get("description", f"{operation['summary']}.")
        operation["responses"] = {"200": answered, "default": refusal}
        if allowed.token and path not in OPEN:
            operation["security"] = [{"token": []}]
    return found


def of_export(description: dict[str, Any], retriever: Retriever, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the description, with what an export's model takes and examples that it answers. `defaults`: the
    server's of a request's entries."""
    retriever.files.check()
    description = deepcopy(description)
    entries, inputs = description["components"]["schemas"]["Body"]["properties"], retriever.inputs
    (events,) = inputs["events"].values()
    entries["user"]["anyOf"][0] = _features(inputs["user"])
    entries["events"]["anyOf"][0]["items"] = _features(events)
    for name, value in defaults.items():
        entries[name]["default"] = value
    first = range(min(3, retriever.num_items))
    history = {"history": [retriever.raw_ids[item] for item in first], "k": 5}
    examples = {"after some items": history, "with reasons": {**history, "explain": True}}
    if retriever.kinds:
        examples["at most 2 of a value"] = {**history, "columns": True, "limit": {next(iter(retriever.kinds)): 2}}
    for _, operation in _operations(description):
        if body := operation.get("requestBody"):
            body["content"]["application/json"]["examples"] = {name: {"value": of} for name, of in examples.items()}
        for parameter in operation.get("parameters", []):
            if parameter["name"] == "query":
                parameter["example"] = retriever.raw_ids[0][: parameter["schema"]["maxLength"]]
    return description


def _operations(description: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each with its path."""
    for path, methods in description["paths"].items():
        for operation in methods.values():
            yield path, operation


def _features(named: Mapping[str, str]) -> dict[str, Any]:
    """An object of features, each with what its value is, in words."""
    properties = {name: {"description": of} for name, of in named.items()}
    return {"type": "object", "properties": properties, "additionalProperties": False}
