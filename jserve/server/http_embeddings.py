"""/v1/embeddings: a request to the engine for each input, their vectors back in one answer. Knows
the flow: bodies' and answers' fields are openai_embeddings'.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import AsyncExitStack
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jserve.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    RequestFailed,
)
from jserve.messages import GenerateRequest, RequestUpdate
from jserve.openai_embeddings import EmbeddingsCall, embeddings_body, read_embeddings_body
from jserve.server.front import Answer, Call, Front
from jserve.server.http_errors import long_json
from jserve.server.http_request import (
    as_headers_say,
    call_of_http,
    front_of,
    read_json,
    unless_gone,
)
from jserve.server.quota import one_request

MAX_IN_FLIGHT = 256  # inputs of one call in the engine at once: the queue is for other calls too


def routes(front: Front) -> list[Route]:
    return [Route("/v1/embeddings", embeddings, methods=["POST"])]


async def embeddings(request: Request) -> Response:
    call = call_of_http(request)
    asked = await read_json(request, read_embeddings_body)
    front = front_of(request)
    limits = front.engine.processor.limits
    if asked.dimensions not in (None, limits.hidden_size):
        raise InvalidRequest(
            f"dimensions={asked.dimensions!r:.80} is not supported: this model's embeddings have "
            f"{limits.hidden_size}; leave it out"
        )
    _, requests, headers = as_headers_say(request, asked.requests)
    updates = await unless_gone(request, _Inputs(front, call, requests).embedded())
    return await asyncio.to_thread(_response, asked, updates, limits.name, headers)


def _response(
    asked: EmbeddingsCall, updates: list[RequestUpdate], model: str, headers: dict[str, str]
) -> Response:
    vectors = [u.embedding for u in updates if u.embedding is not None]
    usages = [u.usage for u in updates if u.usage is not None]
    return long_json(embeddings_body(asked, vectors, usages, model=model), headers)


class _Inputs:
    """The inputs of one call, on their way through the engine. All of them end with the call."""

    def __init__(self, front: Front, call: Call, requests: list[GenerateRequest]) -> None:
        self._front, self._call, self._requests = front, call, requests
        self._began = time.monotonic()

    async def embedded(self) -> list[RequestUpdate]:
        """Returns the last update of each, in order. Raises the first error."""
        updates: list[RequestUpdate] = []
        open_answers: deque[Answer] = deque()
        async with AsyncExitStack() as stack:
            caller = stack.enter_context(one_request(self._call.caller))
            self._call = replace(self._call, caller=caller)
            for index in range(len(self._requests)):
                if len(open_answers) == MAX_IN_FLIGHT:
                    updates.append(await _last_of(open_answers.popleft()))
                while True:
                    try:
                        answer = await self._submit(index, tries_again=bool(open_answers))
                        break
                    except Overloaded:
                        if not open_answers:
                            raise
                    updates.append(await _last_of(open_answers.popleft()))  # which makes room
                open_answers.append(await stack.enter_async_context(answer))
                await asyncio.sleep(0)  # to prepare many inputs must not hold up streams
            updates += [await _last_of(answer) for answer in open_answers]
        return updates

    async def _submit(self, index: int, *, tries_again: bool) -> Answer:
        request = self._requests[index]
        if request.timeout_s is not None:  # it began with the call
            left_s = request.timeout_s - (time.monotonic() - self._began)
            if left_s <= 0:
                raise DeadlineExceeded("the deadline passed before all inputs had been computed")
            request = replace(request, timeout_s=left_s)
        try:
            return await self._front.submit(request, self._call, tries_again=tries_again)
        except InvalidRequest as error:
            if not str(error).startswith(("prompt", "the prompt")):
                raise
            name = "input" if len(self._requests) == 1 else f"input[{index}]"
            raise InvalidRequest(f"{name} is refused: {error}") from error


async def _last_of(answer: Answer) -> RequestUpdate:
    """Returns the one update of an embedding, and lets go of its request."""
    last = None
    async with answer:
        async for update in answer:
            last = update
    if last is None or last.embedding is None:
        raise RequestFailed("the request was aborted")
    return last
