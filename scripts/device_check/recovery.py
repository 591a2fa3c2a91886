"""Takes the KV pool away in the middle of a request, as a step that fails on the device does, and
looks whether the engine goes on. Knows one engine, not how fast it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scripts.device_check.engine import Checked

NUM_TOKENS = 8


def recovery_figures(checked: Checked) -> dict[str, Any]:
    """Returns whether a request whose step fails ends all the same, and whether another one's
    tokens are those that it got before: each bit of what the device holds was made anew."""
    before = tokens_of(checked, ask(checked))
    compilations = checked.compilations
    broken = ask(checked)
    checked.until_each_has([broken], NUM_TOKENS // 2)
    checked.lose_pool()
    checked.until_each_has([broken], NUM_TOKENS // 2)
    return {
        "failed_steps": checked.failed_steps,
        "recovers": checked.failed_steps == 1 and tokens_of(checked, ask(checked)) == before,
        "compilations_to_recover": checked.compilations - compilations,
    }


def ask(checked: Checked) -> str:
    """Queues one and the same prompt; random weights answer with whatever they answer."""
    return checked.add(checked.sizes.context, NUM_TOKENS, seed=0)


def tokens_of(checked: Checked, name: str) -> list[int]:
    token_ids: list[int] = []
    while len(token_ids) < NUM_TOKENS:
        for update in checked.engine.step():
            token_ids += update.token_ids if update.request_id == name else []
    return token_ids
