"""Drives an engine from the caller's own thread and joins each request's updates into one output.
Knows requests and updates: no files, no prompts' origin, no device."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from jserve.errors import EngineDead, JserveError
from jserve.messages import (
    GenerateRequest,
    RequestUpdate,
    Timings,
    TokenLogprobs,
    Usage,
    joined,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One finished generation.

    `finish_reason` is "stop" or "length"; `stop_reason` is the stop string or stop token id that
    ended it, if one did. `logprobs` has one entry per token id, and `cumulative_logprob` is their
    sum; both are None where none were asked.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None
    logprobs: list[TokenLogprobs] | None

    @property
    def cumulative_logprob(self) -> float | None:
        return None if self.logprobs is None else math.fsum(p.logprob for p in self.logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What became of one prompt. `prompt` is None where ids or chat messages were given.

    `outputs` holds the n choices in order of index; where an embedding was asked for there are
    none, and `embedding` f32[D] is it. `prompt_logprobs` has one entry per prompt
    token, the first one None, or is None where none were asked. `usage` counts the prompt once and
    all that was generated, choices that `best_of` left out included.
    `metrics` holds seconds: queue_s, ttft_s, e2e_s, and itl_s, the mean gap between tokens; those
    of the choice that ended last.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None
    usage: Usage
    metrics: Timings | None
    embedding: np.ndarray | None = field(default=None, compare=False)

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompt, found in the prefix cache."""
        return self.usage.cached_tokens


class Finished(NamedTuple):
    """A request's end: its output, or the error that ended it."""

    key: Any
    result: RequestOutput | JserveError


Mailbox = deque[Finished]  # where one caller's requests report their ends, in order of finishing


@dataclass(slots=True)
class _Live:
    key: Any
    mailbox: Mailbox
    request: GenerateRequest
    updates: list[RequestUpdate] = field(default_factory=list)


def output_of(request: GenerateRequest, updates: Sequence[RequestUpdate]) -> RequestOutput:
    """Returns what all the updates of a request that ended well say."""
    choices = joined(updates)
    sampling = request.sampling
    return RequestOutput(
        request_id=choices[0].request_id,
        prompt=request.prompt,
        prompt_token_ids=list(choices[0].prompt_token_ids),
        outputs=[]
        if request.pooling
        else [_completion(c, sampling.logprobs is not None) for c in choices],
        prompt_logprobs=None
        if sampling.prompt_logprobs is None
        else list(choices[0].prompt_logprobs),
        usage=Usage.of_choices(c.usage for c in choices if c.usage is not None),
        metrics=updates[-1].timings,
        embedding=choices[0].embedding,
    )


def _completion(choice: RequestUpdate, with_logprobs: bool) -> CompletionOutput:
    return CompletionOutput(
        index=choice.index,
        text=choice.text,
        token_ids=list(choice.token_ids),
        finish_reason=choice.finish_reason or "",
        stop_reason=choice.stop_reason,
        logprobs=list(choice.logprobs) if with_logprobs else None,
    )


class RequestDriver:
    """Adds requests to an engine, turns its crank, and files each end in its caller's mailbox.

    Safe to share between threads: whoever steps works for all, and no caller can take (or lose)
    the ends of another's requests.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._live: dict[str, _Live] = {}

    def add(self, request: GenerateRequest, key: Any, mailbox: Mailbox) -> None:
        """Queues `request`. Raises InvalidRequest, Overloaded or EngineDead, as the engine does."""
        with self._lock:
            request_id = self._engine.add(request)
            self._live[request_id] = _Live(key, mailbox, request)

    def step(self) -> None:
        """Runs one turn of the engine for every caller; sleeps where that could do nothing yet.

        Raises EngineDead if the engine went idle and left requests unanswered, or what it raises.
        """
        with self._lock:
            for update in self._engine.step():
                self._route(update)
            if self._live and not self._engine.has_work:
                raise EngineDead(f"the engine is idle but {len(self._live)} requests have no end")
            idle_s = self._engine.idle_s()
        if idle_s:
            time.sleep(idle_s)

    def abort(self, mailbox: Mailbox) -> None:
        """Ends every live request that reports to `mailbox`; none of them reports any more."""
        with self._lock:
            mine = [rid for rid, live in self._live.items() if live.mailbox is mailbox]
            for request_id in mine:
                del self._live[request_id]
                self._engine.abort(request_id)

    @property
    def num_live(self) -> int:
        return len(self._live)

    def _route(self, update: RequestUpdate) -> None:
        live = self._live.get(update.request_id)
        if live is None:  # aborted: the engine's last word has no reader
            return
        live.updates.append(update)
        if update.finish_reason not in (None, "stop", "length"):
            self._end(live, update.request_id, _ended_early(update))
            if update.num_live_choices:
                self._engine.abort(update.request_id)
        elif update.is_last:
            self._end(live, update.request_id, output_of(live.request, live.updates))

    def _end(self, live: _Live, request_id: str, result: RequestOutput | JserveError) -> None:
        del self._live[request_id]
        live.mailbox.append(Finished(live.key, result))


def _ended_early(update: RequestUpdate) -> JserveError:
    if isinstance(update.error, JserveError):
        return update.error
    cause = f": {update.error}" if update.error else ""
    return JserveError(f"the request ended early, {update.finish_reason}{cause}")
