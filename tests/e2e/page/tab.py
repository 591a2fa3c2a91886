"""The live page in a tab of a real browser, as tests look at it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.server.conftest import TIMEOUT_S

DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}

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
