"""The loop: schedule, dispatch, collect, update. One turn per call, in the caller's thread.

Knows requests, plans and text; devices only as a runner that takes batches. No jax.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from jserve.engine.input_processor import InputProcessor, PreparedRequest, reason_name
from jserve.engine.metrics import EngineMetrics
from jserve.errors import DeadlineExceeded, EngineDead, InvalidRequest, Overloaded
from jserve.messages import GenerateRequest, RequestUpdate, Timings, TokenLogprobs, Usage
from scheduler.packer import PackedBatch, Packer
from scheduler.request import FinishReason, Request
from scheduler.scheduler import Scheduler, StepPlan


class StepOutput(Protocol):
    """One step's tokens i32[S], and log-probabilities where the batch asked for them."""

    @property
    def token_ids(self) -> np.ndarray: ...

    @property
    def logprobs(self) -> np.ndarray | None: ...  # f32[S]

    @property
    def top_ids(self) -> np.ndarray | None: ...  # i32[S, A]

    @property
    def top_logprobs(self) -> np.ndarray | None: ...  # f32[S, A]


class StepHandle(Protocol):
    def result(self) -> StepOutput: ...  # waits for the device


class Runner(Protocol):
    def dispatch(self, batch: PackedBatch) -> StepHandle: ...  # never waits


@dataclass(slots=True)
class _Live:
    """What the engine keeps of a request besides the scheduler's state."""

    prepared: PreparedRequest
    first_token_time: float | None = None
    last_token_time: float = 0.0
    num_tokens: int = 0


class _InFlight(NamedTuple):
    plan: StepPlan
    handle: StepHandle
    batch: PackedBatch
    schedule_s: float
    pack_s: float
    dispatch_s: float


