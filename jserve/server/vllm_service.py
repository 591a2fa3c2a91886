"""vllm.grpc.engine.VllmEngine, by which routers use an engine. Knows messages and calls: how each
is written is in vllm_wire.py, what describes the server in vllm_info.py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from contextvars import Context as ContextVars
from contextvars import copy_context
from dataclasses import replace
from typing import NamedTuple

import grpc
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from jserve.errors import InvalidRequest, Unsupported
from jserve.messages import GenerateRequest, RequestUpdate, joined
from jserve.server.front import Answer, Front
from jserve.server.identity import call_of
from jserve.server.rpc import Context, read_message, with_call_deadline
from jserve.server.tokenizer_archive import TokenizerArchive
from jserve.server.vllm_info import LoadMeter, model_info, server_info
from jserve.server.vllm_kv_events import kv_messages
from jserve.server.vllm_wire import (
    chunk_to_vllm,
    complete_to_vllm,
    embed_request_from_vllm,
    embedding_to_vllm,
    request_from_vllm,
)

VLLM_ENGINE = pb.DESCRIPTOR.services_by_name["VllmEngine"]
VLLM_SERVICE = VLLM_ENGINE.full_name
CHUNK_BYTES = 2**16  # of a tokenizer's archive
MAX_FLUSH_S = 60
FLUSH_POLL_S = 0.05
MAX_SEQUENCE = 2**63  # leaves room to count on from it


class _Live(NamedTuple):
    owner: str  # its caller's name
    answer: Answer
    context: ContextVars  # of its call, whose logs are to have its end


class VllmService:
    """VllmEngine over the engine behind `front`. Its calls about the prefix cache are open only
    with `enable_cache_service`, as they show the tokens of every prompt."""

    def __init__(self, front: Front, *, enable_cache_service: bool = False) -> None:
        self._front = front
        self._opens_cache = enable_cache_service
        self._live: dict[str, _Live] = {}  # by request id
        self._began = time.time()
        self._loads = LoadMeter()
        self._archive = TokenizerArchive()

    async def Generate(
        self, message: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        """With `stream`, a chunk per update and then `complete`, for each choice; without, the
        latter alone, in order of index."""
        num_prompt, ended = 0, set[int]()
        parts: dict[int, list[RequestUpdate]] = {}
        request = await read_message(message, request_from_vllm)
        async with aclosing(self._updates(request, "Generate", context)) as updates:
            async for update in updates:
                num_prompt = num_prompt or len(update.prompt_token_ids)
                parts.setdefault(update.index, []).append(update)
                if message.stream and update.token_ids:
                    yield chunk_to_vllm(update, num_prompt)
                if message.stream and update.finish_reason not in (None, "abort"):
                    ended.add(update.index)
                    yield complete_to_vllm(joined(parts.pop(update.index))[0], num_prompt)
        for index in range(request.sampling.n):
            if index not in ended:  # all of them without `stream`, else those that were aborted
                whole = joined(parts.get(index, [RequestUpdate(request_id="", index=index)]))[0]
                whole = replace(whole, finish_reason=whole.finish_reason or "abort")
                yield complete_to_vllm(whole, num_prompt)

    async def Embed(self, message: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        request = await read_message(message, embed_request_from_vllm)
        async with aclosing(self._updates(request, "Embed", context)) as updates:
            async for update in updates:
                if update.embedding is not None:
                    return embedding_to_vllm(update)
        await context.abort(grpc.StatusCode.CANCELLED, "the request was aborted")
        raise AssertionError("abort always raises")

    async def _updates(
        self, request: GenerateRequest, method: str, context: Context
    ) -> AsyncGenerator[RequestUpdate, None]:
        call = call_of(context, self._front.gate, f"{VLLM_SERVICE}/{method}")
        request = with_call_deadline(request, context)
        async with await self._front.submit(request, call) as answer:
            live = _Live(call.caller.name, answer, copy_context())
            self._live[answer.request_id] = live
            try:
                async for update in answer:
                    yield update
            finally:
                if self._live.get(answer.request_id) is live:
                    del self._live[answer.request_id]

    async def Abort(self, message: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """Ends those of the requests that are live, came through this service and are the caller's;
        their streams end with finish reason "abort". Others are passed over."""
        caller = call_of(context, self._front.gate, f"{VLLM_SERVICE}/Abort").caller
        for request_id in message.request_ids:
            live = self._live.get(request_id)
            if live is not None and live.owner == caller.name:
                live.context.run(live.answer.close)
        return pb.AbortResponse()

    async def HealthCheck(
        self, message: pb.HealthCheckRequest, context: Context
    ) -> pb.HealthCheckResponse:
        ready = self._front.is_ready
        return pb.HealthCheckResponse(healthy=ready, message="ready" if ready else "not ready")

    async def GetModelInfo(
        self, message: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        return model_info(self._front.engine.processor)

    async def GetServerInfo(
        self, message: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        return server_info(self._front.engine, self._began)

    async def GetLoads(self, message: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        return self._loads.read(self._front.engine)

    async def GetTokenizer(
        self, message: common.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[common.GetTokenizerChunk]:
        """Sends the tokenizer's files, zipped; the last chunk has the digest of the whole."""
        data, sha256 = await self._archive.of(self._front.engine.processor)
        for at in range(0, len(data), CHUNK_BYTES):
            is_last = at + CHUNK_BYTES >= len(data)
            yield common.GetTokenizerChunk(
                data=data[at : at + CHUNK_BYTES], sha256=sha256 if is_last else ""
            )

    async def SubscribeKvEvents(
        self, message: common.SubscribeKvEventsRequest, context: Context
    ) -> AsyncIterator[common.KvEventBatch]:
        """Begins, whatever number the subscriber knows, with `cleared` and all that is cached."""
        self._check_open("SubscribeKvEvents")
        if message.start_sequence_number > MAX_SEQUENCE:
            raise InvalidRequest(
                f"start_sequence_number={message.start_sequence_number} is above {MAX_SEQUENCE}, "
                "so no number of this server's; use 0"
            )
        async with aclosing(self._front.engine.kv_events()) as batches:
            async for part in kv_messages(batches, message.start_sequence_number):
                yield part

    async def FlushCache(
        self, message: common.FlushCacheRequest, context: Context
    ) -> common.FlushCacheResponse:
        """Forgets all cached prefixes as soon as no request uses any."""
        self._check_open("FlushCache")
        if not 0 <= message.timeout_s <= MAX_FLUSH_S:  # false for NaN too
            raise InvalidRequest(f"timeout_s={message.timeout_s} is not within 0 to {MAX_FLUSH_S}")
        give_up = time.monotonic() + message.timeout_s
        while not (done := await self._front.engine.reset_prefix_cache()):
            if time.monotonic() >= give_up:
                break
            await asyncio.sleep(FLUSH_POLL_S)
        return common.FlushCacheResponse(
            success=done, message="" if done else "requests use cached prefixes; try again later"
        )

    async def StartProfile(
        self, message: common.StartProfileRequest, context: Context
    ) -> common.ProfileResponse:
        raise Unsupported("profiles are started over HTTP: POST /debug/profile")

    async def StopProfile(
        self, message: common.StopProfileRequest, context: Context
    ) -> common.ProfileResponse:
        raise Unsupported("profiles end by themselves; see POST /debug/profile over HTTP")

    def _check_open(self, method: str) -> None:
        if not self._opens_cache:
            raise Unsupported(f"{method} is open only with --enable_cache_service")
