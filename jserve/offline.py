"""Drives an engine from the caller's own thread and joins each request's updates into one output.
Knows requests and updates: no files, no prompts' origin, no device."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jserve.errors import EngineDead, JserveError
from jserve.messages import GenerateRequest, RequestUpdate, Timings, TokenLogprobs, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One finished generation.

    `finish_reason` is "stop" or "length"; `stop_reason` is the stop string or stop token id that
    ended it, if one did. `logprobs` has one entry per token id, or is None where none were asked.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None
    logprobs: list[TokenLogprobs] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What became of one prompt. `prompt` is None where ids or chat messages were given.

    `metrics` holds seconds: queue_s, ttft_s, e2e_s, and itl_s, the mean gap between tokens.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    metrics: Timings | None


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
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)

    def extend(self, update: RequestUpdate) -> None:
        self.text.append(update.text)
        self.token_ids.extend(update.token_ids)
        self.logprobs.extend(update.logprobs)
        self.prompt_token_ids.extend(update.prompt_token_ids)

    def output(self, last: RequestUpdate) -> RequestOutput:
        completion = CompletionOutput(
            index=0,
            text="".join(self.text),
            token_ids=self.token_ids,
            finish_reason=last.finish_reason or "",
            stop_reason=last.stop_reason,
            logprobs=None if self.request.sampling.logprobs is None else self.logprobs,
        )
        usage = last.usage or Usage(len(self.prompt_token_ids), len(self.token_ids), 0)
        return RequestOutput(
            request_id=last.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[completion],
            num_cached_tokens=usage.cached_tokens,
            metrics=last.timings,
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
        live.extend(update)
        if update.finish_reason is None:
            return
        del self._live[update.request_id]
        result: RequestOutput | JserveError
        if update.finish_reason in ("stop", "length"):
            result = live.output(update)
        else:
            result = _ended_early(update)
        live.mailbox.append(Finished(live.key, result))


def _ended_early(update: RequestUpdate) -> JserveError:
    if isinstance(update.error, JserveError):
        return update.error
    cause = f": {update.error}" if update.error else ""
    return JserveError(f"the request ended early, {update.finish_reason}{cause}")