class Engine:
    """Continuous batching over one runner.

    With `overlap`, a step is scheduled and dispatched while the one before it runs.
    """

    def __init__(
        self,
        *,
        processor: InputProcessor,
        scheduler: Scheduler,
        packer: Packer,
        runner: Runner,
        metrics: EngineMetrics,
        overlap: bool,
        max_queued_requests: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.processor = processor
        self.scheduler = scheduler
        self.metrics = metrics
        self._packer = packer
        self._runner = runner
        self._depth = 1 if overlap else 0  # steps left running when a turn ends
        self._max_live = max_queued_requests + scheduler.config.max_num_seqs
        self._clock = clock
        self._live: dict[str, _Live] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._last_collected: float | None = None
        self._show_state()

    @property
    def tokenizer(self) -> Any:
        return self.processor.tokenizer

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._in_flight)

    def add(self, message: GenerateRequest) -> str:
        """Checks and queues a request; returns its id. Raises InvalidRequest or Overloaded."""
        prepared = self.processor.prepare(message)
        self.check_room(prepared.request.request_id, self._live)
        self.add_prepared(prepared)
        return prepared.request.request_id

    def check_room(self, request_id: str, live: Any) -> None:
        """Raises Overloaded when as many requests are live as may be, InvalidRequest when one of
        them has this id."""
        if request_id in live:
            raise InvalidRequest(f"{request_id=} is in use by a live request; choose another")
        if len(live) >= self._max_live:
            raise Overloaded(
                f"{len(live)} requests are running or queued, the limit; try again later"
            )

    def add_prepared(self, prepared: PreparedRequest) -> None:
        self._live[prepared.request.request_id] = _Live(prepared)
        self.scheduler.add(prepared.request)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends a request wherever it is; unknown and finished ids are ignored. No update comes."""
        live = self._live.get(request_id)
        if live is not None:
            self.scheduler.finish(live.prepared.request, reason)
            self._retire(live, reason, self._clock())
            self._show_state()

    def close(self, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends all requests and lets go of the runner and its device memory."""
        for request_id in list(self._live):
            self.abort(request_id, reason)
        self._in_flight.clear()
        self._runner = _Closed()

    def stats(self) -> dict[str, int]:
        """What the engine holds right now."""
        cache, pool = self.scheduler.cache, self.scheduler.pool
        return {
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "pages_used": pool.num_usable - pool.num_free - cache.num_evictable,
            "pages_cached": cache.num_evictable,
            "pages_free": pool.num_free,
            "live_tokens": self.scheduler.num_live_tokens,
        }

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False, and no change, while requests use any of them."""
        done = self.scheduler.cache.reset()
        self._show_state()
        return done

    # ---- one turn ---------------------------------------------------------------------------

    def step(self) -> list[RequestUpdate]:
        """Dispatches the next step, if there is any, and collects the oldest one that is due."""
        updates = self._expire()
        dispatched = self._dispatch()
        if self._in_flight and (len(self._in_flight) > self._depth or not dispatched):
            updates += self._collect(self._in_flight.popleft())
        return updates

    def _dispatch(self) -> bool:
        begin = time.perf_counter()
        preemptions = self.scheduler.num_preemptions
        plan = self.scheduler.schedule(self._clock())
        if self.scheduler.num_preemptions > preemptions:
            self.metrics.on_preemption(self.scheduler.num_preemptions - preemptions)
        if not plan.requests:
            return False
        scheduled = time.perf_counter()
        batch = self._packer.pack(plan)
        packed = time.perf_counter()
        handle = self._runner.dispatch(batch)
        dispatched = time.perf_counter()
        self._in_flight.append(
            _InFlight(
                plan, handle, batch, scheduled - begin, packed - scheduled, dispatched - packed
            )
        )
        return True

    def _collect(self, flight: _InFlight) -> list[RequestUpdate]:
        begin = time.perf_counter()
        output = flight.handle.result()
        arrived = time.perf_counter()
        now = self._clock()
        updates = []
        for request, token_id, row in self.scheduler.update(flight.plan, output.token_ids.tolist()):
            live = self._live[request.request_id]
            updates.append(self._on_token(live, token_id, row, output, now))
        self._show_state()
        end = time.perf_counter()
        last = self._last_collected
        self._last_collected = end if self._in_flight or self._live else None
        self.metrics.on_step(
            schedule_s=flight.schedule_s,
            pack_s=flight.pack_s,
            dispatch_s=flight.dispatch_s,
            wait_s=arrived - begin,
            post_s=end - arrived,
            step_s=end - (last if last is not None else begin),
            real_tokens=flight.batch.num_tokens,
            padded_tokens=flight.batch.bucket.num_tokens - flight.batch.num_tokens,
        )
        return updates

    def _on_token(
        self, live: _Live, token_id: int, row: int, output: StepOutput, now: float
    ) -> RequestUpdate:
        """Takes in one token of one request: text, stop strings, times, and its end."""
        request, detokenizer = live.prepared.request, live.prepared.detokenizer
        is_first = live.first_token_time is None
        if is_first:
            live.first_token_time = now
            started = request.first_scheduled_time
            assert started is not None, f"{request.request_id} has a token but never ran"
            self.metrics.on_first_token(
                started - request.arrival_time,
                now - request.arrival_time,
                request.num_prompt_tokens,
                request.num_cached_tokens,
            )
        else:
            self.metrics.on_token_gap(now - live.last_token_time)
        live.last_token_time = now
        live.num_tokens += 1
        stopped_by_id = request.is_finished and request.finish_reason == FinishReason.STOP
        text = ""
        if not stopped_by_id or live.prepared.sampling.include_stop_str:
            text = detokenizer.add((token_id,))
        if request.is_finished:
            text += detokenizer.finish()
        stop_reason: str | int | None = detokenizer.stop_hit
        if detokenizer.stop_hit is not None:
            self.scheduler.finish(request, FinishReason.STOP)
            request.finish_reason = FinishReason.STOP
        elif stopped_by_id:
            stop_reason = token_id
        ending = self._ending(live, now) if request.is_finished else {}
        return RequestUpdate(
            request_id=request.request_id,
            text=text,
            token_ids=(token_id,),
            logprobs=_logprobs(request, token_id, row, output),
            prompt_token_ids=tuple(request.prompt_token_ids) if is_first else (),
            stop_reason=stop_reason,
            **ending,
        )

    def _expire(self) -> list[RequestUpdate]:
        """Ends what is past its deadline, running or queued."""
        now = self._clock()
        updates = []
        for request in self.scheduler.expire(now):
            live = self._live[request.request_id]
            late = now - request.arrival_time
            error = DeadlineExceeded(f"the deadline passed {late:.3f} s after the request came")
            updates.append(
                RequestUpdate(request_id=request.request_id, error=error, **self._ending(live, now))
            )
        if updates:
            self._show_state()
        return updates

    def _ending(self, live: _Live, now: float) -> dict[str, Any]:
        """The fields of a request's last update; retires it."""
        request = live.prepared.request
        reason = request.finish_reason
        assert reason is not None, f"{request.request_id} has not finished"
        self._retire(live, reason, now)
        return {
            "finish_reason": reason_name(reason),
            "usage": Usage(request.num_prompt_tokens, live.num_tokens, request.num_cached_tokens),
            "timings": _timings(live, now),
        }

    def _retire(self, live: _Live, reason: FinishReason, now: float) -> None:
        request = live.prepared.request
        del self._live[request.request_id]
        self.metrics.on_finish(reason_name(reason), now - request.arrival_time)

    def _show_state(self) -> None:
        self.metrics.set_gauges(**self.stats(), overlap_active=self._depth > 0)


class _Closed:
    """The runner of a closed engine."""

    def dispatch(self, batch: PackedBatch) -> StepHandle:
        raise EngineDead("the engine is closed")


def _timings(live: _Live, now: float) -> Timings:
    request, first = live.prepared.request, live.first_token_time
    started = request.first_scheduled_time
    return Timings(
        queue_s=(now if started is None else started) - request.arrival_time,
        ttft_s=None if first is None else first - request.arrival_time,
        e2e_s=now - request.arrival_time,
        itl_s=None
        if first is None or live.num_tokens < 2
        else (live.last_token_time - first) / (live.num_tokens - 1),
    )


def _logprobs(
    request: Request, token_id: int, row: int, output: StepOutput
) -> tuple[TokenLogprobs, ...]:
    count = request.sampling.num_logprobs
    if count < 0 or output.logprobs is None:
        return ()
    assert output.top_ids is not None, "log-probabilities come together"
    assert output.top_logprobs is not None, "log-probabilities come together"
    ids, values = output.top_ids[row, :count].tolist(), output.top_logprobs[row, :count].tolist()
    top = tuple(zip(ids, values, strict=True))
    return (TokenLogprobs(token_id, float(output.logprobs[row]), top),)
