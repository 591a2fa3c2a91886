"""The loop: schedule, dispatch, collect, update. One turn per call, in the caller's thread.

Knows requests, plans and text; devices only as a runner that takes batches. No jax.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Container
from typing import Any

import numpy as np

from jserve.engine.choices import Choices
from jserve.engine.constraint import num_mask_words
from jserve.engine.device import Runner, StepHandle, StepOutput, token_logprobs
from jserve.engine.input_processor import InputProcessor, PreparedRequest, reason_name
from jserve.engine.live import LiveRequest
from jserve.engine.metrics import EngineMetrics
from jserve.engine.request_log import RequestLog
from jserve.engine.step_log import StepLog
from jserve.engine.step_recorder import StepInFlight, StepRecorder
from jserve.errors import (
    DeadlineExceeded,
    EngineDead,
    InvalidRequest,
    JserveError,
    Overloaded,
    RequestFailed,
)
from jserve.messages import GenerateRequest, RequestUpdate, Usage
from scheduler.packer import PackedBatch, Packer, Wants
from scheduler.request import BAD_TOKEN, FinishReason, Request
from scheduler.scheduler import Scheduler

# How long an engine that can do nothing is left alone, whatever it expects: short, as clocks jump.
MIN_IDLE_S, MAX_IDLE_S = 0.001, 1.0
_BAD_LOGITS = "the model's logits are not numbers (NaN or infinity); the request cannot go on"


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
        self._live: dict[str, list[LiveRequest]] = {}  # the choices that have not ended
        self._live_of: dict[Request, LiveRequest] = {}
        self._in_flight: deque[StepInFlight] = deque()
        self._unchosen: StepInFlight | None = None  # the newest one, while its masks are missing
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
        self.check_room(prepared, self._live, len(self._live_of))
        self.add_prepared(prepared)
        return prepared.request.request_id

    def check_room(
        self,
        prepared: PreparedRequest,
        live_ids: Container[str],
        num_live: int,
        num_more_tokens: int = 0,
    ) -> None:
        """Raises Overloaded when as many choices are live, or prompt tokens wait, as may, and
        InvalidRequest when a live request has this id.

        `num_more_tokens` wait elsewhere. A prompt alone in the queue may be of any length. What was
        preempted is live, so it is never refused.
        """
        request = prepared.request
        if request.request_id in live_ids:
            raise InvalidRequest(
                f"request_id={request.request_id!r} is in use by a live request; choose another"
            )
        full = self.scheduler.waiting.why_full(
            request.num_prompt_tokens, num_live + len(prepared.siblings), num_more_tokens
        )
        if full:
            limit, why = full
            self.metrics.on_refusal(limit)
            raise Overloaded(f"{why}; try again later")

    def add_prepared(self, prepared: PreparedRequest) -> None:
        request_id = prepared.request.request_id
        choices = Choices(request_id, prepared.sampling, len(prepared.choices))
        self._live[request_id] = [LiveRequest(choice, choices) for choice in prepared.choices]
        for live in self._live[request_id]:
            self._live_of[live.prepared.request] = live
            self.scheduler.add(live.prepared.request)
        self._did_nothing = False

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends a request wherever it is; unknown and finished ids are ignored. No update comes."""
        for live in list(self._live.get(request_id, ())):
            self.scheduler.finish(live.prepared.request, reason)
            self._retire(live, reason, self._clock())
            self._recorder.show_state()
            self._did_nothing = False

    def close(self, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends all requests and lets go of the runner and its device memory."""
        for request_id in list(self._live):
            self.abort(request_id, reason)
        self._in_flight.clear()
        self._unchosen = None
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
        if len(self._in_flight) == 1:  # nothing is ahead of it whose tokens its masks could need
            updates += self._choose()
        if self._in_flight and (len(self._in_flight) > self._depth or not dispatched):
            updates += self._collect(self._in_flight.popleft())
        return updates + self._choose()

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
        if not batch.wants & Wants.MASK:
            self._runner.choose(handle)
        times = (begun, planned, packed, time.perf_counter())
        step = StepInFlight(plan, batch, handle, num_preemptions, *times)
        self._in_flight.append(step)
        if batch.wants & Wants.MASK:
            self._unchosen = step
        return True

    def _choose(self) -> list[RequestUpdate]:
        """Lets the newest step choose its tokens, if it does not yet, now that all tokens before
        are known: which tokens may come depends on them."""
        step, self._unchosen = self._unchosen, None
        if step is None:
            return []
        updates: list[RequestUpdate] = []
        num_words = num_mask_words(self.processor.limits.vocab_size)
        masks = np.full((step.batch.bucket.num_rows, num_words), 0xFFFFFFFF, np.uint32)
        for row, (request, samples) in enumerate(step.plan.sampling()):
            live = self._live_of.get(request)
            if live is None or live.prepared.constraint is None or not samples:
                continue
            position = int(step.plan.starts[row] + step.plan.counts[row])
            problem = live.prepared.constraint.fill(
                masks[row], request.output_token_ids, position - request.num_prompt_tokens
            )
            if problem:
                masks[row] = 0xFFFFFFFF
                updates += self._fail(live, RequestFailed(problem), self._clock())
        self._runner.choose(step.handle, masks)
        return updates

    def _collect(self, step: StepInFlight) -> list[RequestUpdate]:
        asked = time.perf_counter()
        output = step.handle.result()
        arrived = time.perf_counter()
        now = self._clock()
        for piece, found in zip(step.batch.prompt_pieces, output.prompt_logprobs, strict=True):
            live = self._live_of.get(step.plan.requests[piece.row])
            if live is not None:
                live.add_prompt_logprobs(int(step.plan.starts[piece.row]), piece, found)
        updates = []
        for request, token_id, row in self.scheduler.update(step.plan, output.token_ids.tolist()):
            live = self._live_of.get(request)
            if live is None:  # another choice of its request has failed just now
                continue
            if token_id == BAD_TOKEN:
                updates += self._fail(live, RequestFailed(_BAD_LOGITS), now)
            else:
                updates += live.choices.take(self._on_token(live, token_id, row, output, now))
        is_last = not (self._in_flight or self._live)
        self._recorder.on_collected(step, asked, arrived, last=is_last)
        return updates

    def _on_token(
        self, live: LiveRequest, token_id: int, row: int, output: StepOutput, now: float
    ) -> RequestUpdate:
        """Takes in one token of one choice: text, stop strings, grammar, times, and its end."""
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
        elif self._has_completed(live, token_id):
            text += detokenizer.finish()
            self.scheduler.finish(request, FinishReason.STOP)
        ending = self._ending(live, now) if request.is_finished else {}
        num_top, found = request.sampling.num_logprobs, output.logprobs
        with_prompt = is_first and request.sampling.num_prompt_logprobs >= 0
        return RequestUpdate(
            request_id=live.choices.request_id,
            index=live.prepared.index,
            text=text,
            token_ids=(token_id,),
            logprobs=()
            if num_top < 0 or found is None
            else (token_logprobs(token_id, row, found, num_top),),
            prompt_token_ids=tuple(request.prompt_token_ids) if is_first else (),
            prompt_logprobs=tuple(live.prompt_logprobs) if with_prompt else (),
            stop_reason=stop_reason,
            **ending,
        )

    def _has_completed(self, live: LiveRequest, token_id: int) -> bool:
        """Advances a choice's grammar; True where nothing but an end can follow, which then is not
        waited for."""
        constraint = live.prepared.constraint
        if constraint is None or constraint.matcher is None or live.prepared.request.is_finished:
            return False
        constraint.matcher.accept(token_id)
        return constraint.matcher.is_finished

    def _fail(
        self,
        live: LiveRequest,
        error: JserveError,
        now: float,
        reason: FinishReason = FinishReason.ERROR,
    ) -> list[RequestUpdate]:
        """Ends a request, with all of its choices, because one of them cannot go on."""
        choices = live.choices
        for choice in list(self._live[choices.request_id]):
            self.scheduler.finish(choice.prepared.request, reason)
            if choice is not live:
                self._retire(choice, reason, now)
                choices.num_live -= 1
        live.prepared.request.finish_reason = reason
        update = RequestUpdate(
            request_id=choices.request_id,
            index=live.prepared.index,
            error=error,
            **self._ending(live, now),
        )
        return choices.take(update)

    def _expire(self) -> list[RequestUpdate]:
        """Ends what is past its deadline, running or queued."""
        now = self._clock()
        updates = []
        for request in self.scheduler.expire(now):
            live = self._live_of.get(request)
            if live is not None:  # else it went with another choice of its request
                error = DeadlineExceeded(_how_late(request, now))
                updates += self._fail(live, error, now, FinishReason.DEADLINE)
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
        del self._live_of[request]
        choices = self._live[live.choices.request_id]
        choices.remove(live)
        if not choices:
            del self._live[live.choices.request_id]
        self.metrics.on_finish(name, now - request.arrival_time)
        if live.first_token_time is None and reason == FinishReason.DEADLINE:
            self.metrics.on_no_first_token(request.request_class)
        if self._request_log:
            self._request_log.add(request, live.num_tokens, live.timings(now), name)


class _Closed:
    """The runner of a closed engine."""

    def dispatch(self, batch: PackedBatch) -> StepHandle:
        raise EngineDead("the engine is closed")

    def choose(self, handle: StepHandle, allowed: np.ndarray | None = None) -> None:
        raise EngineDead("the engine is closed")


def _how_late(request: Request, now: float) -> str:
    """Why a request met its deadline, or the one of its wait."""
    late = f"{now - request.arrival_time:.3f} s"
    if request.first_scheduled_time is None and (request.queue_deadline or math.inf) <= now:
        return f"the request waited {late} in the queue without starting; try again later"
    return f"the deadline passed {late} after the request came"
