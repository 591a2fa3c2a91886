"""The engine in a thread of its own, behind asyncio streams. Knows threads and streams: no model,
no transport."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

from jserve.engine.device import Profiler
from jserve.engine.engine import Engine
from jserve.engine.input_processor import InputProcessor, PreparedRequest
from jserve.engine.kv_events import MAX_BATCHES, KvEventBatch, KvEventFeed, KvSubscription
from jserve.engine.metrics import EngineMetrics
from jserve.engine.streams import RequestStream
from jserve.engine.watchdog import Watchdog
from jserve.errors import EngineDead, Overloaded
from jserve.messages import GenerateRequest, RequestUpdate
from scheduler.request import FinishReason

log = logging.getLogger(__name__)

ENGINE_THREAD = "jserve-engine"
INLINE_CHARS = 2_000  # longer prompts are prepared in a thread, so that streams keep flowing
GRAMMAR_THREADS = 2
MAX_WAITING_GRAMMARS = 64
_DRAIN_POLL_S = 0.02
_LAST_STEP_S = 4.0  # what the thread may take to end once it is told to

T = TypeVar("T")


class _New(NamedTuple):
    prepared: PreparedRequest
    stream: RequestStream


class AsyncEngine:
    """Runs an engine in a thread and gives each request a stream. For one event loop.

    Args:
      step_timeout_s: a step that takes longer is stuck: new requests are refused meanwhile, and
        those that wait for it end with an error after twice that time; 0: no limit.
      max_unread_updates: a reader that leaves more of a choice unread loses its request.
      profiler: what records the device; None where that was not asked for.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        step_timeout_s: float = 60.0,
        max_unread_updates: int = 4096,
        profiler: Profiler | None = None,
    ) -> None:
        self._engine = engine
        self.profiler = profiler
        self._max_unread = max_unread_updates
        self._watchdog = Watchdog(step_timeout_s, engine.describe_step, engine.metrics)
        self._streams: dict[str, RequestStream] = {}  # live requests; the loop's thread only
        # New requests, ids to abort, and what else the engine's thread has to do.
        self._inbox: deque[_New | str | Callable[[], None]] = deque()
        self._admission = threading.Lock()  # so that a new request is counted once, wherever it is
        self._inbox_tokens = 0  # prompt tokens of new requests
        self._readers: dict[str, RequestStream] = {}  # as the engine has them; its thread only
        self._feed = KvEventFeed(engine.scheduler.cache, self._call_in_loop)
        self._calls: set[asyncio.Future[Any]] = set()  # the loop's thread only
        self._subscriptions: set[KvSubscription] = set()  # likewise
        self._grammars = ThreadPoolExecutor(GRAMMAR_THREADS, "jserve-grammars")
        self._num_compiling = 0  # requests that wait for theirs; the loop's thread only
        self._wake = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed_because = ""
        self._stopping = False
        self._is_dead = False
        self._thread = threading.Thread(target=self._run, name=ENGINE_THREAD, daemon=True)
        self._thread.start()

    @property
    def metrics(self) -> EngineMetrics:
        return self._engine.metrics

    @property
    def processor(self) -> InputProcessor:
        """The model's limits, tokenizer and chat template."""
        return self._engine.processor

    @property
    def is_ready(self) -> bool:
        """False while draining, after the end, and while a turn takes suspiciously long."""
        return not self._closed_because and not self._watchdog.stuck_s

    @property
    def is_dead(self) -> bool:
        """Whether the engine has failed for good: only another process can serve again."""
        return self._is_dead

    async def submit(self, message: GenerateRequest) -> RequestStream:
        """Checks and queues a request. Raises InvalidRequest, Overloaded or EngineDead."""
        self._check_open()
        processor = self._engine.processor
        prepare = partial(processor.prepare, message, processor.clock())
        structured = message.sampling.structured
        if _forces_call(message) or (structured and not processor.knows_grammar(structured)):
            prepared = await self._with_new_grammar(prepare)
            self._check_open()
        elif structured or _takes_long(message):
            prepared = await asyncio.to_thread(prepare)
            self._check_open()
        else:
            prepared = prepare()
        request = prepared.request
        with self._admission:
            num_live = sum(stream.num_choices for stream in self._streams.values())
            self._engine.check_room(prepared, self._streams, num_live, self._inbox_tokens)
            self._inbox_tokens += prepared.num_queued_tokens
            stream = self._streams[request.request_id] = RequestStream(prepared, self.abort)
            self._send(_New(prepared, stream))
        return stream

    async def _with_new_grammar(self, prepare: Callable[[], PreparedRequest]) -> PreparedRequest:
        """In threads apart, as compiling may take seconds, and chats are not to wait for it."""
        if self._num_compiling >= MAX_WAITING_GRAMMARS:
            raise Overloaded(f"{self._num_compiling} grammars wait to be compiled; try again later")
        self._num_compiling += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._grammars, prepare)
        except asyncio.CancelledError:
            self._check_open()  # draining has cancelled it, and not its caller
            raise
        finally:
            self._num_compiling -= 1

    def abort(self, stream: RequestStream) -> None:
        """Ends a live request; its stream gets no more updates. By the stream and not by its id,
        which another request may have taken over."""
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]
            self._send(stream.request_id)

    async def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False, and no change, while requests use any of them.
        Raises EngineDead."""
        self._check_open()
        return await self._in_engine(self._engine.reset_prefix_cache)

    async def activity(self, since: int) -> dict[str, Any]:
        """What the engine does now, and its steps after number `since`, fit for JSON; also while it
        drains. Raises EngineDead once it has stopped."""
        return await self._in_engine(partial(self._engine.activity, since))

    async def _in_engine(self, function: Callable[[], T]) -> T:
        """Returns what `function` returns in the engine's thread, between two steps. What it
        raises ends the call, but a broken invariant the engine. Raises EngineDead, too."""
        if self._stopping or not self._thread.is_alive():
            raise EngineDead(self._closed_because)
        self._loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = self._loop.create_future()

        def work() -> None:
            try:
                self._call_in_loop(_settle, done, function())
            except AssertionError:
                raise
            except Exception as error:
                self._call_in_loop(_settle, done, None, error)

        self._calls.add(done)
        self._send(work)
        try:
            return await done
        finally:
            self._calls.discard(done)

    async def kv_events(self, max_batches: int = MAX_BATCHES) -> AsyncGenerator[KvEventBatch, None]:
        """Yields what enters and leaves the prefix cache, for ever; first all that is in it. A
        reader that leaves `max_batches` unread is told all anew. Raises EngineDead."""
        self._check_open()
        subscription = KvSubscription(max_batches)
        self._subscriptions.add(subscription)
        try:
            while True:
                if subscription.is_behind:
                    self._send(partial(self._feed.subscribe, subscription))
                yield await subscription.get()
        finally:
            self._subscriptions.discard(subscription)
            self._send(partial(self._feed.unsubscribe, subscription))

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests, waits for the live ones, ends those left after `timeout_s` with
        an EngineDead error, and stops the thread."""
        self._closed_because = self._closed_because or "the server is shutting down"
        give_up = time.monotonic() + timeout_s
        while self._streams and self._thread.is_alive() and time.monotonic() < give_up:
            if self._watchdog.stuck_s:
                break
            await asyncio.sleep(_DRAIN_POLL_S)
        self._fail_all(EngineDead("the server shut down before the request ended"))
        self._stopping = True
        self._wake.set()
        self._grammars.shutdown(wait=False, cancel_futures=True)
        give_up = time.monotonic() + _LAST_STEP_S
        while self._thread.is_alive():  # polled: a join in a thread could not be given up
            if time.monotonic() > give_up:
                log.error("the device does not answer; its thread is left behind")
                return
            await asyncio.sleep(_DRAIN_POLL_S)

    def _check_open(self) -> None:
        if self._closed_because:
            raise EngineDead(f"{self._closed_because}; send the request to another server")
        if stuck_s := self._watchdog.stuck_s:
            raise EngineDead(
                f"a step has run for {stuck_s:.1f} s; send the request to another server"
            )
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._watch()

    def _send(self, item: _New | str | Callable[[], None]) -> None:
        self._inbox.append(item)
        self._wake.set()

    # ---- the engine's thread ----------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_inbox()
                idle_s: float | None = None
                if self._engine.has_work:
                    self._watchdog.busy_since = time.monotonic()
                    updates = self._engine.step()
                    if updates:
                        self._post(updates)
                    idle_s = self._engine.idle_s()
                self._feed.publish()
                if idle_s != 0:
                    self._watchdog.busy_since = None
                    self._wake.wait(idle_s)
            self._engine.close()
        except BaseException as error:  # nobody else would end the streams
            log.exception("the engine failed")
            self._is_dead = True
            # Its words are for the operator: they may quote what others have sent.
            self._closed_because = f"the engine failed ({type(error).__name__})"
            self._call_in_loop(self._fail_all, EngineDead(self._closed_because))
            self._engine.close(FinishReason.ERROR)

    def _take_inbox(self) -> None:
        self._wake.clear()  # before looking: what comes after sets it again
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, str):
                self._engine.abort(item)
                self._readers.pop(item, None)
            elif isinstance(item, _New):
                self._readers[item.stream.request_id] = item.stream
                with self._admission:
                    self._engine.add_prepared(item.prepared)
                    self._inbox_tokens -= item.prepared.num_queued_tokens
            else:
                item()

    def _post(self, updates: list[RequestUpdate]) -> None:
        addressed = []
        for update in updates:
            addressed.append((self._readers[update.request_id], update))
            if update.is_last:
                del self._readers[update.request_id]
        self._call_in_loop(self._deliver, addressed)

    def _call_in_loop(self, function, *args) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    # ---- the event loop's thread ------------------------------------------------------------

    def _deliver(self, addressed: list[tuple[RequestStream, RequestUpdate]]) -> None:
        for stream, update in addressed:
            if self._streams.get(update.request_id) is not stream:
                continue  # aborted meanwhile; another request may have its id by now
            if update.is_last:
                del self._streams[update.request_id]
            stream.put(update)
            most = self._max_unread * stream.num_choices
            if stream.num_unread > most and not update.is_last:
                self._give_up_on_reader(stream)

    def _give_up_on_reader(self, stream: RequestStream) -> None:
        self.abort(stream)
        self.metrics.on_slow_reader()
        error = Overloaded(
            f"the reader has left {stream.num_unread} updates unread, for each choice more than "
            f"max_unread_updates={self._max_unread}; read faster or ask for fewer tokens"
        )
        stream.end(error, drop_unread=True)

    def _watch(self) -> None:
        """Looks after the engine's thread from now on."""
        if self._watchdog.look():
            stuck_s = self._watchdog.stuck_s
            self._fail_all(EngineDead(f"a step has run for {stuck_s:.1f} s without an end"))
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_later(self._watchdog.interval_s, self._watch)

    def _fail_all(self, error: Exception) -> None:
        for stream in list(self._streams.values()):
            self.abort(stream)
            stream.end(error)
        for call in self._calls:
            if not call.done():
                call.set_exception(error)
        for subscription in self._subscriptions:
            subscription.fail(error)


def _takes_long(message: GenerateRequest) -> bool:
    """Whether preparing a request may hold up the streams of others."""
    asked = message.sampling
    has_rules = asked.bad_words or asked.allowed_token_ids
    has_choices = (asked.best_of or asked.n) > 1
    is_long = len(message.prompt or message.prompt_token_ids or ()) > INLINE_CHARS
    return bool(is_long or message.messages or has_rules or has_choices)


def _forces_call(message: GenerateRequest) -> bool:
    """Whether tools may make a grammar, which then is mostly a new one. They are unchecked yet: of
    whatever form the caller gave them."""
    tools = message.tools if isinstance(message.tools, (list, tuple)) else ()
    functions = [tool.get("function") for tool in tools if isinstance(tool, dict)]
    is_strict = any(isinstance(f, dict) and f.get("strict") for f in functions)
    return bool(tools) and (message.tool_choice not in (None, "none", "auto") or is_strict)


def _settle(call: asyncio.Future[Any], result: Any, error: Exception | None = None) -> None:
    if call.done():
        return  # the caller has left
    if error is None:
        call.set_result(result)
    else:
        call.set_exception(error)
