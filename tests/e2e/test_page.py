"""The live page in a real browser, headless Chromium, over a real engine behind a real port."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from jserve.engine.async_engine import AsyncEngine
from jserve.errors import Unauthenticated
from jserve.messages import GenerateRequest
from jserve.server.caller import Caller
from scheduler.config import RequestClass
from tests.e2e.real_engine import PAGE, arranged, greedy, idle, prompt_of, serving_real, value
from tests.server.conftest import TIMEOUT_S, Served, serving

playwright = pytest.importorskip("playwright.async_api", reason="playwright drives the browser")
CHROMIUM = Path("/usr/bin/chromium")
ARGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
ENDLESS = 4000
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
CHARTS = ("steps", "times", "pages", "pool", "queue", "ttft", "itl")
pytestmark = [
    pytest.mark.skipif(not CHROMIUM.exists(), reason="Chromium is missing: apt install chromium"),
    pytest.mark.asyncio(loop_scope="module"),
]

# How many pixels of a canvas have the colour of a CSS variable.
COUNT_PIXELS = """([id, name]) => {
  const canvas = document.getElementById(id);
  const probe = new OffscreenCanvas(1, 1).getContext("2d");
  probe.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--" + name);
  probe.fillRect(0, 0, 1, 1);
  const [r, g, b] = probe.getImageData(0, 0, 1, 1).data;
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let count = 0;
  for (let i = 0; i < data.length; i += 4)
    count += data[i] === r && data[i + 1] === g && data[i + 2] === b && data[i + 3] === 255;
  return count;
}"""
# Text whose contrast with what is behind it is below WCAG's 4.5.
FAINT_TEXT = """() => {
  const linear = (c) => (c <= 10.3 ? c / 3294.6 : ((c / 255 + 0.055) / 1.055) ** 2.4);
  const light = (rgb) => {
    const [r, g, b] = rgb.map(linear);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const behind = (at) => {
    for (; at; at = at.parentElement) {
      const colour = parts(getComputedStyle(at).backgroundColor);
      if (colour[3] !== 0) return colour;
    }
  };
  const faint = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const at = node.parentElement;
    if (!node.data.trim() || !at.checkVisibility() || at.closest("button:disabled")) continue;
    const [a, b] = [parts(getComputedStyle(at).color), behind(at)].map((c) => light(c.slice(0, 3)));
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) faint.push(`${node.data.trim()}: ${contrast.toFixed(1)}`);
  }
  return faint;
}"""


@dataclass
class Tab:
    """A tab, and what it asked for and complained about."""

    page: Any
    asked: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    async def has(self, script: str, arg: object = None) -> None:
        """Waits until a script says so. Asked from here: the page's policy forbids eval there."""
        async with asyncio.timeout(TIMEOUT_S):
            while not await self.page.evaluate(script, arg):
                await asyncio.sleep(0.02)

    async def says(self, selector: str, text: str) -> None:
        """Waits until the text of an element holds `text`."""
        script = "([s, t]) => document.querySelector(s).textContent.includes(t)"
        await self.has(script, [selector, text])

    async def pixels(self, canvas: str, colour: str) -> int:
        return await self.page.evaluate(COUNT_PIXELS, [canvas, colour])

    async def shows(self, canvas: str, colour: str) -> None:
        """Waits until a canvas has pixels of a colour."""
        await self.has(COUNT_PIXELS, [canvas, colour])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Any]:
    async with playwright.async_playwright() as p:
        browser = await p.chromium.launch(executable_path=str(CHROMIUM), args=list(ARGS))
        yield browser
        await browser.close()


@asynccontextmanager
async def opened(
    browser: Any, url: str, viewport=DESKTOP, scheme: str = "light", *, clock=False, key: str = ""
) -> AsyncIterator[Tab]:
    """The page in a tab. At the end nothing may have gone wrong in it, and it may have asked nobody
    but its server."""
    credentials = {"username": "admin", "password": key} if key else None
    context = await browser.new_context(
        viewport=viewport, color_scheme=scheme, http_credentials=credentials
    )
    tab = Tab(await context.new_page())
    tab.page.on("request", lambda request: tab.asked.append(request.url))
    tab.page.on("pageerror", lambda error: tab.problems.append(str(error)))
    tab.page.on(
        "console", lambda message: message.type == "error" and tab.problems.append(message.text)
    )
    if clock:
        await tab.page.clock.install()
    await tab.page.goto(url)
    try:
        yield tab
    finally:
        await context.close()
    assert tab.problems == []
    assert [asked for asked in tab.asked if not asked.startswith(f"{url}/")] == []


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
    yield
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
        await tab.page.unroute("**/debug/state*")
        await tab.says("#status", "idle")
        await tab.says("#steps-from", "No steps yet")
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


