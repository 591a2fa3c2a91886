"""/tokenize, /detokenize and /tokenizer_info: text or a chat to token ids, and back. Knows bodies:
the tokenizer is the engine's, and so are the checks.

Source: vLLM's endpoints of these names, whose fields these are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jserve.engine.input_processor import InputProcessor
from jserve.errors import InvalidRequest, UnknownModel
from jserve.messages import GenerateRequest
from jserve.openai_format import read_chat_input, refuse_rest, take_bool
from jserve.openai_logprobs import token_name
from jserve.server.front import Front
from jserve.server.http_errors import JsonResponse
from jserve.server.http_request import call_of_http, front_of, read_json, unless_gone


def routes(front: Front) -> list[Route]:
    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/tokenizer_info", tokenizer_info),
    ]


async def tokenize(request: Request) -> Response:
    return await _answer(request, _tokenized)


async def detokenize(request: Request) -> Response:
    return await _answer(request, _detokenized)


async def _answer(
    request: Request, answer: Callable[[dict[str, Any], InputProcessor], Response]
) -> Response:
    call = call_of_http(request)
    body = await read_json(request, dict)
    with front_of(request).counted(call) as engine:
        return await unless_gone(request, asyncio.to_thread(answer, body, engine.processor))


async def tokenizer_info(request: Request) -> Response:
    """The special tokens and the chat template, for clients that render chats themselves."""
    call_of_http(request)
    return JsonResponse(front_of(request).engine.processor.tokenizer.settings())


def _tokenized(body: dict[str, Any], processor: InputProcessor) -> Response:
    fields = _fields(body, processor)
    wants_strings = take_bool(fields, "return_token_strs", False)
    is_chat = "messages" in fields
    add_special = take_bool(fields, "add_special_tokens", not is_chat)
    if is_chat:
        if add_special:  # the template writes what the model wants
            raise InvalidRequest("add_special_tokens=True is not supported for messages")
        message = GenerateRequest(**read_chat_input(fields))
        refuse_rest(fields)
        ids = processor.chat.encode(message)
        processor.chat.form(message, ids)  # refuses a tool_choice that no chat could have
    else:
        text = fields.pop("prompt", None)
        refuse_rest(fields)
        if not isinstance(text, str):
            raise InvalidRequest("prompt must be a text; or give messages")
        processor.prompts.check_length(text)
        ids = processor.tokenizer.encode(text, add_special_tokens=add_special)
    names = [token_name(processor.tokenizer, i) for i in ids] if wants_strings else None
    limit = processor.limits.max_model_len
    return JsonResponse(
        {"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": names}
    )


def _detokenized(body: dict[str, Any], processor: InputProcessor) -> Response:
    fields = _fields(body, processor)
    ids = fields.pop("tokens", None)
    refuse_rest(fields)
    vocab_size = processor.limits.vocab_size
    if not isinstance(ids, list):
        raise InvalidRequest("tokens must be a list of token ids")
    for index, token_id in enumerate(ids):
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"tokens[{index}]={token_id!r:.40} is not a token id; use integers from 0 to "
                f"{vocab_size - 1}"
            )
    text = processor.tokenizer.decode(ids, skip_special_tokens=False)
    return JsonResponse({"prompt": text})


def _fields(body: Mapping[str, Any], processor: InputProcessor) -> dict[str, Any]:
    """The body's fields that are not null, the model's name checked and taken out."""
    fields = {name: value for name, value in body.items() if value is not None}
    served = processor.limits.name
    if (model := fields.pop("model", "")) not in ("", served):
        raise UnknownModel(f"model={model!r:.80} is not served here; use {served!r}")
    return fields
