"""A short soak (scripts/soak.py has the long one) of the real engine behind real gRPC and HTTP."""

from __future__ import annotations

import pytest

from jserve.bench.served import served
from jserve.errors import EngineDead
from tests.e2e.real_engine import arranged, serving_real, value
from tests.e2e.soak_client import Soak


async def test_requests_that_are_read_left_late_and_wrong_leave_nothing_behind():
    engine = arranged("sixteen")
    async with serving_real(engine, http=True) as served:
        async with Soak(served.target, served.http, seed=1) as client:
            before = await client.quiet()
            await client.run(300)
            assert await client.quiet() == before
        assert not client.surprises
        assert sum(client.outcomes.values()) == 300
        assert not served.engine._streams, "requests without readers"
    assert value(engine, "step_failures_total") == 0


async def test_a_server_that_cannot_start_says_why():
    with pytest.raises(EngineDead, match="max_num_seqs=0 must be at least 1"):
        async with served("--max_num_seqs=0"):
            pass
