"""Metrics as scrapers read them, and a port for them alone. Knows a registry: not what is in it.

Always in Prometheus' text format: in the newer one, OpenMetrics, prometheus_client 0.26 turns the
colons of vLLM's names into underscores.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import (
    CONTENT_TYPE_PLAIN_0_0_4,
    ThreadingWSGIServer,
    make_wsgi_app,
)

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


def metrics_text(registry: CollectorRegistry) -> bytes:
    """Returns all metrics, in CONTENT_TYPE. It takes milliseconds."""
    return generate_latest(registry)


def serve_metrics(host: str, port: int, registry: CollectorRegistry) -> Callable[[], None]:
    """Serves the metrics at /metrics, without keys or TLS, from a thread; returns what stops it.

    Raises:
      OSError: the address cannot be bound.
    """
    app = make_wsgi_app(registry)
    server = make_server(
        host,
        port,
        lambda environ, start: app({**environ, "HTTP_ACCEPT": CONTENT_TYPE}, start),
        _Ipv6Server if ":" in host else ThreadingWSGIServer,
        _Silent,
    )
    threading.Thread(target=server.serve_forever, name="jserve-metrics", daemon=True).start()

    def stop() -> None:
        server.shutdown()
        server.server_close()

    return stop


class _Ipv6Server(ThreadingWSGIServer):
    address_family = socket.AF_INET6


class _Silent(WSGIRequestHandler):
    def log_message(self, *_: object) -> None: ...
