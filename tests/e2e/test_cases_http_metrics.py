"""Fault reports about metrics, as a scraper of /metrics and readers over HTTP meet them."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.real_engine import arranged, idle, prompt_of, serving_real
from tests.server.conftest import TIMEOUT_S, until

WITHIN_S = 2.0
PATH = "/v1/completions"


async def scraped(session) -> dict[str, float]:
    async with session.get("/metrics") as response:
        families = list(text_string_to_metric_families(await response.text()))
    return {
        ":".join([sample.name, *sample.labels.values()]): sample.value
        for family in families
        for sample in family.samples
    }


async def scraped_until(session, is_right) -> None:
    """Scrapes until `is_right` of the number of requests that run or wait."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            now = await scraped(session)
            if is_right(now["jserve_requests_running"] + now["jserve_requests_waiting"]):
                return


def asking(i: int, **fields) -> dict:
    return {"prompt": prompt_of(20, i), "max_tokens": 4000, **fields}


async def test_o93_after_20_calls_are_cancelled_a_scrape_shows_nothing_held():
    engine = arranged(enable_prefix_cache=False)
    async with serving_real(engine, http=True) as s, aiohttp.ClientSession(s.http) as session:
        base = await scraped(session)
        calls = [
            asyncio.create_task(session.post(PATH, json=asking(i, stream=bool(i % 2))))
            for i in range(20)
        ]
        await scraped_until(session, lambda held: held == 20)
        for call in calls:
            call.cancel() if not call.done() else call.result().close()
        begun = time.monotonic()
        await scraped_until(session, lambda held: held == 0)
        assert time.monotonic() - begun < WITHIN_S
        await idle(engine)
        now = await scraped(session)
    for name in ("used", "cached", "free"):
        assert now[f"jserve_kv_pages:{name}"] == base[f"jserve_kv_pages:{name}"]


@pytest.mark.parametrize("stream", [True, False])
async def test_o95_five_disconnects_are_five_aborts_and_no_success(stream):
    engine = arranged()
    async with serving_real(engine, http=True) as s:
        async with aiohttp.ClientSession(s.http) as session:
            calls = [
                asyncio.create_task(session.post(PATH, json=asking(i, stream=stream)))
                for i in range(5)
            ]
            await until(lambda: engine.stats()["running"] == 4 and engine.stats()["waiting"] == 1)
            for call in calls:
                call.cancel() if not call.done() else call.result().close()
        await idle(engine)
        async with aiohttp.ClientSession(s.http) as session:
            counts = await scraped(session)
    prefix = "jserve_requests_finished_total:"
    ends = {name.removeprefix(prefix): n for name, n in counts.items() if name.startswith(prefix)}
    assert {reason: n for reason, n in ends.items() if n} == {"abort": 5}
