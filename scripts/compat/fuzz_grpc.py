#!/usr/bin/env python3
"""Sends a server --num_calls random calls of every service that it tells of, and checks that it
answers each as it should, frees what it held, and answers a canary as before:
scripts/compat/fuzz_grpc.py --num_calls=10000. Without --target, of a tiny model that it serves."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from jserve.bench.served import served  # noqa: E402
from tests.e2e.chain_model import write_random_model  # noqa: E402
from tests.e2e.grpc_fuzzer import Fuzzer  # noqa: E402

_NUM_CALLS = flags.DEFINE_integer("num_calls", 10_000, "In all.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of all that is random.")
_TARGET = flags.DEFINE_string("target", "", "host:port of a server; empty: one of its own.")
ROUND = 1000  # calls between two looks at the server
FLAGS = ("--max_num_seqs=16", "--kv_memory_bytes=2097152", "--enable_cache_service")


async def fuzz(target: str) -> int:
    begun, totals = time.monotonic(), Counter[str]()
    async with Fuzzer(target, _SEED.value) as fuzzer:
        for done in range(0, _NUM_CALLS.value, ROUND):
            await fuzzer.run(min(ROUND, _NUM_CALLS.value - done))
            num_done = min(done + ROUND, _NUM_CALLS.value)
            found, seconds = len(fuzzer.surprises), time.monotonic() - begun
            print(f"{num_done} calls, {seconds:.0f} s, {found} surprises", flush=True)
    for (_, status), count in fuzzer.outcomes.items():
        totals[status] += count
    for (method, status), count in sorted(fuzzer.outcomes.items()):
        print(f"{count:6} {status:20} {method}")
    print(dict(totals))
    print(*fuzzer.surprises[:40], sep="\n")
    return int(bool(fuzzer.surprises))


async def run() -> int:
    if _TARGET.value:
        return await fuzz(_TARGET.value)
    with tempfile.TemporaryDirectory() as name:
        write_random_model(Path(name), eos=("<eos>",))
        async with served(f"--model={name}", *FLAGS) as server:
            code = await fuzz(server.target)
    print(f"the server's exit code: {server.exit_code}; {len(server.errors)} errors in its log")
    print(*server.errors[:40], sep="\n")
    return code


def main(argv: Sequence[str]) -> None:
    sys.exit(asyncio.run(run()))


if __name__ == "__main__":
    app.run(main)
