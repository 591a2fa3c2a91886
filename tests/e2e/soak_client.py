"""Sends a server what clients do to it in a long life: they read on, leave, are late, or send what
is no request; and looks at what it keeps of them. Knows clients: not how a server works.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from jserve.client import GenerateClient
from jserve.errors import DeadlineExceeded, InvalidRequest, JserveError
from jserve.messages import GenerateRequest
from jserve.sampling_params import SamplingParams

CONCURRENCY = 24
QUIET_S = 30.0  # what a server may take to let go of what it was asked
VOCAB = 250  # prompts are token ids below it
CANARY = {"prompt": list(range(1, 40)), "max_tokens": 24, "temperature": 0}
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "presence_penalty": 0.5},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 1.0, "n": 3},
    {"temperature": 0, "stop": ["q", "zz"]},
)
BAD_BODIES: tuple[Any, ...] = (
    b"{",
    b"\xff\xfe",
    [],
    {},
    {"prompt": ""},
    {"prompt": [10**9]},
    {"prompt": [-1]},
    {"prompt": [1], "n": 0},
    {"prompt": [1], "temperature": "hot"},
    {"prompt": [1], "no_such_field": 1},
    {"prompt": [1], "max_tokens": -3, "stream": True},
    {"prompt": [1] * 100_000},
    {"prompt": [1], "response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
)
BAD_REQUESTS = (
    {"prompt_token_ids": [10**6]},
    {"prompt": ""},
    {"prompt_token_ids": [1] * 100_000},
    {"prompt_token_ids": [1], "model": "no such model"},
)


class Quiet(NamedTuple):
    """What a server holds when nobody asks it anything, and what it answers the one who does."""

    pages_free: int  # cached ones included: they are free to be taken
    answer: str


class Soak:
    """One client of many faces, of the server at `target` (gRPC) and `url` (HTTP).

    Attributes:
      outcomes: how many requests ended how.
      surprises: what no server should answer.
    """

    def __init__(self, target: str, url: str, seed: int = 0) -> None:
        self.outcomes = Counter[str]()
        self.surprises: list[str] = []
        self._target = target
        self._url = url
        self._rng = random.Random(seed)
        self._client = GenerateClient(target)
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def __aenter__(self) -> Soak:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()
        await self._session.close()

    async def run(self, num_requests: int) -> None:
        """Sends so many requests of random kinds, CONCURRENCY at once."""
        kinds: list[Callable[[], Any]] = [
            *(self._read_grpc, self._read_http, self._read_http_whole) * 2,
            *(self._leave_grpc, self._leave_http, self._leave_before_the_answer),
            *(self._hang_up, self._late_grpc, self._late_http, self._bad_http, self._bad_grpc),
        ]
        left = iter(range(num_requests))

        async def one_after_the_other() -> None:
            for _ in left:
                kind = self._rng.choice(kinds)
                try:
                    outcome = await kind()
                except Exception as error:
                    outcome = f"{type(error).__name__}"
                    self.surprises.append(f"{kind.__name__}: {outcome}: {error!s:.300}")
                self.outcomes[f"{kind.__name__.strip('_')}: {outcome}"] += 1

        await asyncio.gather(*(one_after_the_other() for _ in range(CONCURRENCY)))

    async def quiet(self) -> Quiet:
        """Returns when the server holds nothing any more. Raises TimeoutError."""
        async with asyncio.timeout(QUIET_S):
            while True:
                held = await self._metrics()
                if not (
                    held["jserve_requests_running"]
                    + held["jserve_requests_waiting"]
                    + held["jserve_kv_pages:used"]
                ):
                    break
                await asyncio.sleep(0.02)
        free = held["jserve_kv_pages:free"] + held["jserve_kv_pages:cached"]
        async with self._session.post(f"{self._url}/v1/completions", json=CANARY) as response:
            return Quiet(int(free), (await response.json())["choices"][0]["text"])

    async def _metrics(self) -> dict[str, float]:
        async with self._session.get(f"{self._url}/metrics") as response:
            families = list(text_string_to_metric_families(await response.text()))
        return {
            ":".join([sample.name, *sample.labels.values()]): sample.value
            for family in families
            for sample in family.samples
        }

    # ---- those who read on -------------------------------------------------------------------

    def _request(self, **fields: Any) -> GenerateRequest:
        settings = self._settings()
        settings["stop"] = tuple(settings.get("stop", ()))
        prompt = self._prompt()
        return GenerateRequest(
            prompt_token_ids=prompt, sampling=SamplingParams(**settings), **fields
        )

    def _prompt(self) -> list[int]:
        """Half of them begin alike, so that there is something to find in the prefix cache."""
        shared = list(range(100, 100 + self._rng.choice([0, 16, 50])))
        length = self._rng.choice([1, 3, 17, 33, 60])
        return shared + [self._rng.randrange(VOCAB) for _ in range(length)]

    def _settings(self) -> dict[str, Any]:
        return self._rng.choice(SETTINGS) | {"max_tokens": self._rng.choice([1, 2, 15, 40, 80])}

    def _post(self, *, stream: bool, **fields: Any) -> Any:
        body = {"prompt": self._prompt(), "stream": stream, **self._settings(), **fields}
        return self._session.post(f"{self._url}/v1/completions", json=body)

    async def _read_grpc(self) -> str:
        updates = [update async for update in self._client.stream(self._request())]
        assert updates, "a stream without an update"
        assert updates[-1].is_last, "a stream without an end"
        return "read"

    async def _read_http(self) -> str:
        async with self._post(stream=True) as response:
            text = await response.text()
        assert response.status == 200, f"{response.status}: {text:.200}"
        assert text.rstrip().endswith("data: [DONE]"), "a stream without an end"
        return "read"

    async def _read_http_whole(self) -> str:
        async with self._post(stream=False) as response:
            answer = await response.json()
        assert response.status == 200, f"{response.status}: {answer!s:.200}"
        return "read"

    # ---- those who leave ---------------------------------------------------------------------

    async def _leave_grpc(self) -> str:
        """Cancels the call."""
        updates = self._client.stream(self._request())
        for _ in range(self._rng.randrange(1, 6)):
            if await anext(updates, None) is None:
                return "ended before"
        await updates.aclose()
        return "left"

    async def _hang_up(self) -> str:
        """Closes the connection under two calls."""
        async with GenerateClient(self._target) as client:
            calls = [asyncio.create_task(client.choices(self._request())) for _ in range(2)]
            await asyncio.wait(calls, timeout=self._pause())
        ends = await asyncio.gather(*calls, return_exceptions=True)
        for end in ends:
            assert not isinstance(end, InvalidRequest), f"refused: {end}"
        return "left" if any(isinstance(end, BaseException) for end in ends) else "ended before"

    async def _leave_http(self) -> str:
        async with self._post(stream=True) as response:
            assert response.status == 200, f"{response.status}"
            for _ in range(self._rng.randrange(1, 6)):
                if not await response.content.readline():
                    return "ended before"
            response.close()
        return "left"

    async def _leave_before_the_answer(self) -> str:
        try:
            async with asyncio.timeout(self._pause()), self._post(stream=False) as response:
                await response.read()
        except TimeoutError:
            return "left"
        return "ended before"

    def _pause(self) -> float:
        return self._rng.choice([0.0, 0.001, 0.01, 0.05])

    # ---- those who are late ------------------------------------------------------------------

    async def _late_grpc(self) -> str:
        try:
            async for _ in self._client.stream(self._request(timeout_s=self._pause() + 1e-4)):
                pass
        except DeadlineExceeded:
            return "too late"
        return "in time"

    async def _late_http(self) -> str:
        async with self._post(stream=False, timeout=self._pause() + 1e-4) as response:
            await response.read()
        assert response.status in (200, 504), f"{response.status}"
        return "in time" if response.status == 200 else "too late"

    # ---- those who are wrong -----------------------------------------------------------------

    async def _bad_http(self) -> str:
        bad = self._rng.choice(BAD_BODIES)
        body = bad if isinstance(bad, bytes) else json.dumps(bad).encode()
        headers = {"content-type": "application/json"}
        url = f"{self._url}/v1/completions"
        async with self._session.post(url, data=body, headers=headers) as response:
            answer = await response.json()
        assert response.status == 400, f"{response.status} for {body[:100]!r}: {answer!s:.200}"
        return "refused"

    async def _bad_grpc(self) -> str:
        try:
            await self._client.generate(GenerateRequest(**self._rng.choice(BAD_REQUESTS)))
        except InvalidRequest:
            return "refused"
        except JserveError as error:
            if "no such model" in str(error):
                return "refused"
            raise
        raise AssertionError("a request that cannot be served was served")
