"""What all HTTP endpoints share: health, errors, limits of bodies and of open calls."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from importlib.metadata import version

import aiohttp
import pytest

from jserve.config import ServerSettings
from jserve.errors import ConfigError
from jserve.server.caller import Caller
from jserve.server.front import Front
from jserve.server.http_api import make_app
from jserve.server.http_server import HttpServer
from jserve.server.quota import CallerQuota, QuotaLimits
from tests.server.conftest import serving
from tests.server.fake_engine import FakeEngine


async def test_the_version_is_told():
    async with (
        serving(http=True) as served,
        aiohttp.ClientSession() as session,
        session.get(served.http + "/version") as response,
    ):
        assert await response.json() == {"version": version("jserve")}


async def test_o90_health_is_live_and_not_ready_while_loading():
    async with serving(loaded=False, http=True) as served, aiohttp.ClientSession() as session:
        for path, status in (("/health/live", 200), ("/health/ready", 503), ("/health", 503)):
            async with session.get(served.http + path) as response:
                assert response.status == status
        async with session.get(served.http + "/v1/models") as response:
            assert response.status == 503
            error = (await response.json())["error"]
        assert "loading" in error["message"]
        assert error["type"] == "server_error"
        served.front.open(served.engine)
        async with session.get(served.http + "/health/ready") as response:
            assert response.status == 200
        served.engine.is_ready = False
        async with session.get(served.http + "/health") as response:
            assert response.status == 503
        async with session.get(served.http + "/health/live") as response:
            assert response.status == 200
        served.engine.is_dead = True
        async with session.get(served.http + "/health/live") as response:
            assert response.status == 503


async def test_models_lists_the_served_model_and_refuses_others():
    async with serving(http=True) as served, aiohttp.ClientSession() as session:
        async with session.get(served.http + "/v1/models") as response:
            [model] = (await response.json())["data"]
        assert (model["id"], model["object"]) == ("fake", "model")
        async with session.get(served.http + "/v1/models/fake") as response:
            assert await response.json() == model
        async with session.get(served.http + "/v1/models/org/other") as response:
            assert response.status == 404
            assert (await response.json())["error"]["code"] == "model_not_found"


async def test_metrics_are_the_engines_registry_also_while_draining():
    async with serving(http=True) as served, aiohttp.ClientSession() as session:
        served.front.close("draining")
        async with session.get(served.http + "/metrics") as response:
            assert "jserve_compilations_after_warmup_total 0.0" in await response.text()


async def test_unknown_paths_and_methods_have_openais_error_bodies():
    async with serving(http=True) as served, aiohttp.ClientSession() as session:
        async with session.get(served.http + "/v1/nothing") as response:
            assert response.status == 404
            assert set((await response.json())["error"]) == {"message", "type", "param", "code"}
        async with session.delete(served.http + "/health") as response:
            assert response.status == 405
            assert json.loads(await response.text())["error"]["code"] == "method_not_allowed"
            assert "GET" in response.headers["allow"]


def test_a_port_in_use_is_a_config_error_with_the_remedy():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = ServerSettings(http_port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="choose a free --http_port"):
            HttpServer(make_app(Front(), settings), settings)


async def test_localhost_is_served_on_each_of_its_addresses_with_one_port():
    settings = ServerSettings(host="localhost", http_port=0)
    server = HttpServer(make_app(Front(), settings), settings)
    await server.start()
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.close()
    finally:
        await server.stop(0)


async def test_an_answer_does_not_wait_for_the_receipt_of_its_head():
    """Nagle's algorithm and delayed receipts hold each second packet back for 40 ms."""
    took = []
    async with serving(http=True) as served, aiohttp.ClientSession() as session:
        for _ in range(10):
            began = time.perf_counter()
            async with session.get(served.http + "/v1/models") as response:
                await response.read()
            took.append(time.perf_counter() - began)
    assert min(took[1:]) < 0.03


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *(("127.0.0.1:8000", 503), ("localhost", 503), ("LocalHost.:80", 503), ("[::1]:1", 503)),
        *(("evil.example", 421), ("localhost.evil.example:8000", 421), ("127.0.0.1.nip.io", 421)),
    ],
)
async def test_a_name_that_a_site_points_at_this_machine_is_refused_without_keys(host, status):
    settings = ServerSettings(http_port=0)
    server = HttpServer(make_app(Front(), settings, local_names_only=True), settings)
    await server.start()
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.get(server.url + "/v1/models", headers={"host": host}) as response,
        ):
            assert response.status == status
            if status == 421:
                assert "--api_keys" in (await response.json())["error"]["message"]
    finally:
        await server.stop(0)


async def test_errors_carry_the_callers_id_and_a_time_limit_is_not_tried_again():
    engine = FakeEngine(interval_s=None)
    async with serving(engine, http=True) as served, aiohttp.ClientSession(served.http) as session:
        for body, status, retry in (
            ({"prompt": "x", "n": 0}, 400, None),
            ({"prompt": "x", "timeout": 0.01}, 504, "false"),
        ):
            post = session.post("/v1/completions", json=body, headers={"x-request-id": "abc"})
            async with post as response:
                assert response.status == status, await response.text()
                assert response.headers["x-request-id"] == "abc"
                assert response.headers.get("x-should-retry") == retry


async def test_calls_beyond_a_quota_are_counted():
    quota = CallerQuota(QuotaLimits(requests_per_minute=1))
    async with serving(http=True) as served, aiohttp.ClientSession(served.http) as session:
        served.front.gate.admit = lambda key, certificate: Caller(name="k", quota=quota)
        for status in (200, 429, 429):
            async with session.post("/v1/completions", json={"prompt": "x"}) as response:
                assert response.status == status
        registry = served.engine.metrics.registry
        assert registry.get_sample_value("jserve_quota_refusals_total") == 2
