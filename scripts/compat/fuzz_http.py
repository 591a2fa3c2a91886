#!/usr/bin/env python3
"""Sends a server of a tiny model --num_calls calls over HTTP: schemathesis, unmodified, makes them
up from the server's own OpenAPI document, and one in five is broken in ways that no document tells:
scripts/compat/fuzz_http.py --num_calls=10000.

The exit code is 1 if an answer is not as the document says, if the server fails, or if afterwards
pages, health or the canary's answer differ from what they were at first.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import aiohttp
from absl import app, flags

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from jserve.bench.served import served  # noqa: E402
from tests.e2e.chain_model import write_random_model  # noqa: E402
from tests.e2e.http_fuzzer import HttpFuzzer  # noqa: E402
from tests.e2e.real_engine import CALL_TEMPLATE  # noqa: E402

_NUM_CALLS = flags.DEFINE_integer("num_calls", 10_000, "In all, about.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "The first; each round has the next one.")
NUM_EXAMPLES = 150  # of each operation and round
# A short model: a legal request may ask for 512 prompts, and as many tokens as fit.
FLAGS = ("--max_model_len=256", "--max_num_seqs=16", "--kv_memory_bytes=2097152")


async def fuzz(target: str, url: str) -> list[str]:
    """Returns what was not as it should be."""
    begun, seed, outcomes = time.monotonic(), _SEED.value, Counter[str]()
    num_calls, surprises = 0, list[str]()
    first = await HttpFuzzer(target, url, seed).quiet()
    while num_calls < _NUM_CALLS.value:
        fuzzer = HttpFuzzer(target, url, seed)
        # The cases at the edges of each field are the same for each seed, nearly.
        phases = "coverage,fuzzing" if seed == _SEED.value else "fuzzing"
        num_calls += (num_made := await fuzzer.run_schemathesis(NUM_EXAMPLES, phases))
        await fuzzer.run_raw(num_made // 4)
        num_calls += num_made // 4
        if (now := await fuzzer.quiet()) != first:
            fuzzer.surprises.append(f"at first there was {first}, now {now}")
        outcomes += fuzzer.outcomes
        surprises += fuzzer.surprises
        print(f"{num_calls} calls, {time.monotonic() - begun:.0f} s", flush=True)
        for surprise in fuzzer.surprises:
            print(surprise, flush=True)
        if not num_made:
            break
        seed += 1
    async with aiohttp.ClientSession() as session, session.get(f"{url}/health/ready") as response:
        if response.status != 200:
            surprises.append(f"health is {response.status}")
            print(surprises[-1])
    for outcome, count in sorted(outcomes.items()):
        print(f"{count:6} {outcome}")
    return surprises


async def run() -> int:
    with tempfile.TemporaryDirectory() as name:
        write_random_model(Path(name), eos=("<eos>",))
        settings = json.dumps({"chat_template": CALL_TEMPLATE})
        (Path(name) / "tokenizer_config.json").write_text(settings)
        async with served(f"--model={name}", *FLAGS) as server:
            surprises = await fuzz(server.target, server.url)
    print(f"the server's exit code: {server.exit_code}; {len(server.errors)} errors in its log")
    print(*server.errors[:40], f"{len(surprises)} surprises", sep="\n")
    return int(bool(surprises))


def main(argv: Sequence[str]) -> None:
    sys.exit(asyncio.run(run()))


if __name__ == "__main__":
    app.run(main)
