"""The live page's prompt box, in a real browser over a real engine behind a real port."""

from __future__ import annotations

import pytest

from jserve.errors import Unauthenticated
from jserve.server.caller import Caller
from tests.e2e.page.tab import Tab, opened
from tests.e2e.real_engine import PAGE, arranged, idle, serving_real, value

pytestmark = pytest.mark.asyncio(loop_scope="package")

ENDLESS = 4000
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


async def test_the_prompt_box_begins_with_a_question_where_the_model_chats(browser, monkeypatch):
    question = "document.getElementById('prompt').value.endsWith('?')"
    for chats in (True, False):
        engine = arranged("chain")
        if not chats:
            monkeypatch.setattr(engine.tokenizer, "chat_template", None)
        async with serving_real(engine, http=True) as s, opened(browser, s.http) as tab:
            await tab.says("#status", "idle")
            assert await tab.page.is_checked("[name=kind][value=chat]") is chats
            assert await tab.page.evaluate(question) is chats


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
