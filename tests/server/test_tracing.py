"""Spans of requests: what they say, whose trace they continue, and that they arrive."""

from __future__ import annotations

import asyncio
import sys
import time

import pytest

from jserve.config import ServerSettings
from jserve.errors import ConfigError, InvalidRequest, RequestFailed
from jserve.messages import GenerateRequest, Timings, Usage
from jserve.sampling_params import SamplingParams
from jserve.server import tracing
from jserve.server.call_logs import CallLogs
from jserve.server.caller import Caller
from jserve.server.front import Call, CallRecord, Front
from jserve.server.tracing import Tracing
from tests.server.fake_engine import FakeEngine
from tests.server.otlp_collector import collector

memory = pytest.importorskip(
    "opentelemetry.sdk.trace.export.in_memory_span_exporter", reason="needs the extra jserve[otel]"
)
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
BEGAN = 1_700_000_000.0
TIMINGS = Timings(queue_s=0.25, ttft_s=0.5, e2e_s=2.0, itl_s=0.1)


def record_of(method="/v1/chat/completions", traceparent="", **fields) -> CallRecord:
    call = Call(
        method=method, caller=Caller(name="ann"), peer="127.0.0.1:9", traceparent=traceparent
    )
    return CallRecord(call=call, began=BEGAN, request_id="r1", seconds=2.125, **fields)


def spans_of(*records: CallRecord) -> dict:
    """The finished spans by name, of a Tracing that heard of `records`."""
    exporter = memory.InMemorySpanExporter()
    observer = Tracing(exporter, "tiny")
    for record in records:
        observer(record)
    observer.close()
    return {span.name: span for span in exporter.get_finished_spans()}


def ended() -> CallRecord:
    usages = [Usage(9, 4, 8), Usage(9, 5, 8)]
    return record_of(finish_reasons=["stop", "length"], usages=usages, timings=TIMINGS)


def test_a_request_is_a_span_with_its_queue_time_prefill_and_decode_inside():
    spans = spans_of(ended())
    times = {
        name: (round(span.start_time / 1e9 - BEGAN, 3), round(span.end_time / 1e9 - BEGAN, 3))
        for name, span in spans.items()
    }
    assert times == {
        "chat tiny": (0.0, 2.125),
        "queue": (0.0, 0.25),
        "prefill": (0.25, 0.5),
        "decode": (0.5, 2.0),
    }
    request = spans.pop("chat tiny")
    assert request.parent is None
    for span in spans.values():
        assert span.parent.span_id == request.context.span_id
        assert span.context.trace_id == request.context.trace_id


def test_attributes_are_those_of_the_genai_conventions():
    attributes = dict(spans_of(ended())["chat tiny"].attributes)
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.provider.name"] == "jserve"
    assert attributes["gen_ai.request.model"] == attributes["gen_ai.response.model"] == "tiny"
    assert attributes["gen_ai.response.id"] == "r1"
    assert attributes["gen_ai.response.finish_reasons"] == ("stop", "length")
    assert attributes["gen_ai.usage.input_tokens"] == 9
    assert attributes["gen_ai.usage.output_tokens"] == 9
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == 8
    assert attributes["gen_ai.response.time_to_first_chunk"] == 0.5
    assert attributes["jserve.caller"] == "ann"
    assert "error.type" not in attributes


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("/v1/completions", "text_completion tiny"),
        ("/v1/embeddings", "embeddings tiny"),
        ("vllm.grpc.engine.VllmEngine/Embed", "embeddings tiny"),
        ("jserve.v1.GenerateService/Generate", "text_completion tiny"),
    ],
)
def test_a_span_is_named_after_what_was_asked_for(method, name):
    assert list(spans_of(record_of(method))) == [name]


def test_the_callers_trace_goes_on_and_its_wish_not_to_be_sampled_counts():
    sampled = record_of(traceparent=f"00-{TRACE}-{PARENT}-01", timings=TIMINGS)
    spans = spans_of(sampled)
    assert {span.context.trace_id for span in spans.values()} == {int(TRACE, 16)}
    assert spans["chat tiny"].parent.span_id == int(PARENT, 16)
    assert spans_of(record_of(traceparent=f"00-{TRACE}-{PARENT}-00")) == {}
    assert len(spans_of(record_of(traceparent="nonsense"))) == 1


def test_only_what_is_the_servers_fault_marks_the_span_as_failed():
    from opentelemetry.trace import StatusCode

    ours = spans_of(record_of(error=RequestFailed("kumquat")))["chat tiny"]
    assert ours.status.status_code is StatusCode.ERROR
    theirs = spans_of(record_of(error=InvalidRequest("kumquat")))["chat tiny"]
    assert theirs.status.status_code is StatusCode.UNSET
    assert theirs.attributes["error.type"] == "InvalidRequest"
    for span in (ours, theirs):
        assert "kumquat" not in span.to_json()


def test_a_request_whose_reader_left_tells_what_came_until_then():
    left = record_of(is_aborted=True, num_output_tokens=3, ttft_s=0.75)
    [span] = spans_of(left).values()
    assert span.attributes["jserve.code"] == "CANCELLED"
    assert span.attributes["gen_ai.usage.output_tokens"] == 3
    assert span.attributes["gen_ai.response.time_to_first_chunk"] == 0.75


def test_spans_reach_a_collector_over_http_before_the_end():
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    with collector() as (endpoint, received):
        logs = CallLogs(ServerSettings(otlp_endpoint=endpoint), "tiny")
        asyncio.run(_generate(logs))
        logs.close()
    [(path, content_type, body)] = received
    assert (path, content_type) == ("/v1/traces", "application/x-protobuf")
    [resource] = ExportTraceServiceRequest.FromString(body).resource_spans
    service = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert service["service.name"] == "jserve"
    names = {span.name for scope in resource.scope_spans for span in scope.spans}
    assert {"chat tiny", "queue", "decode"} <= names


async def _generate(logs: CallLogs) -> None:
    front = Front(observers=logs.observers)
    front.open(FakeEngine())
    call = record_of().call
    request = GenerateRequest(prompt="x", sampling=SamplingParams(max_tokens=2))
    async with await front.submit(request, call) as answer:
        async for _ in answer:
            pass


def test_a_collector_that_is_not_there_holds_up_the_end_no_longer_than_it_may(monkeypatch):
    monkeypatch.setattr(tracing, "CLOSE_S", 0.2)
    logs = CallLogs(ServerSettings(otlp_endpoint="http://127.0.0.1:9"), "tiny")
    logs.observers[0](ended())
    begin = time.monotonic()
    logs.close()
    assert time.monotonic() - begin < 2


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://host:4317", "http://"])
def test_an_endpoint_that_is_no_url_is_a_config_error(endpoint):
    with pytest.raises(ConfigError, match="otlp_endpoint"):
        CallLogs(ServerSettings(otlp_endpoint=endpoint), "tiny")


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'jserve\[otel\]'"):
        CallLogs(ServerSettings(otlp_endpoint="http://localhost:4318"), "tiny")
