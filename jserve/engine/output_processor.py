"""Turns the tokens of live requests into updates: text, stops, grammars, choices, times, and the
end of each. Knows requests and what clients hear of them: no steps' shapes, no devices."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from jserve.engine.choices import Choices
from jserve.engine.device import StepOutput, token_logprobs
from jserve.engine.input_processor import PreparedRequest, reason_name
from jserve.engine.live import LiveRequest
from jserve.engine.metrics import EngineMetrics
from jserve.engine.pooling import PooledPrompt
from jserve.engine.request_log import RequestLog
from jserve.engine.retry_advice import RetryAdvice
from jserve.errors import JserveError, RequestFailed, trace_of
from jserve.messages import RequestUpdate, TokenLogprobs, Usage
from scheduler.request import FinishReason, Request
from scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)

_BAD_HIDDEN = "the model's hidden states are not numbers (NaN or infinity): there is no embedding"
MIN_JUMP = 2  # forced tokens; the step in flight computes one anyway


class OutputProcessor:
    """The live requests, and what becomes of them.

    With `jump_forward`, tokens that a grammar forces are appended without a step of their own:
    "always", "auto" where that saves the device time, or "off".
    """

    def __init__(
        self,
        scheduler: Scheduler,
        metrics: EngineMetrics,
        clock: Callable[[], float],
        request_log: RequestLog | None,
        retry_advice: RetryAdvice,
        *,
        jump_forward: str,
    ) -> None:
        self.live: dict[str, list[LiveRequest]] = {}  # the choices that have not ended, by request
        self.live_of: dict[Request, LiveRequest] = {}
        self._scheduler = scheduler
        self._metrics = metrics
        self._clock = clock
        self._request_log = request_log
        self._retry_advice = retry_advice
        self._jump_forward = jump_forward

    def add(self, prepared: PreparedRequest) -> None:
        request_id = prepared.request.request_id
        choices = Choices(request_id, prepared.sampling, len(prepared.choices))
        self.live[request_id] = [LiveRequest(choice, choices) for choice in prepared.choices]
        for live in self.live[request_id]:
            self.live_of[live.prepared.request] = live

    def abort(self, request_id: str, reason: FinishReason) -> None:
        """Ends a live request, of which its client hears no more."""
        for live in list(self.live[request_id]):
            self._scheduler.finish(live.prepared.request, reason)
            self._retire(live, reason, self._clock())

    def fail(
        self,
        live: LiveRequest,
        error: JserveError,
        reason: FinishReason = FinishReason.ERROR,
        *,
        is_poisoned: bool = False,
    ) -> list[RequestUpdate]:
        """Ends a request, with all of its choices, because one of them cannot go on; see
        `Scheduler.finish`."""
        choices, now = live.choices, self._clock()
        for choice in list(self.live[choices.request_id]):
            self._scheduler.finish(choice.prepared.request, reason, is_poisoned=is_poisoned)
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

    def on_fault(self, live: LiveRequest, error: Exception) -> list[RequestUpdate]:
        """Ends a request whose output cannot be dealt with. The log has where that happened, but
        not the error's own words, which may quote the output."""
        log.error(
            "the output of %r cannot be dealt with: %s", live.choices.request_id, trace_of(error)
        )
        name = type(error).__name__
        return self.fail(live, RequestFailed(f"the request's output cannot be dealt with ({name})"))

    def on_token(
        self, live: LiveRequest, token_id: int, row: int, output: StepOutput
    ) -> list[RequestUpdate]:
        """Takes in one token of one choice, and those that its grammar forces after it."""
        request, now = live.prepared.request, self._clock()
        is_first = live.first_token_time is None
        self._on_time(live, now)
        token_ids: tuple[int, ...] = (token_id,)
        text = self._take(live, token_id)
        if live.prepared.constraint is not None:
            forced_text, forced_ids = self._take_forced(live)
            text, token_ids = text + forced_text, token_ids + forced_ids
        logprobs: tuple[TokenLogprobs, ...] = ()
        ending = {}
        if request.is_finished:
            text += live.prepared.detokenizer.finish()
            ending = {"stop_reason": live.stop_reason(token_ids[-1]), **self._ending(live, now)}
        view = request.sampling
        if view.num_logprobs >= 0 and output.logprobs is not None:
            logprobs = (token_logprobs(token_id, row, output.logprobs, view.num_logprobs),)
        update = RequestUpdate(
            request_id=live.choices.request_id,
            index=live.prepared.index,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_token_ids=tuple(request.prompt_token_ids) if is_first else (),
            prompt_logprobs=tuple(live.prompt_logprobs)
            if is_first and view.num_prompt_logprobs >= 0
            else (),
            **ending,
        )
        return live.choices.take(update)

    def on_hidden(
        self, live: LiveRequest, start: int, end: int, sums: np.ndarray
    ) -> list[RequestUpdate]:
        """Takes in what the tokens from `start` to `end` of a pooled prompt add to its embedding;
        the last of them end the request."""
        request = live.prepared.request
        if not np.isfinite(sums).all():
            return self.fail(live, RequestFailed(_BAD_HIDDEN), is_poisoned=True)
        live.pooled = live.pooled or PooledPrompt(request.sampling.pooling)
        live.pooled.add(start, sums)
        if end < request.num_prompt_tokens:
            return []
        now = self._clock()
        self._on_time(live, now)
        self._scheduler.finish(request, FinishReason.STOP)
        update = RequestUpdate(
            request_id=live.choices.request_id,
            prompt_token_ids=tuple(request.prompt_token_ids),
            embedding=live.pooled.vector(),
            **self._ending(live, now),
        )
        return live.choices.take(update)

    def _on_time(self, live: LiveRequest, now: float) -> None:
        """Notes when a choice had its newest token, or its embedding."""
        request = live.prepared.request
        if live.first_token_time is None:
            live.first_token_time = now
            started = request.first_scheduled_time
            assert started is not None, f"{request.request_id} has a token but never ran"
            self._metrics.on_first_token(
                started - request.arrival_time,
                now - request.arrival_time,
                0 if live.prepared.index else request.num_prompt_tokens,
                0 if live.prepared.index else request.num_cached_tokens,
                request.request_class,
                num_tokens=0 if request.sampling.pooling else 1,
            )
        else:
            self._metrics.on_token_gap(now - live.last_token_time, request.request_class)
        live.last_token_time = now

    def _take(self, live: LiveRequest, token_id: int) -> str:
        """Returns the text that a token adds; ends the choice where a stop string or its grammar
        does."""
        request, prepared = live.prepared.request, live.prepared
        live.num_tokens += 1
        text = ""
        if prepared.sampling.include_stop_str or not live.is_stopped_by(token_id):
            text = prepared.detokenizer.add((token_id,))
        if prepared.detokenizer.stop_hit is not None:
            self._scheduler.finish(request, FinishReason.STOP)
            request.finish_reason = FinishReason.STOP
        elif prepared.constraint is not None and not request.is_finished:
            prepared.constraint.accept(token_id)
            is_long_enough = live.num_tokens >= prepared.sampling.min_tokens
            if prepared.constraint.is_complete and is_long_enough:  # only an end can follow
                self._scheduler.finish(request, FinishReason.STOP)
        return text

    def _take_forced(self, live: LiveRequest) -> tuple[str, tuple[int, ...]]:
        """Takes in what a choice has to take next, up to a stop string; returns text and ids."""
        text, token_ids = "", []
        for token_id in self._forced_tokens(live):
            if live.prepared.detokenizer.stop_hit is None:
                text += self._take(live, token_id)
                token_ids.append(token_id)
        if token_ids:
            self._metrics.on_forced_tokens(len(token_ids))
        return text, tuple(token_ids)

    def _forced_tokens(self, live: LiveRequest) -> list[int]:
        """Appends the tokens that a choice has to take next, and returns those appended."""
        request, constraint = live.prepared.request, live.prepared.constraint
        if self._jump_forward == "off" or constraint is None or request.is_finished:
            return []
        if request.sampling.num_logprobs >= 0:  # only a step knows them
            return []
        forced = constraint.forced_tokens()
        if len(forced) < MIN_JUMP:
            return []
        if self._jump_forward == "auto" and not self._scheduler.saves_time(request, len(forced)):
            return []
        return forced[: self._scheduler.extend(request, forced)]

    def _ending(self, live: LiveRequest, now: float) -> dict[str, Any]:
        """The fields of a choice's last update; retires it."""
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
        del self.live_of[request]
        choices = self.live[live.choices.request_id]
        choices.remove(live)
        if not choices:
            del self.live[live.choices.request_id]
        timings = live.timings(now)
        self._metrics.on_finish(name, timings, request.num_prompt_tokens, live.num_tokens)
        self._retry_advice.on_end(now, request.arrival_time)
        if live.first_token_time is None and reason == FinishReason.DEADLINE:
            self._metrics.on_no_first_token(request.request_class)
        if self._request_log:
            self._request_log.add(request, live.num_tokens, timings, name)
