"""The loop: schedule, dispatch, collect, update. One turn per call, in the caller's thread.

Knows requests, plans and text; devices only as a runner that takes batches. No jax.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Container
from typing import Any

import numpy as np

from jserve.engine.constraint import ALL, CONTRADICTION, num_mask_words
from jserve.engine.device import Runner, StepFailed, StepHandle, ask
from jserve.engine.input_processor import InputProcessor, PreparedRequest
from jserve.engine.metrics import EngineMetrics
from jserve.engine.output_processor import OutputProcessor
from jserve.engine.request_log import RequestLog
from jserve.engine.retry_advice import RetryAdvice
from jserve.engine.step_log import StepLog
from jserve.engine.step_recorder import StepInFlight, StepRecorder
from jserve.errors import (
    DeadlineExceeded,
    EngineDead,
    InvalidRequest,
    Overloaded,
    RequestFailed,
)
from jserve.messages import GenerateRequest, RequestUpdate
from scheduler.packer import PackedBatch, Packer, Wants
from scheduler.plan import StepPlan
from scheduler.request import BAD_TOKEN, FinishReason, Request, SamplingView
from scheduler.scheduler import Scheduler
from scheduler.suspects import Suspects

log = logging.getLogger(__name__)

# How long an engine that can do nothing is left alone, whatever it expects: short, as clocks jump.
MIN_IDLE_S, MAX_IDLE_S = 0.001, 1.0
MOST_CULPRITS = 3  # in a row, with no step between them that went well: is it their fault?
_BAD_LOGITS = "the model's logits are not numbers (NaN or infinity); the request cannot go on"
_CULPRIT = "the device failed twice while it computed this request; the server's log has the cause"


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
        jump_forward: str = "auto",
    ) -> None:
        self.processor = processor
        self.scheduler = scheduler
        self.metrics = metrics
        self._packer = packer
        self._runner = runner
        self._depth = 1 if overlap else 0  # steps left running when a turn ends
        self._clock = clock
        self._retry_advice = RetryAdvice()
        self._output = OutputProcessor(
            *(scheduler, metrics, clock, request_log, self._retry_advice), jump_forward=jump_forward
        )
        self._in_flight: deque[StepInFlight] = deque()
        self._unchosen: StepInFlight | None = None  # the newest one, while its masks are missing
        self._did_nothing = False
        self._suspects = Suspects(scheduler.waiting)
        self._newest_plan: StepPlan | None = None  # for whoever asks what a stuck step computes
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
        return bool(self._output.live or self._in_flight)

    def add(self, message: GenerateRequest) -> str:
        """Checks and queues a request; returns its id. Raises InvalidRequest or Overloaded."""
        prepared = self.processor.prepare(message)
        self.check_room(prepared, self._output.live, len(self._output.live_of))
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
        limits, num_choices = self.scheduler.config, len(prepared.choices)
        most = limits.max_queued_requests + limits.max_num_seqs
        if num_choices > most:
            raise InvalidRequest(f"n={num_choices} is more than the {most} choices held at once")
        full = self.scheduler.waiting.why_full(
            prepared.num_queued_tokens, num_live + num_choices - 1, num_more_tokens
        )
        if full:
            limit, why = full
            self.metrics.on_refusal(limit)
            raise Overloaded(f"{why}; try again later", self._retry_advice.after_s(self._clock()))

    def add_prepared(self, prepared: PreparedRequest) -> None:
        self._output.add(prepared)
        for choice in prepared.choices:
            self.scheduler.add(choice.request)
        self._did_nothing = False

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends a request wherever it is; unknown and finished ids are ignored. No update comes."""
        if request_id in self._output.live:
            self._output.abort(request_id, reason)
            self._recorder.show_state()
            self._did_nothing = False

    def close(self, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends all requests and lets go of the runner and its device memory."""
        for request_id in list(self._output.live):
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

    def activity(self, since: int) -> dict[str, Any]:
        """What it does now, and its steps after number `since`, fit for JSON."""
        return self._recorder.activity.snapshot(since, self._clock())

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

    def describe_step(self) -> str:
        """Says what the step that was planned last computes. Any thread may ask."""
        plan = self._newest_plan
        return "none has begun" if plan is None else str(plan.shape)

    # ---- one turn ---------------------------------------------------------------------------

    def step(self) -> list[RequestUpdate]:
        """Dispatches the next step, if there is any, and collects the oldest one that is due.

        Where the device fails, what ran starts again and the one request that makes it fail ends.
        Raises EngineDead when it fails with whatever it is given, or what its reset raises.
        """
        updates = self._expire()
        try:
            self._turn(updates)
        except StepFailed as error:
            self._recover(error, updates)
        return updates

    def _turn(self, updates: list[RequestUpdate]) -> None:
        if self._suspects.is_alert:
            self._suspects.go_on()
        dispatched = self._dispatch()
        self._did_nothing = not (dispatched or self._in_flight or updates)
        if len(self._in_flight) == 1:  # nothing is ahead of it whose tokens its masks could need
            self._choose(updates)
        if self._in_flight and (len(self._in_flight) > self._depth or not dispatched):
            self._collect(self._in_flight.popleft(), updates)
        self._choose(updates)

    def _recover(self, error: StepFailed, updates: list[RequestUpdate]) -> None:
        log.error("a step failed; all that ran starts again", exc_info=error)
        self.metrics.on_step_failure()
        self._in_flight.clear()
        self._unchosen, self._did_nothing = None, False
        culprit = self._suspects.on_failure(self.scheduler.restart())
        if culprit is not None:
            log.error("the device fails on request %r, which is ended", culprit.request_id)
            updates += self._output.fail(self._output.live_of[culprit], RequestFailed(_CULPRIT))
        self._runner.reset()
        if self._suspects.num_culprits >= MOST_CULPRITS:
            try:
                self._try_device()
            except StepFailed:
                raise EngineDead(f"the device fails with every request: {error}") from error
        self._recorder.show_state()

    def _try_device(self) -> None:
        """Has the device compute the least there is, while nothing else runs: clients send again
        what has failed, so that one request after another may be at fault. Raises StepFailed."""
        now, waiting = self._clock(), self.scheduler.waiting
        probe = Request(
            request_id="",
            prompt_token_ids=[0],
            sampling=SamplingView(max_tokens=1),
            arrival_time=now - 2 * self.scheduler.config.batch_window_s,  # it waits for no group
        )
        self.scheduler.add(probe)
        waiting.alone = probe
        try:
            self._newest_plan = plan = self.scheduler.schedule(now)
            assert plan.requests == [probe], f"{plan.requests=} while all others wait"
            handle = ask(self._runner.dispatch, self._packer.pack(plan))
            ask(self._runner.choose, handle)
            self.scheduler.update(plan, ask(handle.result).token_ids.tolist())
        finally:
            waiting.alone = None
            self.scheduler.finish(probe, FinishReason.ERROR)  # unless it has ended well
        self._suspects.on_tokens([probe])

    def _dispatch(self) -> bool:
        begun = time.perf_counter()
        plan = self.scheduler.schedule(self._clock())
        num_preemptions = self._recorder.on_planned(plan)
        if not plan.requests:
            return False
        self._newest_plan = plan
        planned = time.perf_counter()
        batch = self._packer.pack(plan)
        packed = time.perf_counter()
        handle = ask(self._runner.dispatch, batch)
        if not batch.wants & Wants.MASK:
            ask(self._runner.choose, handle)
        times = (begun, planned, packed, time.perf_counter())
        step = StepInFlight(plan, batch, handle, num_preemptions, *times)
        self._in_flight.append(step)
        if batch.wants & Wants.MASK:
            self._unchosen = step
        return True

    def _choose(self, updates: list[RequestUpdate]) -> None:
        """Lets the newest step choose its tokens, if it does not yet, now that all tokens before
        are known: which tokens may come depends on them."""
        step, self._unchosen = self._unchosen, None
        if step is None:
            return
        num_words = num_mask_words(self.processor.limits.vocab_size)
        masks = np.full((step.batch.bucket.num_rows, num_words), ALL, np.uint32)
        for row, (request, samples) in enumerate(step.plan.sampling()):
            live = self._output.live_of.get(request)
            if live is None or live.prepared.constraint is None or not samples:
                continue
            position = int(step.plan.starts[row] + step.plan.counts[row])
            problem = live.prepared.constraint.fill(
                masks[row], request.output_token_ids, position - request.num_prompt_tokens
            )
            if problem:
                masks[row] = ALL
                kind = InvalidRequest if problem == CONTRADICTION else RequestFailed
                updates += self._output.fail(live, kind(problem))
        ask(self._runner.choose, step.handle, masks)

    def _collect(self, step: StepInFlight, updates: list[RequestUpdate]) -> None:
        asked = time.perf_counter()
        output = ask(step.handle.result)
        arrived = time.perf_counter()
        for piece, found in zip(step.batch.prompt_pieces, output.prompt_logprobs, strict=True):
            live = self._output.live_of.get(step.plan.requests[piece.row])
            if live is not None:
                live.add_prompt_logprobs(int(step.plan.starts[piece.row]), piece, found)
        if output.row_sums is not None:
            updates += self._pool(step.plan, output.row_sums)
        new_tokens = self.scheduler.update(step.plan, output.token_ids.tolist())
        for request, token_id, row in new_tokens:
            live = self._output.live_of.get(request)
            if live is None:  # another choice of its request has failed just now
                continue
            if token_id == BAD_TOKEN:
                updates += self._output.fail(live, RequestFailed(_BAD_LOGITS), is_poisoned=True)
                continue
            try:
                updates += self._output.on_token(live, token_id, row, output)
            except Exception as error:  # in its text or its grammar: no other request's affair
                updates += self._output.on_fault(live, error)
        if self._suspects.is_alert:
            embedded = [request for request in step.plan.ending if request.sampling.pooling]
            self._suspects.on_tokens([*(token.request for token in new_tokens), *embedded])
        is_last = not self.has_work
        self._recorder.on_collected(step, asked, arrived, last=is_last)

    def _pool(self, plan: StepPlan, row_sums: np.ndarray) -> list[RequestUpdate]:
        """Hands on what a step's chunks add to embeddings."""
        updates: list[RequestUpdate] = []
        for row in range(plan.num_decodes, len(plan.requests)):
            live = self._output.live_of.get(plan.requests[row])
            if live is not None and plan.requests[row].sampling.pooling:
                start, count = int(plan.starts[row]), int(plan.counts[row])
                updates += self._output.on_hidden(live, start, start + count, row_sums[row])
        return updates

    def _expire(self) -> list[RequestUpdate]:
        """Ends what is past its deadline, running or queued."""
        now = self._clock()
        updates = []
        for request in self.scheduler.expire(now):
            live = self._output.live_of.get(request)
            if live is not None:  # else it went with another choice of its request
                error = DeadlineExceeded(_how_late(request, now))
                updates += self._output.fail(live, error, FinishReason.DEADLINE)
        if updates:
            self._recorder.show_state()
        return updates


class _Closed:
    """The runner of a closed engine."""

    def dispatch(self, batch: PackedBatch) -> StepHandle:
        raise EngineDead("the engine is closed")

    def choose(self, handle: StepHandle, allowed: np.ndarray | None = None) -> None:
        raise EngineDead("the engine is closed")

    def reset(self) -> None:
        raise EngineDead("the engine is closed")


def _how_late(request: Request, now: float) -> str:
    """Why a request met its deadline, or the one of its wait."""
    late = f"{now - request.arrival_time:.3f} s"
    if request.first_scheduled_time is None and (request.queue_deadline or math.inf) <= now:
        return f"the request waited {late} in the queue without starting; try again later"
    return f"the deadline passed {late} after the request came"
