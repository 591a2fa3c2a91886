"""What all front ends do with a request, whatever their protocol: who may ask, until when, and what
is left behind. Knows callers, the engine and errors: no protocol.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from jserve.engine.device import Profiler
from jserve.engine.input_processor import InputProcessor
from jserve.engine.kv_events import KvEventBatch
from jserve.engine.metrics import EngineMetrics
from jserve.errors import EngineDead, Forbidden, Overloaded
from jserve.messages import GenerateRequest, RequestUpdate, Timings, Usage
from jserve.server.caller import Caller, Gate, Lease, OpenGate, Quota

logger = logging.getLogger(__name__)


class RequestStream(Protocol):
    """Updates of one request, in order, up to the one that `is_last`."""

    request_id: str
    num_prompt_tokens: int

    def __aiter__(self) -> AsyncIterator[RequestUpdate]: ...

    def abort(self) -> None: ...  # may be called at any time, also after the end


class Engine(Protocol):
    """What the front ends need of an engine."""

    @property
    def is_ready(self) -> bool: ...  # false while loading, draining, dead or stuck; never blocks

    @property
    def is_dead(self) -> bool: ...  # for good

    @property
    def processor(self) -> InputProcessor: ...  # the model's limits, tokenizer and chat template

    @property
    def metrics(self) -> EngineMetrics: ...

    @property
    def profiler(self) -> Profiler | None: ...  # None where profiles are off

    async def submit(self, request: GenerateRequest) -> RequestStream:
        """Raises InvalidRequest, Overloaded or EngineDead before any work is done."""
        ...

    async def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False, and no change, while requests use any. Raises
        EngineDead."""
        ...

    async def activity(self, since: int) -> dict[str, Any]:
        """What it does now, and its steps after number `since`, fit for JSON. Raises EngineDead."""
        ...

    def kv_events(self) -> AsyncGenerator[KvEventBatch, None]:
        """Yields what enters and leaves the prefix cache. Raises EngineDead."""
        ...

    async def drain(self, timeout_s: float) -> None:
        """Refuses what is new, waits for the live requests for up to `timeout_s` seconds, ends
        the others with an EngineDead error, then stops the engine."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call, as its transport tells it."""

    method: str  # "/v1/completions", "jserve.v1.GenerateService/Generate"
    caller: Caller
    peer: str = ""  # address
    traceparent: str = ""  # W3C Trace Context, if the caller sent one


@dataclass(slots=True, kw_only=True)
class CallRecord:
    """What became of one request of a call. Nothing of its prompt or its output."""

    call: Call
    began: float  # seconds since 1970
    request_id: str = ""
    request_class: str = ""
    seconds: float = 0.0
    error: BaseException | None = None  # also of a request that was refused
    is_aborted: bool = False  # its reader left
    finish_reasons: list[str] = field(default_factory=list)  # of its choices, in order of ending
    usages: list[Usage] = field(default_factory=list)  # likewise
    timings: Timings | None = None  # of the choice that ended last
    # Of what came until its reader left: usages and timings come with an end only.
    num_output_tokens: int = 0
    ttft_s: float | None = None


Observer = Callable[[CallRecord], None]  # hears of each request once, at its end; must not block


class Answer:
    """A request that the engine has accepted. Iterate once, and close whatever happens: an answer
    closed before its last update aborts its request."""

    def __init__(
        self,
        stream: RequestStream,
        lease: Lease | None,
        record: CallRecord,
        on_end: Callable[[CallRecord], None],
    ) -> None:
        self.request_id = stream.request_id
        self._stream = stream
        self._lease = lease
        self._record = record
        self._on_end = on_end
        self._is_open = True
        self._is_finished = False

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def __aiter__(self) -> AsyncIterator[RequestUpdate]:
        """Yields the updates. Raises the error that ended the request, if one did."""
        record = self._record
        async for update in self._stream:
            self._is_finished = update.is_last
            record.num_output_tokens += len(update.token_ids)
            if record.ttft_s is None and update.token_ids:
                record.ttft_s = time.time() - record.began
            if self._lease is not None:
                self._lease.charge(len(update.token_ids))
            if update.finish_reason is not None:
                record.finish_reasons.append(update.finish_reason)
                record.timings = update.timings
                if update.usage is not None:
                    record.usages.append(update.usage)
                if self._lease is not None and update.is_last:  # of choices that best_of leaves out
                    num_all = sum(usage.completion_tokens for usage in record.usages)
                    self._lease.charge(max(num_all - record.num_output_tokens, 0))
            if update.error is not None:
                record.error = update.error
                raise update.error
            yield update
        if not self._is_finished:
            raise RuntimeError(f"the engine's stream of {self.request_id=} ended unfinished")

    def close(self) -> None:
        """Aborts the request unless it has ended. Harmless when repeated."""
        if not self._is_open:
            return
        self._is_open = False
        if not self._is_finished:
            self._record.is_aborted = self._record.error is None
            self._stream.abort()
        if self._lease is not None:
            self._lease.close()
        self._on_end(self._record)


