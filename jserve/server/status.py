"""How a call ends that failed: which status, which words. Knows errors and gRPC: no service."""

from __future__ import annotations

import logging
import math
from typing import NoReturn

import grpc

from jserve.errors import Overloaded, let_go, trace_of, wire_code

MAX_DETAIL_CHARS = 1000  # a status travels in trailers, which peers limit to 8 KiB in all

logger = logging.getLogger(__name__)


async def end_with_status(context: grpc.aio.ServicerContext, error: Exception) -> NoReturn:
    """Ends the call with the status that `error` stands for."""
    if isinstance(error, grpc.aio.AbortError):  # a status is set already
        raise error
    code = grpc.StatusCode[wire_code(error).grpc]
    details = str(error)
    if code is grpc.StatusCode.INTERNAL:
        logger.error("a call failed: %s", trace_of(error))
        details = f"internal error ({type(error).__name__}); the server's log has the details"
    if len(details) > MAX_DETAIL_CHARS:
        details = details[:MAX_DETAIL_CHARS] + "..."
    advice = _retry_advice(error) if isinstance(error, Overloaded) else ()
    let_go(error)
    await context.abort(code, details, advice)
    raise AssertionError("abort always raises")


def _retry_advice(error: Overloaded) -> tuple[tuple[str, str], ...]:
    """Trailing metadata: when to try again, for people and for gRPC's own retries.

    Source: gRFC A6, "Pushback".
    """
    wait_ms = str(math.ceil(error.retry_after_s * 1e3))
    return ("retry-after-ms", wait_ms), ("grpc-retry-pushback-ms", wait_ms)
