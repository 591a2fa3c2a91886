"""A span of OpenTelemetry for each request, with its queue time, prefill and decode as children.
Knows records of ended requests and the GenAI semantic conventions: nothing of prompts and outputs.

The names of attributes are those of opentelemetry.io, "Semantic conventions for generative AI".
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from threading import Thread
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from jserve.errors import ConfigError
from jserve.messages import Timings, Usage
from jserve.server.access_log import code_of
from jserve.server.front import CallRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

PATH = "/v1/traces"  # where a collector takes them over HTTP, unless the endpoint has a path
CLOSE_S = 5.0  # that a collector which does not answer may hold up the end
_OPERATIONS = {"chat": "chat", "embed": "embeddings"}  # by what the method's name holds


def otlp_exporter(endpoint: str) -> SpanExporter:
    """Returns what sends spans to the collector at `endpoint`, by OTLP over HTTP.

    Raises:
      ConfigError: the endpoint is no URL, or OpenTelemetry is not installed.
    """
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.netloc:
        raise ConfigError(f"otlp_endpoint={endpoint!r} is no URL; use one like http://host:4318")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(
            f"otlp_endpoint needs OpenTelemetry ({error}); run pip install 'jserve[otel]'"
        ) from error
    return OTLPSpanExporter(endpoint if url.path.strip("/") else endpoint.rstrip("/") + PATH)


class Tracing:
    """Makes spans of what it hears as an observer of `Front`; a thread of its own exports them."""

    def __init__(self, exporter: SpanExporter, model: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        service = {"service.name": "jserve", "service.version": version("jserve")}
        # Shut down by `close`: an exit handler would wait for a collector that does not answer.
        self._provider = TracerProvider(resource=Resource.create(service), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("jserve")
        self._model = model
        self._extract = TraceContextTextMapPropagator().extract
        self._kind, self._in_context = SpanKind, set_span_in_context
        self._failed = Status(StatusCode.ERROR)

    def __call__(self, record: CallRecord) -> None:
        attributes = dict(_attributes(record, self._model))
        span = self._tracer.start_span(
            f"{attributes['gen_ai.operation.name']} {self._model}",
            context=self._extract({"traceparent": record.call.traceparent}),
            kind=self._kind.SERVER,
            start_time=_ns(record.began),
            attributes=attributes,
        )
        if code_of(record).http >= 500:
            span.set_status(self._failed)
        if record.timings is not None:
            context = self._in_context(span)
            for name, begin_s, end_s in _phases(record.timings):
                child = self._tracer.start_span(
                    name, context=context, start_time=_ns(record.began + begin_s)
                )
                child.end(_ns(record.began + end_s))
        span.end(_ns(record.began + record.seconds))

    def close(self) -> None:
        """Sends what is left, for up to CLOSE_S seconds."""
        closing = Thread(target=self._provider.shutdown, name="jserve-spans", daemon=True)
        closing.start()
        closing.join(CLOSE_S)


def _attributes(record: CallRecord, model: str) -> Iterator[tuple[str, Any]]:
    call, method = record.call, record.call.method.lower()
    code = code_of(record)
    operations = (name for part, name in _OPERATIONS.items() if part in method)
    yield "gen_ai.operation.name", next(operations, "text_completion")
    yield "gen_ai.provider.name", "jserve"
    yield "gen_ai.request.model", model
    yield "gen_ai.response.model", model
    yield "gen_ai.response.id", record.request_id
    yield "gen_ai.response.finish_reasons", tuple(record.finish_reasons)
    num_output, ttft_s = record.num_output_tokens, record.ttft_s
    if record.usages:
        usage = Usage.of_choices(record.usages)
        num_output = usage.completion_tokens
        yield "gen_ai.usage.input_tokens", usage.prompt_tokens
        yield "gen_ai.usage.cache_read.input_tokens", usage.cached_tokens
    if record.timings is not None:
        ttft_s = record.timings.ttft_s
    yield "gen_ai.usage.output_tokens", num_output
    if ttft_s is not None:
        yield "gen_ai.response.time_to_first_chunk", ttft_s
    if record.error is not None:
        yield "error.type", type(record.error).__name__
    yield "client.address", call.peer
    yield "jserve.method", call.method
    yield "jserve.code", code.grpc
    yield "jserve.caller", call.caller.name
    yield "jserve.request_class", record.request_class


def _phases(timings: Timings) -> Iterator[tuple[str, float, float]]:
    """Yields name, begin and end, in seconds from the request's arrival."""
    yield "queue", 0.0, timings.queue_s
    first_s = timings.e2e_s if timings.ttft_s is None else timings.ttft_s
    if first_s > timings.queue_s:
        yield "prefill", timings.queue_s, first_s
    if timings.ttft_s is not None:
        yield "decode", timings.ttft_s, timings.e2e_s


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
