#!/usr/bin/env python3
"""Serves a tiny model and sends it --num_requests requests that are read, cancelled, cut off, late
or wrong, over gRPC and HTTP: scripts/soak.py --num_requests=10000.

Ten times on the way it waits until the server holds nothing, and prints how large it is; at the
end, how fast that grows. The exit code is 1 if pages or the canary's answer differ from what they
were at first, or if the server answered what no server should.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
from absl import app, flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jserve.bench.soak import Soak
from tests.e2e.chain_model import write_random_model

ROOT = Path(__file__).resolve().parents[1]
_NUM_REQUESTS = flags.DEFINE_integer("num_requests", 10_000, "In all.", lower_bound=10)
_SEED = flags.DEFINE_integer("seed", 0, "Of all that is random.")
ROUNDS = 10
SETTLED = 3  # rounds after which memory is expected to stay
SERVER_FLAGS = ("--max_num_seqs=16", "--kv_memory_bytes=2097152", "--port=0", "--http_port=0")


async def start_server(folder: Path) -> tuple[asyncio.subprocess.Process, str, str]:
    """Returns a server that is ready, its gRPC target and its URL."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, ROOT / "scripts" / "serve.py", f"--model={folder}", *SERVER_FLAGS),
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    url = ""
    while line := (await process.stderr.readline()).decode():
        if found := re.search(r"HTTP answers on (\S+)", line):
            url = found[1]
        if found := re.search(r"ready: .* on (\S+:\d+),", line):
            return process, found[1], url
    raise SystemExit("the server ended before it was ready")


async def drop(lines: asyncio.StreamReader, errors: list[str]) -> None:
    """Reads the server's log, so that it is never held up, and keeps what is bad in it."""
    is_bad = False
    async for line in lines:
        if re.match(rb"[A-Z]\d{4} ", line):
            is_bad = line.startswith((b"E", b"F"))
        if is_bad:
            errors.append(line.decode())


async def soak() -> int:
    with tempfile.TemporaryDirectory() as name:
        write_random_model(Path(name))
        server, target, url = await start_server(Path(name))
        errors: list[str] = []
        assert server.stderr is not None
        log = asyncio.create_task(drop(server.stderr, errors))
        client, process = Soak(target, url, _SEED.value), psutil.Process(server.pid)
        try:
            first = await client.quiet()
            sizes, begun, is_ok = [], time.monotonic(), True
            for number in range(ROUNDS):
                await client.run(_NUM_REQUESTS.value // ROUNDS)
                now = await client.quiet()
                is_ok &= now == first
                sizes.append(process.memory_info().rss / 2**20)
                print(
                    f"{(number + 1) * _NUM_REQUESTS.value // ROUNDS} requests, "
                    f"{time.monotonic() - begun:.0f} s: {sizes[-1]:.1f} MiB, "
                    f"{process.num_threads()} threads, {process.num_fds()} files, "
                    f"{now.pages_free} pages free, "
                    f"canary {'as at first' if now.answer == first.answer else 'CHANGED'}",
                    flush=True,
                )
        finally:
            await client.close()
            server.terminate()
            code = await server.wait()
            await log
    report(client, sizes, errors)
    return int(not is_ok or bool(client.surprises or errors or code))


def report(client: Soak, sizes: list[float], errors: list[str]) -> None:
    for outcome, count in sorted(client.outcomes.items()):
        print(f"{count:6} {outcome}")
    per_round = np.polyfit(np.arange(len(sizes[SETTLED:])), sizes[SETTLED:], 1)[0]
    per_thousand = per_round * 1e3 * ROUNDS / _NUM_REQUESTS.value
    print(f"slope after round {SETTLED}: {per_thousand * 1024:.0f} KiB per 1000 requests")
    for line in [*client.surprises[:20], *errors[:60]]:
        print("!", line.rstrip())


def main(argv: Sequence[str]) -> None:
    sys.exit(asyncio.run(soak()))


if __name__ == "__main__":
    app.run(main)
