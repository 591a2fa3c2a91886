"""Who is told of calls: the access log and the traces, as the settings ask. Knows both by name
only.
"""

from __future__ import annotations

from starlette.types import ASGIApp

from jserve.config import ServerSettings
from jserve.server.access_log import AccessLog, GrpcAccessLog, HttpAccessLog
from jserve.server.front import Observer
from jserve.server.tracing import Tracing, otlp_exporter


class CallLogs:
    """Opens what `settings` ask for; `model` is the name that is served.

    Attributes:
      observers: for `Front`.
      interceptors: for the gRPC server, before all others: they see what those refuse.

    Raises:
      ConfigError: the access log cannot be written, or spans cannot be sent.
    """

    def __init__(self, settings: ServerSettings, model: str) -> None:
        self._log = AccessLog(settings.access_log) if settings.access_log else None
        self._tracing: Tracing | None = None
        if settings.otlp_endpoint:
            self._tracing = Tracing(otlp_exporter(settings.otlp_endpoint), model)
        self.observers: list[Observer] = [o for o in (self._log, self._tracing) if o]
        self.interceptors = [GrpcAccessLog(self._log)] if self._log else []

    def around(self, app: ASGIApp) -> ASGIApp:
        """Returns `app` with the log of what it answers."""
        return HttpAccessLog(app, self._log) if self._log else app

    def close(self) -> None:
        """Writes and sends what is left, which may take seconds."""
        for log in (self._tracing, self._log):
            if log:
                log.close()