PROMPT = "Prompts that begin alike share pages: Ä ½ 😀, 0"  # the chain model then counts
FACTS = "#answer-status"


async def ask(tab: Tab, prompt: str, max_tokens: int, kind: str = "raw") -> None:
    await tab.page.fill("#prompt", prompt)
    await tab.page.fill("#max-tokens", str(max_tokens))
    await tab.page.check(f"[name=kind][value={kind}]")
    await tab.page.click("#send")


async def test_the_prompt_box_streams_an_answer_and_marks_what_was_cached(browser):
    async with serving_real(arranged("chain"), http=True) as s, opened(browser, s.http) as tab:
        await tab.says("#status", "idle")
        length = len(PROMPT.encode())
        cached = (length - 1) // PAGE * PAGE
        for expected in (0, cached):
            await ask(tab, PROMPT, 12)
            await tab.says(FACTS, "ended by length")
            assert await tab.page.inner_text("#answer") == "123456789;;;"
            assert await tab.page.locator("#answer span").count() == 12
            await tab.says("#prompt-tokens-title", f"{length} tokens, {expected} from the prefix")
            assert await tab.page.inner_text("#prompt-tokens") == PROMPT
            assert await tab.page.locator("#prompt-tokens .cached").count() == expected
            assert await tab.page.locator("#prompt-tokens .computed").count() == length - expected
        facts = await tab.page.inner_text(FACTS)
        for part in ("TTFT ", "ITL p50 ", "12 tokens in ", "tokens/s"):
            assert part in facts
        await tab.page.hover("#answer span:nth-child(3)")
        assert (await tab.page.inner_text("#token-facts")).startswith('"3": ')
        await tab.page.focus("#answer")
        await tab.page.keyboard.press("ArrowRight")
        told = await tab.page.inner_text("#token-facts")
        assert told.startswith('"4": ')
        assert "ms, probability" in told
        kinds = await tab.page.eval_on_selector_all(
            "#answer span", "(s) => s.map((e) => e.className)"
        )
        assert all(kind.startswith("late-") for kind in kinds)


async def test_the_prompt_box_chats(browser):
    async with serving_real(arranged("chain"), http=True) as s, opened(browser, s.http) as tab:
        await tab.says("#status", "idle")
        await ask(tab, "Hello 😀", 4, "chat")
        await tab.says(FACTS, "4 tokens in ")
        assert await tab.page.inner_text("#answer") == "?@Aone"  # the template ends with ">"
        assert await tab.page.inner_text("#prompt-tokens") == "user:Hello 😀;>"


async def test_an_answer_can_be_stopped_and_an_error_is_said(browser):
    engine = arranged("chain")
    async with serving_real(engine, http=True) as s, opened(browser, s.http) as tab:
        await tab.says("#status", "idle")
        await ask(tab, "0", ENDLESS)
        await tab.has("document.querySelectorAll('#answer span').length > 5")
        assert await tab.page.is_disabled("#send")
        await tab.page.click("#stop")
        await tab.says(FACTS, "stopped; TTFT")
        await idle(engine)
        assert value(engine, "requests_finished_total", reason="abort") == 1
        await ask(tab, "0", 1_000_000)
        await tab.says(FACTS, "max_tokens")
        assert await tab.page.locator(f"{FACTS}.bad").count() == 1
        assert await tab.page.is_enabled("#send")
        tab.problems = [text for text in tab.problems if "400 (Bad Request)" not in text]


async def test_with_keys_a_browser_signs_in_once_for_all(browser):
    class Gate:
        def admit(self, key: str | None, certificate: str) -> Caller:
            if key != "secret":
                raise Unauthenticated("a key is needed")
            return Caller(name="admin", is_admin=True)

    async with (
        serving_real(arranged("chain"), http=True, gate=Gate()) as s,
        opened(browser, s.http, key="secret") as tab,
    ):
        await tab.says("#status", "idle")
        await ask(tab, "0", 3)
        await tab.says(FACTS, "3 tokens in ")
