"""Random calls of the HTTP API, which scripts/compat/fuzz_http.py makes by the thousand."""

from __future__ import annotations

import aiohttp
import pytest

from tests.e2e.http_fuzzer import HttpFuzzer
from tests.e2e.real_engine import arranged, serving_real, value
from tests.server.conftest import Served

NUM_RAW = 100


async def fuzzed(served: Served, num_examples: int) -> HttpFuzzer:
    fuzzer = HttpFuzzer(served.target, served.http, seed=1)
    await fuzzer.run_schemathesis(num_examples)
    await fuzzer.run_raw(NUM_RAW)
    return fuzzer


async def test_random_calls_get_designed_answers_and_leave_nothing_behind():
    engine = arranged("sixteen")
    async with serving_real(engine, http=True) as served:
        before = await HttpFuzzer(served.target, served.http, seed=0).quiet()
        fuzzer = await fuzzed(served, 12)
        assert await fuzzer.quiet() == before
        assert not served.engine._streams, "requests without readers"
        assert served.front.is_ready
    assert fuzzer.surprises == []
    assert fuzzer.outcomes["schemathesis"] >= 60
    assert fuzzer.outcomes["raw 200"]
    assert fuzzer.outcomes["raw 400"]
    assert value(engine, "step_failures_total") == 0


async def test_a_fault_of_the_server_is_a_surprise(monkeypatch):
    def broken(*_):
        raise KeyError("a bug")

    async with serving_real(arranged("sixteen"), http=True) as served:
        monkeypatch.setattr("jserve.server.http_completions.read_http_body", broken)
        fuzzer = await fuzzed(served, 2)
    assert any("schemathesis" in surprise and "500" in surprise for surprise in fuzzer.surprises)
    assert any(surprise.startswith("raw: 500") for surprise in fuzzer.surprises)


@pytest.mark.parametrize("stream", [True, False])
async def test_settings_that_leave_no_token_are_the_callers_mistake(stream):
    """What the random calls have found."""
    body = {"prompt": "a", "guided_choice": ["0"], "allowed_token_ids": [5], "stream": stream}
    async with (
        serving_real(arranged("sixteen"), http=True) as served,
        aiohttp.ClientSession(served.http) as session,
        session.post("/v1/completions", json=body) as response,
    ):
        assert response.status == 400
        assert "together allow no token" in (await response.json())["error"]["message"]
