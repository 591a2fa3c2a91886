"""Loads an engine in this very process, in its caller's thread: no server, no transport, so what is
timed is the engine. Knows clocks and requests: no percentiles."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Sequence

from jserve.bench.load import RequestResult
from jserve.engine.engine import Engine
from jserve.messages import GenerateRequest, RequestUpdate

IDLE_S = 0.0005  # between two looks at the clock while nothing runs


def load_engine(
    engine: Engine,
    requests: Sequence[GenerateRequest],
    due_s: Sequence[float],
    closed_loop: int = 0,
) -> list[RequestResult]:
    """Sends each request when it is due, in seconds from now, and runs the engine to the end of
    all; returns what each met, in their order.

    With `closed_loop`, so many are kept in the engine, each next one due when one ends.
    """
    started = time.perf_counter()
    coming = deque(zip(requests, due_s, strict=True))
    results: dict[str, RequestResult] = {}
    last_token_s: dict[str, float] = {}
    num_live = 0
    while coming or num_live:
        now = time.perf_counter() - started
        while coming and (num_live < closed_loop if closed_loop else coming[0][1] <= now):
            request, due = coming.popleft()
            name = f"load-{len(results)}"
            engine.add(dataclasses.replace(request, request_id=name))
            results[name] = RequestResult(due_s=now if closed_loop else due, sent_s=now)
            num_live += 1
        if not engine.has_work:
            time.sleep(IDLE_S)
            continue
        for update in engine.step():
            num_live -= _take(update, results, last_token_s, time.perf_counter() - started)
    return list(results.values())


def _take(
    update: RequestUpdate, results: dict[str, RequestResult], last: dict[str, float], now: float
) -> bool:
    """Enters an update; returns whether it is its request's last one."""
    name = update.request_id
    result = results[name]
    if update.token_ids:
        if result.first_token_s is None:
            result.first_token_s = now
        else:
            result.gaps_s.append(now - last[name])
        last[name] = now
    if update.finish_reason is None:
        return False
    result.end_s = now
    if update.usage:
        result.usage = update.usage
    if update.timings:
        result.queue_s = update.timings.queue_s
    if update.finish_reason not in ("stop", "length"):
        result.error = str(update.error or update.finish_reason)
    return True
