"""The JSON body of a request to the server -> a question for the Retriever, or one line that says what is wrong."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic.json_schema import WithJsonSchema

from logitmix.common.files import from_json
from logitmix.common.mappings import nearest
from logitmix.common.messages import prefixed
from logitmix.common.values import id_texts
from logitmix.serving.request import Question, UnknownIds
from logitmix.serving.settings import MAX_STAGE_1

MAX_K = 10_000
MAX_HISTORY = 10_000
MAX_IDS = 100_000
"""Most ids in `allowed` or `blocked`."""
MAX_WHERE = 10_000


def _ids(most: int) -> Any:
    """Up to so many ids. One check for all of them takes a tenth of the time of one for each."""
    schema = {"type": "array", "items": {"type": ["string", "integer"]}, "maxItems": most}
    return Annotated[
        list[Any], Field(max_length=most, fail_fast=True), AfterValidator(id_texts), WithJsonSchema(schema)
    ]


class Body(BaseModel):
    """A request as `Request` describes it, within the limits of the server. The Retriever knows the model's features
    and checks their values."""

    model_config = ConfigDict(strict=True, extra="forbid")

    history: _ids(MAX_HISTORY) | None = None  # type: ignore[valid-type]
    timestamps: Annotated[list[int], Field(max_length=MAX_HISTORY, fail_fast=True)] | None = None
    time: int | None = None
    user: dict[str, Any] | None = None
    events: Annotated[list[dict[str, Any]], Field(max_length=MAX_HISTORY, fail_fast=True)] | None = None
    want: Annotated[Any, WithJsonSchema({"type": ["string", "integer", "null"]})] = None
    allowed: _ids(MAX_IDS) | None = None  # type: ignore[valid-type]
    blocked: _ids(MAX_IDS) | None = None  # type: ignore[valid-type]
    where: Annotated[str, Field(max_length=MAX_WHERE)] | None = None
    limit: dict[str, Annotated[int, Field(ge=1)]] | None = None
    k: Annotated[int, Field(ge=1, le=MAX_K)] | None = 10
    unknown: UnknownIds | None = "skip"
    exclude_history: bool | None = None
    explain: bool | None = False
    columns: bool | None = False
    boost_new: Annotated[float, Field(allow_inf_nan=False)] | None = None
    stage1: Annotated[int, Field(ge=1, le=MAX_STAGE_1)] | None = None


def parse(body: bytes, defaults: Mapping[str, Any] = MappingProxyType({})) -> Question:
    """`defaults`: the options of a body that does not say, as of `Question.of`. ValueError of one line for all that is
    not the JSON of a `Body`."""
    with prefixed("the body is not JSON: "):
        found = from_json(body)
    try:
        Body.model_validate(found)
    except ValidationError as error:
        raise ValueError(_plainly(error)) from None
    return Question.of(found, defaults)


def _plainly(error: ValidationError) -> str:
    """The first of pydantic's errors."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if not first["loc"]:
        return "the body must be a JSON object"
    if first["type"] == "extra_forbidden":
        name, there = str(first["loc"][0])[:40], list(Body.model_fields)
        return f"there is no entry {name!r}{nearest(name, there)}; there are: {', '.join(there)}"
    place = ".".join(str(part)[:40] for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    return f"{place}: {message[0].lower()}{message[1:]}"
