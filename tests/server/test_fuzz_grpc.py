"""Random calls of every gRPC service, which scripts/compat/fuzz_grpc.py makes by the thousand."""

from __future__ import annotations

import grpc
import pytest

from jserve.server.grpc_service import ENGINE_SERVICES
from jserve.server.proto import generate_pb2 as pb
from tests.e2e.grpc_fuzzer import EXAMPLES, Fuzzer
from tests.e2e.real_engine import arranged, serving_real
from tests.server.conftest import TIMEOUT_S, Served
from tests.server.test_grpc_service import status_of

NUM_CALLS = 300


async def fuzzed(served: Served) -> Fuzzer:
    async with Fuzzer(served.target, seed=1) as fuzzer:
        await fuzzer.run(NUM_CALLS)
    return fuzzer


async def test_random_calls_get_designed_statuses_and_leave_nothing_behind():
    async with serving_real(arranged("sixteen"), enable_cache_service=True) as s:
        fuzzer = await fuzzed(s)
    assert fuzzer.surprises == []
    assert sum(fuzzer.outcomes.values()) == NUM_CALLS
    called = {method for method, _ in fuzzer.outcomes}
    assert called >= set(EXAMPLES)
    assert {method.rpartition(".")[0] for method in called} > set(ENGINE_SERVICES)
    statuses = {status for _, status in fuzzer.outcomes}
    assert statuses >= {"OK", "INVALID_ARGUMENT", "UNIMPLEMENTED"}


async def test_a_fault_of_the_server_is_a_surprise(monkeypatch):
    def broken(message):
        raise KeyError("a bug")

    async with serving_real(arranged("sixteen")) as s:
        monkeypatch.setattr("jserve.server.jetstream_service.request_from_jetstream", broken)
        fuzzer = await fuzzed(s)
    assert any("Orchestrator.Decode: INTERNAL" in surprise for surprise in fuzzer.surprises)


@pytest.mark.parametrize("tools", ['{"type": "array"}', "5", '["a"]', '[{"function": 5}]'])
async def test_tools_of_any_form_are_judged_and_no_fault(tools):
    """What the random calls have found."""
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="a")], tools=tools)
    async with serving_real(arranged("sixteen")) as s:
        status = await status_of(s.stub.Generate(pb.GenerateRequest(chat=chat), timeout=TIMEOUT_S))
    assert status.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "tools" in status.details()
