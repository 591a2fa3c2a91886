"""What the live page draws, in a real browser over a real engine behind a real port."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from jserve.engine.async_engine import AsyncEngine
from jserve.messages import GenerateRequest
from scheduler.config import RequestClass
from tests.e2e.page.tab import DESKTOP, FAINT_TEXT, PHONE, opened
from tests.e2e.real_engine import arranged, greedy, prompt_of, serving_real
from tests.server.conftest import Served, serving

pytestmark = pytest.mark.asyncio(loop_scope="package")

ENDLESS = 4000
CHARTS = ("steps", "times", "pages", "pool", "queue", "ttft", "itl")


@asynccontextmanager
async def busy(served: Served) -> AsyncIterator[None]:
    """Meanwhile three long requests run, and three short ones take turns in the fourth slot, each
    time with another prompt."""
    numbers = itertools.count()

    async def ask(name: str, max_tokens: int, tenant: str) -> None:
        while True:
            prompt = prompt_of(70, next(numbers))
            request = GenerateRequest(
                prompt_token_ids=prompt, sampling=greedy(max_tokens), request_id=name, tenant=tenant
            )
            await served.client.generate(request)

    tasks = [asyncio.create_task(ask(f"long {n}", ENDLESS, "acme")) for n in range(3)]
    tasks += [asyncio.create_task(ask(f"short {n}", 20, f"tenant {n}")) for n in range(3)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(error) for error in ended} == {asyncio.CancelledError}


def engine_with_targets():
    classes = (RequestClass(name="chat", ttft_slo_s=0.5), RequestClass(name="batch"))
    return arranged(classes=classes, ttft_slo_s=2.0)


async def test_what_the_engine_does_is_drawn_while_it_does_it(browser):
    async with serving_real(engine_with_targets(), http=True) as s, opened(browser, s.http) as tab:
        await tab.says("#status", "idle")
        await tab.says("#steps-from", "No steps yet")
        assert await tab.page.inner_text("#model") == "tiny"
        assert await tab.pixels("steps", "blue") == 0
        async with busy(s):
            await tab.says("#status", "serving")
            for canvas, colour in (
                *(("steps", "blue"), ("steps", "orange"), ("steps", "empty"), ("times", "soft")),
                *(("pages", "blue"), ("pool", "blue"), ("pool", "empty"), ("queue", "class-4")),
                *(("ttft", "blue"), ("ttft", "bad"), ("itl", "blue")),
            ):
                await tab.shows(canvas, colour)
            await tab.has("document.querySelectorAll('#requests .request.running').length === 4")
            await tab.has("document.querySelectorAll('#requests .request.waiting').length === 2")
            await tab.says("#tenants", "tenant")
            await tab.says("#ttft-targets", "no class: target 2.0 s, met by")
            before = await tab.page.evaluate("document.getElementById('steps').toDataURL()")
            await tab.has("(b) => document.getElementById('steps').toDataURL() !== b", before)
            value = "Number(document.querySelector('#requests [role=progressbar]').ariaValueNow)"
            at = await tab.page.evaluate(value)
            await tab.has(f"(at) => {value} > at", at)
            await tab.says("title", "4 running, 2 waiting")
        await tab.has("!document.querySelector('#requests .request')")
        await tab.says("#status", "idle")
        assert await tab.page.inner_text("#tile-running") == "0"
        for canvas in CHARTS:
            assert await tab.page.get_attribute(f"#{canvas}", "aria-label")


async def test_a_step_is_shown_to_the_pointer_and_to_the_arrow_keys(browser):
    async with serving_real(arranged(), http=True) as s, opened(browser, s.http) as tab:
        async with busy(s):
            await tab.shows("steps", "blue")
        await tab.says("#status", "idle")
        box = await tab.page.locator("#steps").bounding_box()
        await tab.page.mouse.move(box["x"] + box["width"] - 2, box["y"] + 50)
        await tab.has("!document.getElementById('tip').hidden")
        newest = await tab.page.inner_text("#tip")
        assert "decode rows" in newest
        await tab.page.mouse.move(0, 0)
        await tab.has("document.getElementById('tip').hidden")
        await tab.page.focus("#steps")
        await tab.page.keyboard.press("ArrowLeft")
        assert await tab.page.inner_text("#tip") == newest
        await tab.page.keyboard.press("ArrowLeft")
        number = int(newest.split()[1].rstrip(":"))
        await tab.says("#tip", f"step {number - 1}:")
        await tab.page.click("#share")
        assert await tab.page.get_attribute("#share", "aria-pressed") == "true"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
async def test_it_is_readable_light_and_dark_on_a_desk_and_on_a_phone(browser, viewport, scheme):
    async with (
        serving_real(engine_with_targets(), http=True) as s,
        busy(s),
        opened(browser, s.http, viewport, scheme) as tab,
    ):
        await tab.has("document.querySelector('#requests .request.running')")
        assert await tab.page.evaluate(FAINT_TEXT) == []
        width = await tab.page.evaluate("document.documentElement.scrollWidth")
        assert width <= viewport["width"]
        lefts = await tab.page.evaluate(
            "[...document.querySelectorAll('section')].map((s) => s.getBoundingClientRect().left)"
        )
        assert (len(set(lefts)) == 1) == (viewport is PHONE)
        background = await tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
        level = int(background.removeprefix("rgb(").split(",")[0])
        assert (level < 50) == (scheme == "dark")
        unnamed = await tab.page.evaluate(
            "[...document.querySelectorAll('input, textarea, button, canvas, [role=progressbar]')]"
            ".filter((e) => !(e.labels?.length || e.ariaLabel || e.textContent.trim()))"
            ".map((e) => e.id)"
        )
        assert unnamed == []


async def test_it_says_that_the_model_loads_and_that_the_server_drains(browser):
    engine = AsyncEngine(arranged())
    async with serving(engine, http=True, loaded=False) as s, opened(browser, s.http) as tab:
        await tab.says("#status", "loading")
        await tab.says("#banner", "still loading")
        s.front.open(engine)
        await tab.says("#status", "idle")
        await tab.has("document.getElementById('banner').hidden")
        s.front.close("the server is draining")
        await tab.says("#banner", "the server is draining")
        assert await tab.page.inner_text("#status") == "draining"
    await engine.drain(0)


async def test_it_says_that_the_server_is_gone_and_goes_on_with_the_next_one(browser):
    engine = AsyncEngine(arranged())
    async with serving(engine, http=True) as s, opened(browser, s.http) as tab:
        await s.client.generate(GenerateRequest(prompt_token_ids=[1, 2], sampling=greedy(3)))
        await tab.says("#steps-count", "3 steps")
        answer = {"status": 503, "json": {"error": {"message": "no more"}}}
        await tab.page.route("**/debug/state*", lambda route: route.fulfill(**answer))
        await tab.says("#banner", "no more")
        await tab.page.unroute("**/debug/state*")
        await tab.page.route("**/debug/state*", lambda route: route.abort())
        await tab.says("#status", "disconnected")
        await tab.says("#banner", "No answer from the server since")
        other = AsyncEngine(arranged())
        s.front.open(other)
        await s.client.generate(GenerateRequest(prompt_token_ids=[1, 2], sampling=greedy(5)))
        await tab.page.unroute("**/debug/state*")
        await tab.says("#steps-count", "5 steps")
        await tab.says("#status", "idle")
        await other.drain(0)
        tab.problems = [text for text in tab.problems if "Failed to load resource" not in text]
    await engine.drain(0)


async def test_a_hidden_tab_asks_for_nothing(browser):
    async with serving_real(arranged(), http=True) as s, opened(browser, s.http, clock=True) as tab:
        await tab.says("#status", "idle")

        async def become(is_hidden: bool) -> None:
            await tab.page.evaluate(
                "(is) => { Object.defineProperty(document, 'hidden', {value: is, configurable: "
                "true}); document.dispatchEvent(new Event('visibilitychange')); }",
                is_hidden,
            )

        async with tab.page.expect_response("**/debug/state*"):
            await tab.page.clock.run_for(500)
        await become(True)
        num_asked = len(tab.asked)
        await tab.page.clock.run_for(60_000)
        assert len(tab.asked) == num_asked
        async with tab.page.expect_response("**/debug/state*"):
            await become(False)
