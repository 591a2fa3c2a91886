"""The service for operators and routers: reset of the prefix cache, and its events. Knows messages
and the engine's calls: not what a page is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing

from jserve.engine.kv_events import KvEvent, KvEventBatch, Removed, Stored
from jserve.server.front import Front
from jserve.server.proto import generate_pb2 as pb
from jserve.server.rpc import Context
from jserve.server.wire import refuse_unknown_fields

KV_SERVICE = pb.DESCRIPTOR.services_by_name["CacheService"]
CACHE_SERVICE = KV_SERVICE.full_name
MAX_TOKENS = 32_768  # of one message: far below the 4 MiB that a client takes


class CacheService:
    """jserve.v1.CacheService over the engine behind `front`."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def ResetPrefixCache(
        self, message: pb.ResetPrefixCacheRequest, context: Context
    ) -> pb.ResetPrefixCacheResponse:
        refuse_unknown_fields(message)
        return pb.ResetPrefixCacheResponse(done=await self._front.engine.reset_prefix_cache())

    async def KvEvents(
        self, message: pb.KvEventsRequest, context: Context
    ) -> AsyncIterator[pb.KvEventBatch]:
        refuse_unknown_fields(message)
        async with aclosing(self._front.engine.kv_events()) as batches:
            async for batch in batches:
                for part in batch_to_proto(batch):
                    yield part


def batch_to_proto(batch: KvEventBatch, max_tokens: int = MAX_TOKENS) -> Iterator[pb.KvEventBatch]:
    """Yields the messages of a batch, each with `max_tokens` or little more."""
    message, num_tokens = pb.KvEventBatch(sequence=batch.sequence), 0
    for event in batch.events:
        for part in event_parts(event, max_tokens):
            if num_tokens >= max_tokens:
                yield message
                message, num_tokens = pb.KvEventBatch(sequence=batch.sequence), 0
            message.events.append(_event_to_proto(part))
            num_tokens += len(part.token_ids) if isinstance(part, Stored) else 1
    yield message


def event_parts(event: KvEvent, max_tokens: int) -> Iterator[KvEvent]:
    """Cuts a run of stored pages into several that follow each other."""
    if not isinstance(event, Stored):
        yield event
        return
    parent, digests, token_ids = event
    page_size = len(token_ids) // len(digests)
    step = max(max_tokens // page_size, 1)
    for at in range(0, len(digests), step):
        some = digests[at : at + step]
        yield Stored(parent, some, token_ids[at * page_size : (at + step) * page_size])
        parent = some[-1]


def _event_to_proto(event: KvEvent) -> pb.KvEvent:
    if isinstance(event, Stored):
        return pb.KvEvent(
            stored=pb.PagesStored(
                page_hashes=event.digests,
                parent_hash=event.parent,
                token_ids=event.token_ids,
                page_size=len(event.token_ids) // len(event.digests),
            )
        )
    if isinstance(event, Removed):
        return pb.KvEvent(removed=pb.PagesRemoved(page_hashes=event.digests))
    return pb.KvEvent(cleared=pb.CacheCleared())
