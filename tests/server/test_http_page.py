"""The live page as the server gives it: files, headers, the engine's state, and to whom."""

from __future__ import annotations

import asyncio
import re
from importlib.resources import files

import aiohttp
import pytest

from jserve.errors import EngineDead
from jserve.server import http_page
from jserve.server.caller import Caller, OpenGate
from tests.server.conftest import Served, serving
from tests.server.fake_engine import FakeEngine


async def state(served: Served, query: str = "") -> dict:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{served.http}/debug/state{query}") as response,
    ):
        assert response.status == 200, await response.text()
        return await response.json()


async def test_every_file_of_the_page_is_served_and_nothing_else():
    on_disk = {path.name for path in (files("jserve.server") / "page").iterdir()}
    assert on_disk == set(http_page.FILES)
    async with serving(http=True, loaded=False) as served, aiohttp.ClientSession() as session:
        async with session.get(served.http) as response:
            page = await response.text()
        assert page.startswith("<!doctype html>")
        for name in on_disk:
            async with session.get(f"{served.http}/page/{name}") as response:
                assert response.status == 200
                assert response.content_type == http_page.FILES[name]
        for name in ("http_page.py", "..%2Fhttp_page.py", ""):
            async with session.get(f"{served.http}/page/{name}") as response:
                assert response.status == 404


async def test_the_page_may_load_nothing_from_elsewhere_and_holds_no_inline_code():
    async with (
        serving(http=True) as served,
        aiohttp.ClientSession() as session,
        session.get(served.http) as response,
    ):
        policy = response.headers["content-security-policy"]
        page = await response.text()
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", page)
    for name in http_page.FILES:
        text = (files("jserve.server") / "page" / name).read_text()
        assert set(re.findall(r"https?://[^\"' ]+", text)) <= {"http://www.w3.org/2000/svg"}


@pytest.mark.parametrize("path", ["/", "/page/page.js", "/debug/state"])
async def test_only_administrators_see_it(path):
    class Gate(OpenGate):
        def admit(self, key: str | None, certificate: str) -> Caller:
            return Caller(name="someone", is_admin=key == "admin")

    async with serving(http=True, gate=Gate()) as served, aiohttp.ClientSession() as session:
        for key, status in (("user", 403), ("admin", 200)):
            headers = {"authorization": f"Bearer {key}"}
            async with session.get(served.http + path, headers=headers) as response:
                assert response.status == status


async def test_the_state_says_whether_requests_are_served_and_why_not():
    engine = FakeEngine()
    async with serving(engine, http=True, loaded=False) as served:
        loading = await state(served)
        assert (loading["status"], loading["activity"]) == ("loading", None)
        assert "loading" in loading["reason"]
        served.front.open(engine)
        serving_now = await state(served, "?since=3")
        assert (serving_now["status"], serving_now["reason"]) == ("serving", "")
        assert serving_now["model"] == "fake"
        assert serving_now["activity"]["since"] == 3
        engine.is_ready = False
        assert (await state(served))["status"] == "stuck"
        served.front.close("the server drains")
        draining = await state(served)
        assert (draining["status"], draining["reason"]) == ("draining", "the server drains")
        assert draining["activity"] is not None


async def test_a_long_step_or_a_dead_engine_does_not_hold_up_the_state(monkeypatch):
    class Silent(FakeEngine):
        async def activity(self, since: int) -> dict:
            await asyncio.Event().wait()
            raise AssertionError("unreachable")

    class Dead(FakeEngine):
        async def activity(self, since: int) -> dict:
            raise EngineDead("the engine failed: RuntimeError()")

    monkeypatch.setattr(http_page, "ANSWER_WITHIN_S", 0.01)
    async with serving(Silent(), http=True) as served:
        silent = await state(served)
    assert (silent["status"], silent["activity"]) == ("serving", None)
    assert "takes more than 0.01 s" in silent["reason"]
    async with serving(Dead(), http=True) as served:
        dead = await state(served)
    assert (dead["status"], dead["reason"]) == ("stuck", "the engine failed: RuntimeError()")


@pytest.mark.parametrize("since", ["-1", "x", "1e3", "9" * 30, "²"])
async def test_a_number_of_a_step_that_is_none_is_refused(since):
    async with serving(http=True) as served, aiohttp.ClientSession() as session:
        url = f"{served.http}/debug/state"
        async with session.get(url, params={"since": since}) as response:
            assert response.status == 400
            assert since in (await response.json())["error"]["message"]
