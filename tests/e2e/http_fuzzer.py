"""Random calls for an HTTP server: schemathesis asks what its OpenAPI document says, and bytes that
no client would send follow. Knows HTTP and statuses: not what the calls mean.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from tests.e2e.soak_client import Quiet, Soak

COMPAT = Path(__file__).resolve().parents[2] / "scripts" / "compat"
AT_ONCE = 16
SILENCE_S = 0.3  # after which the server is taken to wait for the rest of a request
DESIGNED = {*range(200, 500), 503, 504}  # statuses

BODY = {"prompt": [1, 2, 3], "max_tokens": 4}
PATHS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/detokenize"),
    *("/v1/embeddings", "/health", "/metrics", "/openapi.json", "/", "/debug/state?since=-1"),
    *("/v1/models/%00", "/../../etc/passwd", "/%2e%2e/", "//", "/v1/models/" + "a" * 5000, "*"),
    *("/debug/state?since=x", "/v1/completions?" + "a=b&" * 500, "http://other/health", "/\xff"),
)
METHODS = ("POST", "GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "X", "")
HEADS = (
    *("content-type: application/json", "Content-Type: text/plain", "content-type:", "a: b"),
    *("content-encoding: gzip", "expect: 100-continue", "upgrade: h2c", "upgrade: websocket"),
    *("connection: close", "connection: upgrade", "transfer-encoding: chunked", "host:", "host: b"),
    *("transfer-encoding: gzip, chunked", "content-length: 10", "content-length: -1", "no colon"),
    *("content-length: 99999999999999999999", "content-length: 1e3", " : ", "x-request-id:", ":"),
    *("x-request-id: \x7f", "x-request-id: " + "i" * 201, "x-request-timeout-ms: 0", "a: \0"),
    *("x-request-timeout-ms: 1", "x-request-timeout-ms: -5", "traceparent: 00-zz-1-1", "é: é"),
    *("authorization: Bearer", "authorization: Basic !!!", "authorization: Basic Og==", "a: \rb"),
    *("cookie: " + "c" * 9000, "x: " + "y" * 70_000, "sec-fetch-site: cross-site", "range: 0-"),
)
# Values that bodies are given in place of theirs.
VALUES = (
    *("null", "true", "0", "-1", "1e400", "NaN", "-Infinity", "1" * 5000, "0.1", "{}", "[]", '""'),
    *('"\\ud800"', '"\\u0000"', "[" * 3000, '{"a":' * 3000, '"x"', "[[[]]]", '{"type":"object"}'),
    *('{"type":"json_object"}', '{"type":"regex","pattern":"((("}', '["a","b"]', "1" + "0" * 19),
    *('[{"role":"user","content":[{"type":"text","text":"a"}]}]', '[{"role":5}]', "'", "\\"),
)
FIELDS = (
    *("prompt", "messages", "max_tokens", "temperature", "top_p", "stop", "n", "stream", "seed"),
    *("logprobs", "stream_options", "response_format", "tools", "tool_choice", "logit_bias"),
    *("input", "echo", "guided_json", "guided_regex", "timeout", "cache_salt", "priority", "model"),
    *("bad_words", "prompt_logprobs", "min_tokens", "stop_token_ids", "best_of", "user", "zzz"),
    "tokens",
)


class HttpFuzzer:
    """Calls the server at `target` (gRPC) and `url`; the same calls for the same `seed`.

    Attributes:
      outcomes: how many calls ended how.
      surprises: what no server should do, in words.
    """

    def __init__(self, target: str, url: str, seed: int) -> None:
        self._target = target
        self._url = url
        self._host = f"host: {urlsplit(url).netloc}"
        self._seed = seed
        self._random = random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.surprises: list[str] = []

    async def quiet(self) -> Quiet:
        """Returns what the server holds when nobody asks it anything, and its canary's answer."""
        async with Soak(self._target, self._url) as client:
            return await client.quiet()

    async def run_schemathesis(self, num_examples: int, phases: str = "fuzzing") -> int:
        """Runs the unmodified command, with at most so many cases of each operation and phase.
        Returns how many calls it made."""
        with tempfile.TemporaryDirectory() as folder:  # it writes what it has found
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "schemathesis.cli", "--no-color"),
                *(f"--config-file={COMPAT / 'schemathesis.toml'}", "run"),
                *(f"{self._url}/openapi.json", "--mode=all", f"--phases={phases}"),
                *(f"--max-examples={num_examples}", f"--seed={self._seed}"),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                cwd=folder,
                env=os.environ | {"SCHEMATHESIS_HOOKS": str(COMPAT / "schemathesis_hooks.py")},
            )
            text = (await process.communicate())[0].decode()
        found = re.search(r"(\d+) generated", text)
        num_calls = int(found[1]) if found else 0
        self.outcomes["schemathesis"] += num_calls
        if process.returncode or not found:
            failures = text.partition(" FAILURES ")[2] or text
            self.surprises.append(f"schemathesis, seed {self._seed}: {failures[:8000]}")
        return num_calls

    async def run_raw(self, num_calls: int) -> None:
        """Sends so many requests that are odd or broken, each on a connection of its own."""
        left = iter(range(num_calls))

        async def work() -> None:
            for _ in left:
                await self._send(self.request_bytes(), leaves=self._random.random() < 0.1)

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))

    async def _send(self, data: bytes, *, leaves: bool) -> None:
        place = urlsplit(self._url)
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        answer = b""
        try:
            writer.write(data)
            while not leaves and (part := await asyncio.wait_for(reader.read(65536), SILENCE_S)):
                answer += part
        except TimeoutError:
            self.outcomes["raw waits"] += 1
        except OSError:
            pass  # closed by the server, before it had read all
        finally:
            writer.transport.abort()
        statuses = [int(s) for s in re.findall(rb"(?m)^HTTP/1\.[01] (\d{3})", answer)]
        for status in statuses or [0]:
            self.outcomes[f"raw {status or 'closed'}"] += 1
            if status and status not in DESIGNED:
                self.surprises.append(f"raw: {status} for {data[:300]!r}: {answer[-300:]!r}")

    def request_bytes(self) -> bytes:
        """Returns a request that is broken somewhere: in its body, in its head, or all over."""
        rng = self._random
        kinds: tuple[Callable[[], bytes], ...] = (self._odd_body, self._odd_body, self._odd_head)
        data = bytearray(rng.choice(kinds)())
        for _ in range(rng.choice((0, 0, 0, 1, 4))):
            at = rng.randint(0, len(data))
            data[at : at + rng.randint(0, 9)] = rng.randbytes(rng.randint(0, 9))
        if rng.random() < 0.03:
            data = bytearray(rng.randbytes(rng.randint(0, 500)))
        return bytes(data)

    def _odd_body(self) -> bytes:
        rng = self._random
        body = {name: json.dumps(value) for name, value in BODY.items()}
        for _ in range(rng.choice((0, 1, 1, 2, 5))):
            body[rng.choice(FIELDS)] = rng.choice(VALUES)
        text = "{" + ",".join(f'"{name}":{value}' for name, value in body.items()) + "}"
        data = text.encode()
        head = (
            f"POST {rng.choice(PATHS[:1] * 4 + PATHS[:6])} HTTP/1.1",
            *(self._host, "content-type: application/json", "connection: close"),
            *(f"content-length: {len(data)}", "", ""),
        )
        return "\r\n".join(head).encode() + data

    def _odd_head(self) -> bytes:
        rng = self._random
        version = rng.choice(("HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "HTTP/9", ""))
        lines = [f"{rng.choice(METHODS)} {rng.choice(PATHS)} {version}", self._host]
        lines += rng.choices(HEADS, k=rng.choice((0, 1, 2, 5, 120)))
        body = json.dumps(BODY)
        if rng.random() < 0.5:
            lines += [
                "content-type: application/json",
                f"content-length: {len(body)}",
                "connection: close",
            ]
        end = rng.choice(("\r\n", "\r\n", "\n"))
        return (end.join(lines) + 2 * end + body * rng.choice((0, 1, 1, 2))).encode("latin-1")
