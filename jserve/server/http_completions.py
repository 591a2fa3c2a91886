"""/v1/completions and /v1/chat/completions: bodies in, engine requests out, answers whole or
streamed back. Knows the flow: bodies' and answers' fields are openai_*'s.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from jserve.errors import RequestFailed
from jserve.messages import GenerateRequest, RequestUpdate, Usage
from jserve.offline import RequestOutput, output_of
from jserve.openai_format import Endpoint
from jserve.openai_http import HttpBody, read_http_body
from jserve.openai_response import body_head, response_body, response_of_prompts
from jserve.openai_stream import DONE, ChunkWriter, event, usage_event
from jserve.server.front import Answer, Call, Front
from jserve.server.http_errors import ClientGone, JsonResponse, error_body, long_json
from jserve.server.http_request import (
    as_headers_say,
    call_of_http,
    front_of,
    read_json,
    unless_gone,
)
from jserve.server.quota import one_request

_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]

INLINE_CHOICES = 16  # an answer of more is written in a thread, so that streams keep flowing

Take = Callable[[int, RequestUpdate], Awaitable[None]]  # of the request with this index


def routes(front: Front) -> list[Route]:
    return [
        Route(endpoint, partial(_answer, endpoint=endpoint), methods=["POST"])
        for endpoint in Endpoint
    ]


async def _answer(request: Request, endpoint: Endpoint) -> _Generation:
    call = call_of_http(request)
    body = await read_json(request, partial(read_http_body, endpoint))
    request_id, requests, headers = as_headers_say(request, body.requests)
    return _Generation(request, call, body, requests, request_id, headers)


class _Generation:
    """Answers by generating. All that is generated ends with the call, whatever ends that."""

    def __init__(
        self,
        request: Request,
        call: Call,
        body: HttpBody,
        requests: Sequence[GenerateRequest],
        request_id: str,
        headers: dict[str, str],
    ) -> None:
        self._request, self._call, self._body = request, call, body
        self._requests, self._request_id = requests, request_id
        self._headers = headers
        self._front = front_of(request)
        self._created = int(time.time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await unless_gone(self._request, self._generate(send))
        except ClientGone:
            if self._body.is_stream:  # which may have begun: there is nobody to tell anyway
                return
            raise
        if response is not None:
            await response(scope, receive, send)

    async def _generate(self, send: Send) -> Response | None:
        processor = self._front.engine.processor
        self._model, self._tokenizer = processor.limits.name, processor.tokenizer
        self._new_parser = processor.chat.parser
        async with AsyncExitStack() as stack:
            caller = stack.enter_context(one_request(self._call.caller))
            call, answers = replace(self._call, caller=caller), []
            for asked in self._requests:
                answer = await self._front.submit(asked, call)
                answers.append(await stack.enter_async_context(answer))
                if len(self._requests) > 1:
                    await asyncio.sleep(0)  # to prepare many prompts must not hold up streams
            if self._body.is_stream:
                await self._stream(answers, send)
                return None
            return await self._whole(answers)

    async def _whole(self, answers: Sequence[Answer]) -> Response:
        updates: list[list[RequestUpdate]] = [[] for _ in answers]

        async def take(index: int, update: RequestUpdate) -> None:
            updates[index].append(update)

        await _read_all(answers, take)
        outputs = [output_of(*pair) for pair in zip(self._requests, updates, strict=True)]
        sampling = self._body.call.request.sampling
        has_logprobs = sampling.logprobs is not None or sampling.prompt_logprobs is not None
        if len(outputs) * sampling.n <= INLINE_CHOICES and not has_logprobs:
            return JsonResponse(self._answer(outputs), headers=self._headers)
        return long_json(await asyncio.to_thread(self._answer, outputs), self._headers)

    def _answer(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        about: dict[str, Any] = {
            "model": self._model,
            "created": self._created,
            "tokenizer": self._tokenizer,
        }
        call = self._body.call
        if len(outputs) > 1:
            return response_of_prompts(call, outputs, request_id=self._request_id, **about)
        return response_body(call, outputs[0], new_parser=self._new_parser, **about)

    async def _stream(self, answers: Sequence[Answer], send: Send) -> None:
        """Sends events as updates come. Until the first, an error still has a status of its own;
        later it is an event, after which the stream ends."""
        body = self._body
        head = body_head(body.call, self._request_id, self._model, self._created, is_chunk=True)
        n = body.call.request.sampling.n
        writers = [
            ChunkWriter(
                body,
                asked,
                head=head,
                first_index=index * n,
                tokenizer=self._tokenizer,
                new_parser=self._new_parser,
            )
            for index, asked in enumerate(self._requests)
        ]
        is_started = False

        async def emit(text: str, *, more: bool = True) -> None:
            nonlocal is_started
            if not is_started:
                is_started = True
                headers = [(k.encode(), v.encode("latin-1")) for k, v in self._headers.items()]
                headers += _EVENT_STREAM
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": text.encode(), "more_body": more})

        async def take(index: int, update: RequestUpdate) -> None:
            writer = writers[index]
            is_long = writer.takes_long(update)
            text = await asyncio.to_thread(writer.take, update) if is_long else writer.take(update)
            if text:
                await emit(text)

        try:
            await _read_all(answers, take)
        except Exception as error:
            if not is_started:
                raise
            await emit(event(error_body(error)), more=False)
            return
        end = DONE
        if body.include_usage:
            end = usage_event(body, head, Usage.total(w.usage for w in writers)) + end
        await emit(end, more=False)


async def _read_all(answers: Sequence[Answer], take: Take) -> None:
    """Gives all updates of all answers to `take`, as they come. Raises the first error."""
    if len(answers) == 1:
        await _read(0, answers[0], take)
        return
    try:
        async with asyncio.TaskGroup() as group:
            for index, answer in enumerate(answers):
                group.create_task(_read(index, answer, take))
    except* Exception as errors:
        raise errors.exceptions[0] from None


async def _read(index: int, answer: Answer, take: Take) -> None:
    async for update in answer:
        if update.finish_reason == "abort":
            raise RequestFailed("the request was aborted")
        await take(index, update)
