"""The server's life: bind, load, serve, drain, exit. Knows the order of things, not how they work.

Exit codes: 0 after SIGTERM or SIGINT, 1 when the settings, the model or the address are no good.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

from absl import app, flags

from jserve.config import EngineConfig, ServerSettings, parse_origins
from jserve.engine.async_engine import ENGINE_THREAD
from jserve.errors import ConfigError, JserveError
from jserve.flags import config_from_flags, define_flags, list_in_help
from jserve.server.call_logs import CallLogs
from jserve.server.exposition import serve_metrics
from jserve.server.front import Engine, Front
from jserve.server.grpc_service import ENGINE_SERVICES, create_server
from jserve.server.health import EngineHealth
from jserve.server.http_api import make_app
from jserve.server.http_server import HttpServer
from jserve.server.security import gate_of
from jserve.server.tls import TlsFiles

DRAIN_MARGIN_S = 5.0  # what an engine may take beyond the drain limit before it is left behind
FLUSH_GRACE_S = 2.0  # for last messages and statuses to reach their readers
_BUILD_THREAD = "jserve-build"

logger = logging.getLogger(__name__)

T = TypeVar("T")


class StopSignals:
    """SIGTERM and SIGINT as events: the first asks to drain, the second to stop at once."""

    def __init__(self) -> None:
        self.stop, self.hurry = asyncio.Event(), asyncio.Event()

    def install(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.notify)

    def notify(self) -> None:
        (self.hurry if self.stop.is_set() else self.stop).set()


async def serve(
    config: EngineConfig,
    engine_factory: Callable[[EngineConfig], Engine],
    signals: StopSignals,
) -> None:
    """Serves until `signals.stop`, then drains for up to `drain_timeout_s` seconds.

    `engine_factory` returns an engine that is warm. It runs in a thread of its own, so that health
    answers NOT_SERVING meanwhile.

    Raises:
      ConfigError: an address cannot be bound, or a log not be written.
      Exception: whatever `engine_factory` raises.
    """
    logs = CallLogs(config.server, _name(config))
    try:
        await _serve(config, engine_factory, signals, logs)
    finally:
        await asyncio.to_thread(logs.close)
    logger.info("stopped")


async def _serve(
    config: EngineConfig,
    engine_factory: Callable[[EngineConfig], Engine],
    signals: StopSignals,
    logs: CallLogs,
) -> None:
    began = time.monotonic()
    settings = config.server
    front = Front(gate_of(config), logs.observers)
    tls = TlsFiles(config.security) if config.security.tls_cert else None
    health = EngineHealth(lambda: front.is_ready, ENGINE_SERVICES)
    credentials = tls.grpc_credentials() if tls else None
    server, port = create_server(settings, front, health, logs.interceptors, credentials)
    security = config.security
    is_open = bool(security.insecure or security.api_keys or security.tls_cert)
    origins = parse_origins(security.allowed_origins)
    api = make_app(front, settings, local_names_only=not is_open, allowed_origins=origins)
    app = logs.around(api)
    context = tls.http_context() if tls else None
    http = HttpServer(app, settings, context) if settings.enable_http else None
    await health.refresh()
    await server.start()
    if http is not None:
        await http.start()
        logger.info("HTTP answers on %s", http.url)
    polling = asyncio.create_task(health.poll())
    address = f"{settings.host}:{port}"
    logger.info("loading %s; health answers on %s", config.model.model, address)
    try:
        engine = await _unless(signals.stop, _in_thread(lambda: engine_factory(config)))
        if engine is None:
            logger.info("told to stop while loading")
            return
        stop_metrics = _export_metrics(settings, engine)
        front.open(engine)
        await health.refresh()
        logger.info(
            "ready: %s on %s, %.1f s after start", _name(config), address, time.monotonic() - began
        )
        await signals.stop.wait()
        logger.info(
            "draining for up to %g s; a second signal stops at once", settings.drain_timeout_s
        )
        front.close("the server is draining; send the request to another one")
        await health.enter_graceful_shutdown()
        await _unless(signals.hurry, _drain(engine, settings.drain_timeout_s))
        await asyncio.to_thread(stop_metrics)
    finally:
        polling.cancel()
        grace_s = 0 if signals.hurry.is_set() else FLUSH_GRACE_S
        await asyncio.gather(server.stop(grace_s), *([http.stop(grace_s)] if http else []))


async def _drain(engine: Engine, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(engine.drain(timeout_s), timeout_s + DRAIN_MARGIN_S)
    except TimeoutError:
        logger.error("the engine did not drain within its limit of %g s", timeout_s)


async def _unless(event: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Returns what `work` returns, or None as soon as `event` is set; `work` is cancelled then."""
    task, interruption = asyncio.create_task(work), asyncio.create_task(event.wait())
    await asyncio.wait({task, interruption}, return_when=asyncio.FIRST_COMPLETED)
    interruption.cancel()
    if task.done():
        return task.result()
    task.cancel()
    return None


async def _in_thread(function: Callable[[], T]) -> T:
    """Returns `function()`. The thread is a daemon: unlike one of asyncio.to_thread, it cannot
    keep a process that is told to stop while loading."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def work() -> None:
        settle: Callable[[], None]
        try:
            settle = partial(result.set_result, function())
        except Exception as error:
            settle = partial(result.set_exception, error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(lambda: None if result.cancelled() else settle())

    threading.Thread(target=work, name=_BUILD_THREAD, daemon=True).start()
    return await result


def _export_metrics(settings: ServerSettings, engine: Engine) -> Callable[[], None]:
    """Starts the Prometheus endpoint, if one is wanted, and returns what stops it."""
    if not settings.metrics_port:
        return lambda: None
    try:
        stop = serve_metrics(settings.host, settings.metrics_port, engine.metrics.registry)
    except OSError as error:
        raise ConfigError(
            f"cannot export metrics on {settings.host}:{settings.metrics_port} ({error}); "
            "choose a free --metrics_port, or 0 for none"
        ) from error
    logger.info("metrics on http://%s:%d/metrics", settings.host, settings.metrics_port)
    return stop


def _name(config: EngineConfig) -> str:
    return config.model.served_model_name or config.model.model


def _build(config: EngineConfig) -> Engine:
    from jserve.build import build_async_engine  # brings jax: seconds, so not before health answers

    return build_async_engine(config)


async def _serve_until_signalled(
    config: EngineConfig, engine_factory: Callable[[EngineConfig], Engine]
) -> None:
    signals = StopSignals()
    signals.install()
    await serve(config, engine_factory, signals)


def main(argv: Sequence[str], engine_factory: Callable[[EngineConfig], Engine] = _build) -> None:
    """Serves as the flags say and returns when told to stop; exits with one line on an error."""
    if len(argv) > 1:
        raise app.UsageError(f"{argv[1:]} are no flags; write --name=value")
    try:
        asyncio.run(_serve_until_signalled(config_from_flags(), engine_factory))
    except JserveError as error:
        sys.exit(f"jserve-serve: {error}")
    leave_threads_behind()


def leave_threads_behind() -> None:
    """Ends the process, exit code 0, if the engine is still being built, or its device does not
    answer: a thread inside XLA cannot be interrupted, and does not survive the interpreter's own
    shutdown."""
    names = {_BUILD_THREAD, ENGINE_THREAD}
    if any(thread.name in names for thread in threading.enumerate()):
        logging.shutdown()
        os._exit(0)


def run() -> NoReturn:
    """Console command `jserve-serve`."""
    define_flags()
    list_in_help()
    flags.FLAGS.set_default("verbosity", 0)  # INFO: the ready line is meant to be seen
    app.run(main)
