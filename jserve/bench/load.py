"""Sends requests in closed or open loop and times what comes back. Knows clocks and tasks: no wire
format, no percentiles."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise

from jserve.bench.backends import Backend
from jserve.errors import JserveError
from jserve.messages import GenerateRequest, Usage


@dataclass(slots=True)
class RequestResult:
    """What one request met, in seconds of one clock that starts at 0 with the load.

    `due_s` is when it should have been sent and `sent_s` when it was: times count from the first,
    so that a late client (or a cap on concurrency) cannot hide a slow server.
    """

    due_s: float
    sent_s: float
    first_token_s: float | None = None
    end_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)  # ITL samples, one per token after the first
    usage: Usage = field(default_factory=lambda: Usage(0, 0, 0))
    queue_s: float | None = None
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.due_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.due_s

    @property
    def mean_itl_s(self) -> float | None:
        return sum(self.gaps_s) / len(self.gaps_s) if self.gaps_s else None


OnResult = Callable[[RequestResult], None]


async def closed_loop(
    backend: Backend, requests: Sequence[GenerateRequest], concurrency: int, on_result: OnResult
) -> None:
    """Keeps `concurrency` requests running: each answer makes room for the next request."""
    started = time.perf_counter()
    waiting = iter(requests)

    async def client() -> None:
        for request in waiting:  # one iterator: the clients share the requests out
            due_s = time.perf_counter() - started
            on_result(await _send(backend, request, due_s, started))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(requests))):
            group.create_task(client())


async def open_loop(
    backend: Backend,
    requests: Sequence[GenerateRequest],
    arrivals_s: Sequence[float],
    max_concurrency: int | None,
    on_result: OnResult,
) -> None:
    """Sends each request at its time whatever became of those before, up to `max_concurrency`."""
    started = time.perf_counter()
    limit = asyncio.Semaphore(max_concurrency or len(requests))

    async def client(request: GenerateRequest, due_s: float) -> None:
        async with limit:
            on_result(await _send(backend, request, due_s, started))

    async with asyncio.TaskGroup() as group:
        for request, due_s in zip(requests, arrivals_s, strict=True):
            delay_s = due_s - (time.perf_counter() - started)
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            group.create_task(client(request, float(due_s)))


async def _send(
    backend: Backend, request: GenerateRequest, due_s: float, started: float
) -> RequestResult:
    result = RequestResult(due_s, time.perf_counter() - started)
    messages: list[tuple[float, int]] = []  # when, and how many tokens
    finished = False
    try:
        async with aclosing(backend.stream(request)) as events:
            async for event in events:
                now = time.perf_counter() - started
                if event.num_tokens:
                    messages.append((now, event.num_tokens))
                result.usage = event.usage or result.usage
                result.queue_s = event.queue_s if event.queue_s is not None else result.queue_s
                finished |= event.finished
        if not finished:
            result.error = "the stream ended without a finish reason"
    except JserveError as error:
        result.error = f"{type(error).__name__}: {error}"
    result.end_s = time.perf_counter() - started
    num_counted = sum(n for _, n in messages)
    if not result.usage.completion_tokens:
        result.usage = Usage(result.usage.prompt_tokens, num_counted, result.usage.cached_tokens)
    if messages:
        result.first_token_s = messages[0][0]
        result.gaps_s = token_gaps(messages, result.usage.completion_tokens / num_counted)
    return result


def token_gaps(messages: Sequence[tuple[float, int]], scale: float = 1.0) -> list[float]:
    """Returns a gap per token after the first message, in seconds.

    A message with k tokens spreads the time since the one before it over them: k gaps of 1/k.
    Tokens of the first message beyond its first came with it: when, cannot be known.
    `scale` corrects k where the server's usage says that messages hold more or fewer tokens.

    >>> token_gaps([(1.0, 1), (1.5, 1), (2.5, 2)])
    [0.5, 0.5, 0.5]
    """
    gaps: list[float] = []
    for (before, _), (now, num_tokens) in pairwise(messages):
        num_gaps = max(1, round(num_tokens * scale))
        gaps += [(now - before) / num_gaps] * num_gaps
    return gaps
