"""Whether someone has sent a prompt before can be told by how soon the answer begins: within a
tenant, where it is meant to, and never across tenants, whatever the callers write.

Source: Mann and Whitney, "On a test of whether one of two random variables is stochastically larger
than the other" (1947).
"""

from __future__ import annotations

import time
from pathlib import Path

import aiohttp
from scipy.stats import mannwhitneyu

from jserve.server.api_keys import add_entry, digest_of, new_key
from jserve.server.security import KeyGate
from tests.e2e.real_engine import PAGE, arranged, serving_real, value
from tests.server.conftest import Served

PAIRS = 24
LENGTH = 30 * PAGE + 1
SALT = "the same"
CHANCE = 1e-3  # how often equal distributions seem to differ: the test's own risk of failing


class Prober:
    """Measures, in pairs, the time to the first token of prompts that someone has sent before and
    of prompts that nobody has."""

    def __init__(self, served: Served, session: aiohttp.ClientSession) -> None:
        self.served, self.session = served, session
        self.num_prompts = 0

    async def ttft_s(self, key: str, prompt: list[int]) -> tuple[float, int]:
        """Returns seconds, and how many tokens the answer says were cached."""
        body = {"prompt": prompt, "max_tokens": 1, "cache_salt": SALT, "stream": True}
        body |= {"stream_options": {"include_usage": True}}
        headers = {"authorization": f"Bearer {key}"}
        url = f"{self.served.http}/v1/completions"
        began = time.perf_counter()
        async with self.session.post(url, json=body, headers=headers) as response:
            assert response.status == 200
            await response.content.readuntil(b"\n\n")
            seconds = time.perf_counter() - began
            rest = (await response.read()).decode()
        return seconds, int(rest.split('"cached_tokens":')[1].split("}")[0])

    def new_prompt(self) -> list[int]:
        """Of ids that begin no other prompt of this test."""
        self.num_prompts += 1
        first = [self.num_prompts // 200, self.num_prompts % 200]
        return first + [(7 * i + i * i // 3) % 250 for i in range(LENGTH - 2)]

    async def probe(self, victim: str, attacker: str) -> tuple[list[float], list[float], set[int]]:
        """Returns the attacker's times of what the victim has sent, those of what nobody has, and
        the numbers of cached tokens that it was told of the first."""
        sent, unsent, told = [], [], set()
        for pair in range(PAIRS):
            known, unknown = self.new_prompt(), self.new_prompt()
            await self.ttft_s(victim, known)
            for prompt in (known, unknown) if pair % 2 else (unknown, known):
                seconds, cached = await self.ttft_s(attacker, prompt)
                (sent if prompt is known else unsent).append(seconds)
                told |= {cached} if prompt is known else set()
        return sent, unsent, told


async def test_o55_cached_prefixes_are_told_apart_within_a_tenant_and_not_across(tmp_path: Path):
    file, keys = tmp_path / "keys.toml", {}
    for name, tenant in (("alice", "red"), ("alan", "red"), ("bob", "blue")):
        keys[name] = new_key()
        add_entry(file, name, {"sha256": digest_of(keys[name]).hex(), "tenant": tenant})
    engine = arranged()
    async with (
        serving_real(engine, http=True, gate=KeyGate(str(file))) as served,
        aiohttp.ClientSession() as session,
    ):
        prober = Prober(served, session)
        for _ in range(3):  # connections and code paths get warm
            await prober.ttft_s(keys["bob"], prober.new_prompt())
        within = await prober.probe(keys["alice"], keys["alan"])
        hits = value(engine, "prefix_cache_hit_tokens_total")
        across = await prober.probe(keys["alice"], keys["bob"])
        no_more_hits = value(engine, "prefix_cache_hit_tokens_total")
    assert within[2] == {LENGTH - 1}
    assert mannwhitneyu(within[0], within[1], alternative="less").pvalue < CHANCE
    assert across[2] == {0}
    assert hits == no_more_hits == PAIRS * (LENGTH - 1)
    assert mannwhitneyu(across[0], across[1]).pvalue > CHANCE
