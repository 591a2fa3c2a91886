#!/usr/bin/env python3
"""What a server does when more is asked of it than it can do: scripts/bench_overload.py --rounds=2.

In turns: as many requests at once as keep it full, which gives its peak; then requests at --loads
times the rate at which it finished those, whether it keeps up or not. For each, from the server's
own counters between the end of a warm-up and the last arrival: output tokens per second, also as a
share of the peak, and CPU of the server per token; and what became of the requests: how many were
refused, with which advice, and how long the others waited at most.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
from absl import app, flags

from jserve.bench.served import served
from jserve.client import GenerateClient
from jserve.errors import Overloaded
from jserve.messages import GenerateRequest
from jserve.sampling_params import SamplingParams

_MODEL = flags.DEFINE_string("model", "smollm2-135m", "What is served.")
_ROWS = flags.DEFINE_integer("max_num_seqs", 32, "Requests that run at once.", lower_bound=1)
_QUEUE = flags.DEFINE_integer("max_queued_requests", 32, "Those that may wait.", lower_bound=1)
_LOADS = flags.DEFINE_list("loads", ["2", "4"], "Offered, in multiples of the peak.")
_SECONDS = flags.DEFINE_float("seconds", 20.0, "Of each load, after the warm-up.", 1.0)
_WARM_UP = flags.DEFINE_float("warm_up_s", 5.0, "Of each load.", 0.0)
_ROUNDS = flags.DEFINE_integer("rounds", 1, "Of all loads, in turns.", lower_bound=1)
_OUTPUT = flags.DEFINE_integer("output_len", 32, "Output tokens per request.", lower_bound=1)
TOKENS = re.compile(r"^jserve_output_tokens_total (\S+)", re.MULTILINE)


class Outcome(NamedTuple):
    token_rate: float
    cpu_us: float  # of the server, per token
    request_rate: float
    refused: float  # share
    advice_s: float  # median of the advice to those
    longest_wait_s: float  # in the queue


class Load:
    """One server, and what is asked of it."""

    def __init__(self, client: GenerateClient, url: str, process: psutil.Process) -> None:
        self._client, self._url, self._process = client, url, process
        self._count = 0

    async def peak(self) -> Outcome:
        """Keeps the rows and half of the queue full."""
        stop = asyncio.Event()

        async def one_after_the_other() -> None:
            while not stop.is_set():
                await self._send()

        self._begin()
        tasks = [
            asyncio.create_task(one_after_the_other())
            for _ in range(_ROWS.value + _QUEUE.value // 2)
        ]
        outcome = await self._window(lambda: None)
        stop.set()
        await asyncio.gather(*tasks)
        return outcome

    async def offer(self, rate: float) -> Outcome:
        """Sends `rate` requests per second."""
        self._begin()
        tasks: set[asyncio.Task[None]] = set()
        begun = time.perf_counter()

        def send_due() -> None:
            while len(tasks) < (time.perf_counter() - begun) * rate:
                tasks.add(asyncio.create_task(self._send()))

        outcome = await self._window(send_due)
        await asyncio.gather(*tasks)
        return outcome

    def _begin(self) -> None:
        self._done, self._waits, self._advices = 0, [0.0], [0.0]

    async def _window(self, each_time: Callable[[], None]) -> Outcome:
        """Measures from the end of the warm-up on."""
        start: tuple[float, float, float, int] | None = None
        begun = time.perf_counter()
        while (now := time.perf_counter()) < begun + _WARM_UP.value + _SECONDS.value:
            each_time()
            if start is None and now > begun + _WARM_UP.value:
                start = await self._now()
            await asyncio.sleep(0.01)
        assert start is not None, "the warm-up ends before the window does"
        seconds, tokens, cpu_s, done = (
            b - a for a, b in zip(start, await self._now(), strict=True)
        )
        return Outcome(
            tokens / seconds,
            1e6 * cpu_s / tokens,
            done / seconds,
            (len(self._advices) - 1) / max(len(self._advices) - 1 + self._done, 1),
            median(self._advices),
            max(self._waits),
        )

    async def _now(self) -> tuple[float, float, float, int]:
        text = await asyncio.to_thread(
            lambda: urllib.request.urlopen(f"{self._url}/metrics").read()
        )
        found = TOKENS.search(text.decode())
        assert found is not None, "the server counts no tokens"
        used = self._process.cpu_times()
        return time.perf_counter(), float(found[1]), used.user + used.system, self._done

    async def _send(self) -> None:
        self._count += 1
        prompt = [(97 * self._count + 13 * i) % 5000 for i in range(16)]
        sampling = SamplingParams(temperature=0, max_tokens=_OUTPUT.value, ignore_eos=True)
        try:
            answer = await self._client.generate(
                GenerateRequest(prompt_token_ids=prompt, sampling=sampling)
            )
        except Overloaded as error:
            self._advices.append(error.retry_after_s)
            return
        self._done += 1
        if answer.timings:
            self._waits.append(answer.timings.queue_s)


async def measure() -> None:
    given = [f"--{f.name}={f.value}" for f in (_MODEL, _ROWS, _QUEUE)]
    given += ["--max_model_len=256", "--noenable_prefix_cache"]
    async with served(*given) as server, GenerateClient(server.target) as client:
        load = Load(client, server.url, psutil.Process(server.process.pid))
        for _ in range(_ROUNDS.value):
            peak = await load.peak()
            show("peak", peak, peak)
            for times in _LOADS.value:
                outcome = await load.offer(float(times) * peak.request_rate)
                show(f"{times} x", outcome, peak)


def show(name: str, outcome: Outcome, peak: Outcome) -> None:
    share = outcome.token_rate / peak.token_rate
    print(
        f"{name:5} {outcome.token_rate:7.1f} tokens/s, {share:6.1%} of the peak; "
        f"{outcome.cpu_us:6.0f} us CPU per token; {outcome.refused:5.1%} refused, told to wait "
        f" {outcome.advice_s:.2f} s; longest wait {outcome.longest_wait_s:.2f} s",
        flush=True,
    )


def main(argv: Sequence[str]) -> None:
    asyncio.run(measure())


if __name__ == "__main__":
    app.run(main)
