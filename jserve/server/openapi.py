"""The OpenAPI document of the HTTP API, made from the tables that bodies are read by. Knows paths
and schemas: no requests.

Source: the OpenAPI Specification 3.1.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jserve import openai_fields as fields
from jserve.openai_fields import Schema
from jserve.server.front import Front
from jserve.server.http_errors import JsonResponse
from jserve.server.http_request import call_of_http

PATH = "/openapi.json"
_COUNT: Schema = {"type": "integer", "minimum": 0}
_USAGE: Schema = {
    "type": "object",
    "properties": {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": {
            "type": "object",
            "properties": {"cached_tokens": _COUNT},
        },
    },
    "required": ["prompt_tokens", "total_tokens"],
}
_ERROR: Schema = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": fields.TEXT,
                "type": fields.TEXT,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
_STATUS: Schema = {"type": "object", "properties": {"status": fields.TEXT}}
_MODEL: Schema = {
    "type": "object",
    "properties": {
        "id": fields.TEXT,
        "object": {"const": "model"},
        "created": _COUNT,
        "owned_by": fields.TEXT,
        "max_model_len": _COUNT,
    },
    "required": ["id", "object", "created", "owned_by"],
}
_VERSION: Schema = {"type": "object", "properties": {"version": fields.TEXT}}
_ERRORS = {
    "400": "A field or the body is wrong; the message names it",
    "401": "No known key",
    "403": "The caller may not do this",
    "404": "This model is not served here",
    "413": "The body is too large",
    "415": "The body is not application/json",
    "429": "The queue, or the caller's share, is full; see retry-after",
    "431": "The head is too large",
    "500": "This request failed",
    "503": "The server is loading, draining or broken",
    "504": "The request's time limit passed",
}
_HEADERS: list[Schema] = [
    {
        "name": "x-request-id",
        "in": "header",
        "description": "Returned as it is, and part of the answer's id.",
        "schema": {"type": "string", "minLength": 1, "maxLength": 200},
    },
    {
        "name": "x-request-timeout-ms",
        "in": "header",
        "schema": {"type": "string", "pattern": "^[1-9][0-9]{0,11}$"},
    },
]


def routes(front: Front) -> list[Route]:
    return [Route(PATH, show)]


async def show(request: Request) -> Response:
    call_of_http(request)
    return JsonResponse(document())


@cache
def document() -> dict[str, Any]:
    common = (fields.SAMPLING, fields.REQUEST, fields.FORM, fields.COMMON, fields.STREAM)
    chat = body_schema(*common, fields.CHAT, required=["messages"])
    text = body_schema(*common, fields.COMPLETIONS, {"prompt": fields.PROMPTS}, required=["prompt"])
    tokenize = {
        "oneOf": [
            body_schema(fields.TOKENIZE, fields.TOKENIZE_TEXT, required=["prompt"]),
            body_schema(fields.TOKENIZE, fields.TOKENIZE_CHAT, required=["messages"]),
        ]
    }
    models = {"type": "object", "properties": {"data": {"type": "array", "items": _MODEL}}}
    name = {"name": "model", "in": "path", "required": True, "schema": fields.TEXT}
    return {
        "openapi": "3.1.0",
        "info": {"title": "jserve", "version": version("jserve")},
        "security": [{}, {"key": []}],
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Error": _ERROR, "Usage": _USAGE},
        },
        "paths": {
            "/v1/chat/completions": {"post": generation(chat, "chat.completion")},
            "/v1/completions": {"post": generation(text, "text_completion")},
            "/v1/embeddings": {"post": _embeddings()},
            "/v1/models": {"get": operation(models)},
            "/v1/models/{model}": {"get": operation(_MODEL) | {"parameters": [name]}},
            "/version": {"get": operation(_VERSION)},
            "/tokenize": {"post": operation(_tokens(), tokenize)},
            "/tokenizer_info": {"get": operation({"type": "object"})},
            "/detokenize": {
                "post": operation(
                    {"type": "object", "properties": {"prompt": fields.TEXT}},
                    body_schema(fields.DETOKENIZE, required=["tokens"]),
                )
            },
            **{path: {"get": _health()} for path in ("/health", "/health/live", "/health/ready")},
            "/metrics": {"get": operation({"type": "string"}, kind="text/plain")},
        },
    }


def body_schema(*tables: Mapping[str, Schema], required: Iterable[str] = ()) -> Schema:
    """Returns the schema of an object with the fields of all `tables`, and no others; those of
    sampling and requests have their other names, too. Null counts as absent, so what is not
    required, and whatever is not known, may be null."""
    known = {name: schema for table in tables for name, schema in table.items()}
    if fields.REQUEST.items() <= known.items():
        aliases = fields.ALIASES.items()
        known |= {alias: known[name] for alias, name in aliases if name in known}
        known |= fields.LABELS
        known |= {
            name: {"enum": list(values)}
            for name, values in fields.NEUTRAL.items()
            if name not in known
        }
    must = list(required)
    return {
        "type": "object",
        "properties": {
            name: schema if name in must else {"anyOf": [schema, {"type": "null"}]}
            for name, schema in known.items()
        },
        "additionalProperties": fields.NOTHING,
        **({"required": must} if must else {}),
    }


def operation(answer: Schema, body: Schema | None = None, kind: str = "application/json") -> Schema:
    """Returns what an endpoint answers, and to which JSON."""
    responses = {"200": _response("The answer", answer, kind)}
    responses |= {
        status: _response(text, {"$ref": "#/components/schemas/Error"})
        for status, text in _ERRORS.items()
    }
    if body is None:
        return {"responses": responses}
    content = {"application/json": {"schema": body}}
    return {"requestBody": {"required": True, "content": content}, "responses": responses}


def generation(body: Schema, kind: str) -> Schema:
    answer = {
        "type": "object",
        "properties": {
            "id": fields.TEXT,
            "object": {"const": kind},
            "created": _COUNT,
            "model": fields.TEXT,
            "choices": {"type": "array", "items": {"type": "object"}, "minItems": 1},
            "usage": {"$ref": "#/components/schemas/Usage"},
        },
        "required": ["id", "object", "created", "model", "choices", "usage"],
    }
    shown = operation(answer, body) | {"parameters": _HEADERS}
    # The schema is of each event: 3.1 does not say how to describe a stream.
    events = {"schema": {"type": "object", "properties": {"data": fields.TEXT}}}
    shown["responses"]["200"]["content"]["text/event-stream"] = events
    return shown


def _embeddings() -> Schema:
    vector = {"anyOf": [{"type": "array", "items": {"type": "number"}}, fields.TEXT]}
    one = {"object": {"const": "embedding"}, "index": _COUNT, "embedding": vector}
    answer = {
        "object": {"const": "list"},
        "data": {
            "type": "array",
            "items": {"type": "object", "properties": one, "required": list(one)},
        },
        "model": fields.TEXT,
        "usage": {"$ref": "#/components/schemas/Usage"},
    }
    shown = {"type": "object", "properties": answer, "required": list(answer)}
    body = body_schema(fields.REQUEST, fields.EMBEDDINGS, required=["input"])
    return operation(shown, body) | {"parameters": _HEADERS}


def _health() -> Schema:
    return {"responses": {s: _response("Its state", _STATUS) for s in ("200", "503")}}


def _tokens() -> Schema:
    ids = {"type": "array", "items": fields.TOKEN_ID}
    names = {"type": ["array", "null"], "items": fields.TEXT}
    answer = {"count": _COUNT, "max_model_len": _COUNT, "tokens": ids, "token_strs": names}
    return {"type": "object", "properties": answer, "required": list(answer)}


def _response(text: str, schema: Schema, kind: str = "application/json") -> Schema:
    return {"description": text, "content": {kind: {"schema": schema}}}
