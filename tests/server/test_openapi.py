"""The OpenAPI document says what is read, and no more: it is held against the readers."""

from __future__ import annotations

import aiohttp
import jsonschema
import pytest

from jserve.config import ServerSettings
from jserve.errors import InvalidRequest
from jserve.openai_fields import ALIASES, REQUEST
from jserve.openai_format import Endpoint
from jserve.openai_http import read_http_body
from jserve.server.front import Front
from jserve.server.http_api import make_app
from jserve.server.openapi import document
from tests.server.conftest import serving

CHAT, TEXT = {"messages": [{"role": "user", "content": "hi"}]}, {"prompt": "hi"}
NEEDED = {Endpoint.CHAT: CHAT, Endpoint.COMPLETIONS: TEXT}
# Fields that are legal only beside others.
BESIDE = {
    "top_logprobs": {"logprobs": True},
    "stream_options": {"stream": True},
    "best_of": {"n": 1},
}
# Their ranges are the engine's, so that gRPC has them, too.
CHECKED_LATER = {
    "prompt",
    "guided_choice",
    "tool_choice",
    *REQUEST,
    *(alias for alias, name in ALIASES.items() if name in REQUEST),
}


def schema_of(endpoint: str) -> dict:
    post = document()["paths"][endpoint]["post"]
    return post["requestBody"]["content"]["application/json"]["schema"]


def examples(schema: dict):
    """Values at the edges of a field's schema, and beyond them."""
    for one in schema.get("anyOf", [schema]):
        kinds = one.get("type", ())
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if "enum" in one:
            yield from one["enum"]
        if "minimum" in one:
            yield from (one["minimum"], one["minimum"] - 1, one["maximum"], one["maximum"] + 1)
        if "boolean" in kinds:
            yield from (True, False)
        if "string" in kinds:
            yield from ("", "x", "x" * one.get("maxLength", 1), "x" * (one.get("maxLength", 1) + 1))
        yield from (None, "text", 0.5, -1, True, [], {}, [1], ["x"], {"x": 1})


@pytest.mark.parametrize(
    ("endpoint", "name"), [(e, name) for e in Endpoint for name in schema_of(e)["properties"]]
)
def test_o89_each_field_is_read_as_its_schema_says(endpoint, name):
    schema = schema_of(endpoint)
    validator = jsonschema.Draft202012Validator(schema)
    for value in examples(schema["properties"][name]):
        body = {**NEEDED[endpoint], **BESIDE.get(name, {}), name: value}
        refusal = refusal_of(endpoint, body)
        assert not refusal.startswith("body has unknown"), refusal
        is_read = not refusal and name not in CHECKED_LATER
        assert not is_read or validator.is_valid(body), f"{name}={value!r:.60} was read"


def refusal_of(endpoint: Endpoint, body: dict) -> str:
    try:
        read_http_body(endpoint, body)
    except InvalidRequest as error:
        return str(error)
    return ""


def test_no_path_of_callers_is_missing():
    paths = {
        route.path.replace(":path", "") for route in make_app(Front(), ServerSettings()).routes
    }
    shown = set(document()["paths"])
    assert shown <= {path.replace("{name}", "{model}") for path in paths}
    for_callers = {path for path in paths if path.startswith(("/v1/", "/tok", "/detok", "/health"))}
    assert {path.replace("{name}", "{model}") for path in for_callers} <= shown


async def test_the_document_is_served():
    async with (
        serving(http=True) as served,
        aiohttp.ClientSession(served.http) as session,
        session.get("/openapi.json") as response,
    ):
        assert await response.json() == document()
