"""An engine without a model: each request gets tokens 0, 1, 2 .. as fast as the test says, its
further choices those from 100, 200 .. on."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from jserve.engine.device import Profiler
from jserve.engine.kv_events import KvEventBatch
from jserve.engine.metrics import EngineMetrics
from jserve.errors import DeadlineExceeded, EngineDead, InvalidRequest, UnknownModel
from jserve.messages import GenerateRequest, RequestUpdate, Timings, TokenLogprobs, Usage
from tests.fake_engine import FakeProcessor

MODEL = "fake"
MAX_MODEL_LEN = 10_000
DEFAULT_MAX_TOKENS = 8


def text_of(token_id: int) -> str:
    return f"t{token_id} "


class FakeStream:
    """One request's updates. `emit` is one step of a running request."""

    def __init__(self, engine: FakeEngine, request: GenerateRequest, request_id: str) -> None:
        self.engine, self.request, self.request_id = engine, request, request_id
        self.num_steps = 0
        self.done = False
        self.live_choices = list(range(request.sampling.n))
        self.arrived = time.monotonic()
        self._updates: asyncio.Queue[RequestUpdate] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[RequestUpdate]:
        while True:
            update = await self._updates.get()
            yield update
            if update.is_last:
                return

    def abort(self) -> None:
        self.engine.abort_calls.append(self.request_id)
        self.end("abort")

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        r = self.request
        return tuple(r.prompt_token_ids or range(len(r.prompt or "x")))

    def emit(self) -> None:
        step, self.num_steps = self.num_steps, self.num_steps + 1
        for index in list(self.live_choices):
            self._emit_choice(index, 100 * index + step)

    def _emit_choice(self, index: int, token: int) -> None:
        sampling = self.request.sampling
        stopped = token in sampling.stop_token_ids
        last = self.num_steps == (sampling.max_tokens or DEFAULT_MAX_TOKENS)
        entry = TokenLogprobs(token, -0.5, ((token, -0.5), (token + 1, -1.5)), 1)
        first = token == 0
        self._put(
            index=index,
            text=text_of(token) + self.engine.padding,
            token_ids=(token,),
            logprobs=() if sampling.logprobs is None else (entry,),
            prompt_token_ids=self.prompt_ids if first else (),
            prompt_logprobs=self._prompt_logprobs() if first else (),
            stop_reason=token if stopped else None,
            finish_reason="stop" if stopped else "length" if last else None,
        )

    def _prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...]:
        if self.request.sampling.prompt_logprobs is None:
            return ()
        return (None, *(TokenLogprobs(i, -0.25, (), 2) for i in self.prompt_ids[1:]))

    def end(self, reason: str, error: Exception | None = None) -> None:
        if not self.done:
            self.live_choices = self.live_choices[:1]
            self._put(index=self.live_choices[0], finish_reason=reason, error=error)

    def _put(self, index: int, finish_reason: str | None, **fields: object) -> None:
        ending = {}
        if finish_reason is not None:
            self.live_choices.remove(index)
            now = time.monotonic() - self.arrived
            ending = {
                "usage": Usage(len(self.prompt_ids), self.num_steps, 0),
                "timings": Timings(queue_s=0.0, ttft_s=now, e2e_s=now, itl_s=None),
                "num_live_choices": len(self.live_choices),
            }
        if not self.live_choices:
            self.done = True
            self.engine.live.remove(self)
        self._updates.put_nowait(
            RequestUpdate(
                request_id=self.request_id,
                index=index,
                finish_reason=finish_reason,
                **fields,
                **ending,
            )
        )


class FakeEngine:
    """Runs the first `max_running` live requests. Tokens come from `step()`, or by themselves:
    all at once with `interval_s` 0, else one per that many seconds."""

    def __init__(self, interval_s: float | None = 0.0, max_running: int = 1000) -> None:
        self.metrics = EngineMetrics()
        self.processor = FakeProcessor(MAX_MODEL_LEN)
        self.is_ready = True
        self.is_dead = False
        self.profiler: Profiler | None = None
        self.interval_s, self.max_running = interval_s, max_running
        self.submit_error: Exception | None = None
        self.requests: list[GenerateRequest] = []
        self.live: list[FakeStream] = []
        self.abort_calls: list[str] = []
        self.num_emitted = 0
        self.num_resets = 0
        self.kv_batches: list[KvEventBatch] = []  # what a reader gets before it waits for ever
        self.num_kv_readers = 0
        self.padding = ""  # added to each token's text
        self._names = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()

    async def submit(self, request: GenerateRequest) -> FakeStream:
        if self.submit_error is not None:
            raise self.submit_error
        if request.model not in ("", MODEL):
            raise UnknownModel(f"model={request.model!r} is not served here; use {MODEL!r}")
        if not (request.prompt or request.prompt_token_ids or request.messages):
            raise InvalidRequest("the prompt is empty; give at least one token")
        self.requests.append(request)
        stream = FakeStream(self, request, request.request_id or f"fake-{next(self._names)}")
        self.live.append(stream)
        if request.timeout_s is not None:
            late = DeadlineExceeded(f"the request took longer than {request.timeout_s:g} s")
            asyncio.get_running_loop().call_later(request.timeout_s, stream.end, "deadline", late)
        if self.interval_s is not None:
            task = asyncio.create_task(self._run(stream))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return stream

    async def _run(self, stream: FakeStream) -> None:
        while not stream.done:
            if stream in self.live[: self.max_running]:
                self._emit(stream)
            if self.interval_s:
                await asyncio.sleep(self.interval_s)

    def step(self) -> None:
        """Emits one token of each running request."""
        for stream in self.live[: self.max_running]:
            self._emit(stream)

    def _emit(self, stream: FakeStream) -> None:
        self.num_emitted += 1
        stream.emit()

    async def reset_prefix_cache(self) -> bool:
        self.num_resets += 1
        return not self.live

    async def activity(self, since: int) -> dict[str, Any]:
        return {"seq": self.num_emitted, "steps": [], "since": since}

    async def kv_events(self) -> AsyncGenerator[KvEventBatch, None]:
        self.num_kv_readers += 1
        try:
            for batch in self.kv_batches:
                yield batch
            await asyncio.Event().wait()
        finally:
            self.num_kv_readers -= 1

    async def drain(self, timeout_s: float) -> None:
        self.is_ready = False
        self.submit_error = EngineDead("the engine is draining")
        give_up = time.monotonic() + timeout_s
        while self.live and time.monotonic() < give_up:
            await asyncio.sleep(0.005)
        for stream in list(self.live):
            stream.end("error", EngineDead("the engine stopped before this request finished"))
