"""What enters and leaves the prefix cache, as routers of VllmEngine read it. Knows events and
messages: no calls."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

from smg_grpc_proto.generated import common_pb2 as common

from jserve.engine.kv_events import KvEvent, KvEventBatch, Removed, Stored
from jserve.server.cache_service import MAX_TOKENS, event_parts


async def kv_messages(
    batches: AsyncIterator[KvEventBatch], last_number: int
) -> AsyncIterator[common.KvEventBatch]:
    """Yields the batches, each message of bounded size, numbered from `last_number` on: that is the
    last one that the subscriber knows, and it drops what is not above."""
    number, event_id = last_number, 0
    known: set[bytes] = set()
    async for batch in batches:
        message, num_tokens = common.KvEventBatch(), 0
        for event in batch.events:
            for part in event_parts(event, MAX_TOKENS):
                if num_tokens >= MAX_TOKENS:
                    number += 1
                    yield _finished(message, number)
                    message, num_tokens = common.KvEventBatch(), 0
                event_id += 1
                message.events.append(_event(part, event_id, known))
                num_tokens += len(part.token_ids) if isinstance(part, Stored) else 1
        number += 1
        yield _finished(message, number)


def _finished(message: common.KvEventBatch, number: int) -> common.KvEventBatch:
    message.sequence_number, message.timestamp = number, time.time()
    return message


def _event(event: KvEvent, event_id: int, known: set[bytes]) -> common.KvCacheEvent:
    """`known` are the pages that are cached, and is kept so: a first page's parent is none, so
    that it is not named."""
    message = common.KvCacheEvent(event_id=event_id)
    if isinstance(event, Stored):
        page_size = len(event.token_ids) // len(event.digests)
        for index, digest in enumerate(event.digests):
            message.stored.blocks.add(
                block_hash=_hash64(digest),
                token_ids=event.token_ids[index * page_size : (index + 1) * page_size],
                block_size=page_size,
            )
        if event.parent in known:
            message.stored.parent_block_hash = _hash64(event.parent)
        known.update(event.digests)
    elif isinstance(event, Removed):
        message.removed.block_hashes.extend(map(_hash64, event.digests))
        known.difference_update(event.digests)
    else:
        message.cleared.SetInParent()
        known.clear()
    return message


def _hash64(digest: bytes) -> int:
    """The first 64 of a digest's 128 bits, which is what the field holds."""
    return int.from_bytes(digest[:8], "big", signed=True)
