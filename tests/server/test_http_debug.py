"""Profiles over HTTP: who may start one, how many at once, and that they end."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from jserve.server.caller import Caller
from tests.server.conftest import serving, until
from tests.server.fake_engine import FakeEngine


class FakeProfiler:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self) -> str:
        self.calls.append("start")
        return "/profiles/1"

    def stop(self) -> None:
        self.calls.append("stop")


@pytest.fixture
async def profiled():
    engine = FakeEngine()
    engine.profiler = FakeProfiler()
    async with serving(engine, http=True) as served, aiohttp.ClientSession(served.http) as session:
        yield served, session


async def posted(session, seconds: object) -> tuple[int, dict]:
    async with session.post("/debug/profile", params={"seconds": str(seconds)}) as response:
        return response.status, await response.json()


async def test_the_answer_names_the_folder_once_the_profile_is_written(profiled):
    served, session = profiled
    status, body = await posted(session, 0.01)
    assert (status, body) == (200, {"folder": "/profiles/1", "seconds": 0.01})
    assert served.engine.profiler.calls == ["start", "stop"]


async def test_a_second_one_is_refused_while_one_runs_and_a_reader_that_leaves_ends_it(profiled):
    served, session = profiled
    calls = served.engine.profiler.calls
    long_one = asyncio.create_task(posted(session, 60))
    await until(lambda: calls == ["start"])
    status, body = await posted(session, 1)
    assert status == 409
    assert "a profile is being taken" in body["error"]["message"]
    long_one.cancel()
    await until(lambda: calls == ["start", "stop"])
    assert (await posted(session, 0.01))[0] == 200


@pytest.mark.parametrize("seconds", ["0", "-1", "61", "nan", "inf", "soon", ""])
async def test_a_length_that_is_none_is_refused(profiled, seconds):
    served, session = profiled
    status, body = await posted(session, seconds)
    assert status == 400
    assert "at most 60" in body["error"]["message"]
    assert served.engine.profiler.calls == []


async def test_without_a_folder_the_error_names_the_flag():
    async with serving(http=True) as served, aiohttp.ClientSession(served.http) as session:
        status, body = await posted(session, 1)
        assert status == 403
        assert "--profile_dir" in body["error"]["message"]
        async with session.get("/debug/profile") as response:
            assert response.status == 405


async def test_only_administrators_may_start_one(profiled):
    served, session = profiled

    class Gate:
        def admit(self, key: str | None, certificate: str) -> Caller:
            return Caller(name="ann", is_admin=key == "admin")

    served.front.gate = Gate()
    assert (await posted(session, 0.01))[0] == 403
    assert served.engine.profiler.calls == []
