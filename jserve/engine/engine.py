"""The loop: schedule, dispatch, collect, update. One turn per call, in the caller's thread.

Knows requests, plans and text; devices only as a runner that takes batches. No jax.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from jserve.engine.device import Runner, StepHandle, StepOutput, logprobs_of
from jserve.engine.input_processor import InputProcessor, PreparedRequest, reason_name
from jserve.engine.live import LiveRequest
from jserve.engine.metrics import EngineMetrics
from jserve.engine.request_log import RequestLog
from jserve.engine.step_log import StepLog
from jserve.engine.step_recorder import StepInFlight, StepRecorder
from jserve.errors import DeadlineExceeded, EngineDead, InvalidRequest, Overloaded
from jserve.messages import GenerateRequest, RequestUpdate, Usage
from scheduler.packer import PackedBatch, Packer
from scheduler.request import FinishReason, Request
from scheduler.scheduler import Scheduler

# How long an engine that can do nothing is left alone, whatever it expects: short, as clocks jump.
MIN_IDLE_S, MAX_IDLE_S = 0.001, 1.0


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
        clock: Callable[[], float] = time.monotonic,
        step_log: StepLog | None = None,
        request_log: RequestLog | None = None,
    ) -> None:
        self.processor = processor
        self.scheduler = scheduler
        self.metrics = metrics
        self._packer = packer
        self._runner = runner
        self._depth = 1 if overlap else 0  # steps left running when a turn ends
        self._clock = clock
        self._live: dict[str, LiveRequest] = {}
        self._in_flight: deque[StepInFlight] = deque()
        self._did_nothing = False
        self._step_log, self._request_log = step_log, request_log
        self._recorder = StepRecorder(scheduler, metrics, step_log, overlap=overlap)
        if step_log:
            limits = scheduler.config
            step_log.begin(
                {
                    "model": processor.limits.name,
                    "page_size": limits.page_size,
                    "num_pages": limits.num_pages,
                    "buckets": packer.buckets,
                }
            )

    @property
    def tokenizer(self) -> Any:
        return self.processor.tokenizer

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._in_flight)

    def add(self, message: GenerateRequest) -> str:
        """Checks and queues a request; returns its id. Raises InvalidRequest or Overloaded."""
        prepared = self.processor.prepare(message)
        self.check_room(prepared.request, self._live)
        self.add_prepared(prepared)
        return prepared.request.request_id

    def check_room(self, request: Request, live: Any, num_more_tokens: int = 0) -> None:
        """Raises Overloaded when as many requests are live, or prompt tokens wait, as may, and
        InvalidRequest when one of the live ones has this id.

        `num_more_tokens` wait elsewhere. A prompt alone in the queue may be of any length. What was
        preempted is live, so it is never refused.
        """
        if request.request_id in live:
            raise InvalidRequest(
                f"request_id={request.request_id!r} is in use by a live request; choose another"
            )
        full = self.scheduler.waiting.why_full(
            request.num_prompt_tokens, len(live), num_more_tokens
        )
        if full:
            limit, why = full
            self.metrics.on_refusal(limit)
            raise Overloaded(f"{why}; try again later")

    def add_prepared(self, prepared: PreparedRequest) -> None:
        self._live[prepared.request.request_id] = LiveRequest(prepared)
        self.scheduler.add(prepared.request)
        self._did_nothing = False

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends a request wherever it is; unknown and finished ids are ignored. No update comes."""
        live = self._live.get(request_id)
        if live is not None:
            self.scheduler.finish(live.prepared.request, reason)
            self._retire(live, reason, self._clock())
            self._recorder.show_state()
            self._did_nothing = False

    def close(self, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends all requests and lets go of the runner and its device memory."""
        for request_id in list(self._live):
            self.abort(request_id, reason)
        self._in_flight.clear()
        self._runner = _Closed()
        for log in (self._step_log, self._request_log):
            if log:
                log.close()

    def stats(self) -> dict[str, int]:
        """What the engine holds right now."""
        return self._recorder.stats()

    def idle_s(self) -> float:
        """Returns for how long another turn would do nothing, unless requests come or go."""
        if not self._did_nothing:
            return 0.0
        wake_s = self.scheduler.next_wake_s(self._clock())
        return MAX_IDLE_S if wake_s is None else min(max(wake_s, MIN_IDLE_S), MAX_IDLE_S)

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False, and no change, while requests use any of them."""
        done = self.scheduler.cache.reset()
        self._recorder.show_state()
        return done

    # ---- one turn ---------------------------------------------------------------------------

    def step(self) -> list[RequestUpdate]:
        """Dispatches the next step, if there is any, and collects the oldest one that is due."""
        updates = self._expire()
        dispatched = self._dispatch()
        self._did_nothing = not (dispatched or self._in_flight or updates)
        if self._in_flight and (len(self._in_flight) > self._depth or not dispatched):
            updates += self._collect(self._in_flight.popleft())
        return updates

    def _dispatch(self) -> bool:
        begun = time.perf_counter()
        plan = self.scheduler.schedule(self._clock())
        num_preemptions = self._recorder.on_planned(plan)
        if not plan.requests:
            return False
        planned = time.perf_counter()
        batch = self._packer.pack(plan)
        packed = time.perf_counter()
        handle = self._runner.dispatch(batch)
        times = (begun, planned, packed, time.perf_counter())
        self._in_flight.append(StepInFlight(plan, batch, handle, num_preemptions, *times))
        return True

    def _collect(self, step: StepInFlight) -> list[RequestUpdate]:
        asked = time.perf_counter()
        output = step.handle.result()
        arrived = time.perf_counter()
        now = self._clock()
        updates = []
        for request, token_id, row in self.scheduler.update(step.plan, output.token_ids.tolist()):
            live = self._live[request.request_id]
            updates.append(self._on_token(live, token_id, row, output, now))
        is_last = not (self._in_flight or self._live)
        self._recorder.on_collected(step, asked, arrived, last=is_last)
        return updates

    def _on_token(
        self, live: LiveRequest, token_id: int, row: int, output: StepOutput, now: float
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
                request.request_class,
            )
        else:
            self.metrics.on_token_gap(now - live.last_token_time, request.request_class)
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
            logprobs=logprobs_of(request, token_id, row, output),
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
            error = DeadlineExceeded(_how_late(request, now))
            updates.append(
                RequestUpdate(request_id=request.request_id, error=error, **self._ending(live, now))
            )
        if updates:
            self._recorder.show_state()
        return updates

    def _ending(self, live: LiveRequest, now: float) -> dict[str, Any]:
        """The fields of a request's last update; retires it."""
        request = live.prepared.request
        reason = request.finish_reason
        assert reason is not None, f"{request.request_id} has not finished"
        self._retire(live, reason, now)
        return {
            "finish_reason": reason_name(reason),
            "usage": Usage(request.num_prompt_tokens, live.num_tokens, request.num_cached_tokens),
            "timings": live.timings(now),
        }

    def _retire(self, live: LiveRequest, reason: FinishReason, now: float) -> None:
        request, name = live.prepared.request, reason_name(reason)
        del self._live[request.request_id]
        self.metrics.on_finish(name, now - request.arrival_time)
        if live.first_token_time is None and reason == FinishReason.DEADLINE:
            self.metrics.on_no_first_token(request.request_class)
        if self._request_log:
            self._request_log.add(request, live.num_tokens, live.timings(now), name)


class _Closed:
    """The runner of a closed engine."""

    def dispatch(self, batch: PackedBatch) -> StepHandle:
        raise EngineDead("the engine is closed")


def _how_late(request: Request, now: float) -> str:
    """Why a request met its deadline, or the one of its wait."""
    late = f"{now - request.arrival_time:.3f} s"
    if request.first_scheduled_time is None and (request.queue_deadline or math.inf) <= now:
        return f"the request waited {late} in the queue without starting; try again later"
    return f"the deadline passed {late} after the request came"
