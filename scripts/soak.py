#!/usr/bin/env python3
"""Serves a tiny model and sends it --num_requests requests that are read, cancelled, cut off, late
or wrong, over gRPC and HTTP: scripts/soak.py --num_requests=10000.

Ten times on the way it waits until the server holds nothing, and prints how large it is; at the
end, how fast that grows. The exit code is 1 if pages or the canary's answer differ from what they
were at first, or if the server answered what no server should.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
from absl import app, flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jserve.bench.served import Served, served
from tests.e2e.chain_model import write_random_model
from tests.e2e.soak_client import Soak

_NUM_REQUESTS = flags.DEFINE_integer("num_requests", 10_000, "In all.", lower_bound=10)
_SEED = flags.DEFINE_integer("seed", 0, "Of all that is random.")
ROUNDS = 10
SETTLED = 3  # rounds after which memory is expected to stay
SERVER_FLAGS = ("--max_num_seqs=16", "--kv_memory_bytes=2097152")


async def soak(server: Served) -> tuple[Soak, list[float], bool]:
    """Returns the client, the server's size in MiB after each round, and whether it has let go of
    all that it was asked."""
    process, begun = psutil.Process(server.process.pid), time.monotonic()
    async with Soak(server.target, server.url, _SEED.value) as client:
        sizes, first, is_ok = [], await client.quiet(), True
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
    return client, sizes, is_ok


async def run() -> int:
    with tempfile.TemporaryDirectory() as name:
        write_random_model(Path(name))
        async with served(f"--model={name}", *SERVER_FLAGS) as server:
            client, sizes, is_ok = await soak(server)
    report(client, sizes, server.errors)
    return int(not is_ok or bool(client.surprises or server.errors or server.exit_code))


def report(client: Soak, sizes: list[float], errors: list[str]) -> None:
    for outcome, count in sorted(client.outcomes.items()):
        print(f"{count:6} {outcome}")
    per_round = np.polyfit(np.arange(len(sizes[SETTLED:])), sizes[SETTLED:], 1)[0]
    per_thousand = per_round * 1e3 * ROUNDS / _NUM_REQUESTS.value
    print(f"slope after round {SETTLED}: {per_thousand * 1024:.0f} KiB per 1000 requests")
    for line in [*client.surprises[:20], *errors[:60]]:
        print("!", line.rstrip())


def main(argv: Sequence[str]) -> None:
    sys.exit(asyncio.run(run()))


if __name__ == "__main__":
    app.run(main)