class Front:
    """The way from every front end to an engine that may still be loading."""

    def __init__(self, gate: Gate | None = None, observers: Sequence[Observer] = ()) -> None:
        self.gate: Gate = gate or OpenGate()
        self._observers = observers
        self._engine: Engine | None = None
        self._closed_because = "the model is still loading; wait until health says ready"

    def open(self, engine: Engine) -> None:
        """Sends requests to `engine` from now on."""
        self._engine = engine
        self._closed_because = ""
        engine.metrics.show_ready(lambda: self.is_ready)

    def close(self, reason: str) -> None:
        """Refuses new requests with EngineDead and `reason`; running ones go on."""
        self._closed_because = reason

    @property
    def engine(self) -> Engine:
        """The engine that serves new requests. Raises EngineDead while there is none."""
        if self._closed_because or self._engine is None:
            raise EngineDead(self._closed_because)
        return self._engine

    @property
    def loaded_engine(self) -> Engine:
        """The engine, also while it drains. Raises EngineDead while it loads."""
        return self._engine or self.engine

    @property
    def is_ready(self) -> bool:
        return not self._closed_because and self._engine is not None and self._engine.is_ready

    @property
    def is_dead(self) -> bool:
        """Whether nothing will ever be served again."""
        return self._engine is not None and self._engine.is_dead

    @contextmanager
    def counted(self, call: Call) -> Iterator[Engine]:
        """Yields the engine for a call that generates nothing, but is one of its caller's requests.
        Raises Overloaded and EngineDead."""
        engine, quota = self.engine, call.caller.quota
        lease = _entered(quota, engine) if quota else None
        try:
            yield engine
        finally:
            if lease is not None:
                lease.close()

    async def submit(
        self, request: GenerateRequest, call: Call, *, tries_again: bool = False
    ) -> Answer:
        """Hands a request to the engine in the name of its caller. One for which there is no room
        is no news for the observers where whoever asks `tries_again`.

        Raises:
          Forbidden: the caller may not use this class.
          Overloaded, InvalidRequest, EngineDead: as the caller's quota and the engine do.
        """
        caller = call.caller
        request = replace(request, identity=caller.tenant, request_class=_class_of(request, caller))
        record = CallRecord(call=call, began=time.time(), request_class=request.request_class)
        lease: Lease | None = None
        try:
            allowed = caller.request_classes
            if allowed is not None and request.request_class not in allowed:
                raise Forbidden(
                    f"request_class={request.request_class!r} is not open to {caller.name!r}; use "
                    f"one of {sorted(allowed)}"
                )
            engine = self.engine
            lease = _entered(caller.quota, engine) if caller.quota else None
            stream = await engine.submit(request)
        except BaseException as error:  # a call may also be cancelled here
            if lease is not None:
                has_no_room = isinstance(error, (Overloaded, EngineDead))
                (lease.give_back if has_no_room else lease.close)()
            record.request_id = request.request_id or ""
            record.error = error
            if not (tries_again and isinstance(error, Overloaded)):
                self._tell(record)
            raise
        record.request_id = stream.request_id
        if lease is not None:
            lease.charge(stream.num_prompt_tokens)
        return Answer(stream, lease, record, self._tell)

    def _tell(self, record: CallRecord) -> None:
        record.seconds = time.time() - record.began
        for observer in self._observers:
            try:
                observer(record)
            except Exception:  # one that fails must not take the answer with it
                logger.exception("an observer of calls failed")


def _class_of(request: GenerateRequest, caller: Caller) -> str:
    """A caller with one class need not name it."""
    if not request.request_class and caller.request_classes and len(caller.request_classes) == 1:
        return next(iter(caller.request_classes))
    return request.request_class


def _entered(quota: Quota, engine: Engine) -> Lease:
    try:
        return quota.enter()
    except Overloaded:
        engine.metrics.on_quota_refusal()
        raise
