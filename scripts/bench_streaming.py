#!/usr/bin/env python3
"""What it costs to stream: --num_streams requests at once, offline (LLM.generate), over gRPC and
over HTTP with server-sent events, on one engine, in turns: scripts/bench_streaming.py --rounds=3.

For each way, medians of the rounds: output tokens per second, what share of the offline rate that
loses, and microseconds of CPU per token: of the event loop's thread, which is all that the server
adds in Python; of all threads of the process; and of the clients. They are a process of their own
that reads and counts, and takes its CPU from the same cores as the engine.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import grpc
from absl import app, flags

from jserve.build import build_engine
from jserve.config import ServerSettings
from jserve.engine.async_engine import AsyncEngine
from jserve.engine.engine import Engine
from jserve.llm import LLM, engine_config
from jserve.sampling_params import SamplingParams
from jserve.server.front import Front
from jserve.server.grpc_service import ENGINE_SERVICES, SERVICE, create_server
from jserve.server.health import EngineHealth
from jserve.server.http_api import make_app
from jserve.server.http_server import HttpServer
from jserve.server.proto import generate_pb2 as pb

_MODEL = flags.DEFINE_string("model", "smollm2-135m", "What is served.")
_STREAMS = flags.DEFINE_integer("num_streams", 256, "Requests, all sent at once.", lower_bound=1)
_ROWS = flags.DEFINE_integer("max_num_seqs", 32, "Of them, those that run at once.", lower_bound=1)
_INPUT = flags.DEFINE_integer("input_len", 16, "Prompt tokens.", lower_bound=1)
_OUTPUT = flags.DEFINE_integer("output_len", 32, "Output tokens.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Of each way, in turns.", lower_bound=1)
_VOCAB = flags.DEFINE_integer(
    "vocab_size", 5000, "Token ids of prompts are below it.", lower_bound=1
)
_CLIENT = flags.DEFINE_string("client", "", "Internal: be the clients of this way and address.")
ROOT = Path(__file__).resolve().parents[1]


class Round(NamedTuple):
    """One way, once: output tokens per second of time, and seconds of CPU."""

    rate: float
    loop_s: float
    process_s: float
    client_s: float


def prompt(index: int) -> list[int]:
    return [(97 * index + 13 * i) % _VOCAB.value for i in range(_INPUT.value)]


# ---- the clients ----------------------------------------------------------------------------


async def read_grpc(target: str) -> None:
    async with grpc.aio.insecure_channel(target) as channel:
        call = channel.unary_stream(f"/{SERVICE}/GenerateStream")  # bytes as they are

        async def read(index: int) -> None:
            message = pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=prompt(index)),
                sampling=pb.SamplingParams(
                    temperature=0, max_tokens=_OUTPUT.value, ignore_eos=True
                ),
            )
            async for _ in call(message.SerializeToString()):
                pass

        await asyncio.gather(*map(read, range(_STREAMS.value)))


async def read_sse(address: str) -> None:
    host, _, port = address.rpartition(":")

    async def read(index: int) -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps(
            {
                "prompt": prompt(index),
                "max_tokens": _OUTPUT.value,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
        )
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write((head + body).encode())
        last = b""
        while data := await reader.read(2**16):
            last = last[-20:] + data
        assert b"[DONE]" in last, f"a stream without an end: {last!r}"
        writer.close()

    await asyncio.gather(*map(read, range(_STREAMS.value)))


READERS = {"grpc": read_grpc, "sse": read_sse}


def be_client(way: str, address: str) -> None:
    begun = time.perf_counter(), time.process_time()
    asyncio.run(READERS[way](address))
    print(json.dumps([time.perf_counter() - begun[0], time.process_time() - begun[1]]))


# ---- the server -----------------------------------------------------------------------------


async def measure(engine: Engine) -> dict[str, list[Round]]:
    settings = ServerSettings(port=0, http_port=0)
    front, threaded = Front(), AsyncEngine(engine)
    front.open(threaded)
    health = EngineHealth(lambda: front.is_ready, ENGINE_SERVICES)
    server, port = create_server(settings, front, health)
    http = HttpServer(make_app(front, settings), settings)
    await server.start()
    await http.start()
    addresses = {"grpc": f"127.0.0.1:{port}", "sse": f"127.0.0.1:{http.port}"}
    rounds: dict[str, list[Round]] = {"offline": [], "grpc": [], "sse": []}
    llm = LLM.from_engine(engine)  # while nobody sends, the thread leaves the engine alone
    await offline(llm, _ROWS.value)  # warms up
    for _ in range(_ROUNDS.value):
        rounds["offline"].append(await timed(lambda: offline(llm, _STREAMS.value)))
        for way, address in addresses.items():
            rounds[way].append(await timed(lambda way=way, at=address: clients(way, at)))
    await threaded.drain(1.0)
    await asyncio.gather(server.stop(0), http.stop(0))
    return rounds


async def timed(work: Callable[[], Any]) -> Round:
    cpu = time.thread_time(), time.process_time()
    seconds, client_s = await work()
    spent = time.thread_time() - cpu[0], time.process_time() - cpu[1]
    return Round(_STREAMS.value * _OUTPUT.value / seconds, *spent, client_s)


async def offline(llm: LLM, num_requests: int) -> tuple[float, float]:
    params = SamplingParams(temperature=0, max_tokens=_OUTPUT.value, ignore_eos=True)
    begun = time.perf_counter()
    llm.generate([prompt(i) for i in range(num_requests)], params)
    return time.perf_counter() - begun, 0.0


async def clients(way: str, address: str) -> tuple[float, float]:
    given = (f"--{f.name}={f.value}" for f in (_STREAMS, _INPUT, _OUTPUT, _VOCAB))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, f"--client={way}@{address}", *given),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    answer, _ = await process.communicate()
    seconds, client_s = json.loads(answer)
    return seconds, client_s


def report(rounds: dict[str, list[Round]]) -> None:
    num_tokens = _STREAMS.value * _OUTPUT.value
    base = median(r.rate for r in rounds["offline"])
    print(f"{'way':8} {'tokens/s':>9} {'lost':>7} {'loop':>9} {'process':>9} {'clients':>9}")
    for way, of_way in rounds.items():
        rate, *spent = (median(column) for column in zip(*of_way, strict=True))
        costs = " ".join(f"{1e6 * s / num_tokens:6.1f} us" for s in spent)
        print(f"{way:8} {rate:9.1f} {1 - rate / base:6.1%} {costs}")


def main(argv: Sequence[str]) -> None:
    if _CLIENT.value:
        be_client(*_CLIENT.value.split("@"))
        return
    config = engine_config(
        model=_MODEL.value,
        max_num_seqs=_ROWS.value,
        max_model_len=_INPUT.value + _OUTPUT.value,
        enable_prefix_cache=False,
    )
    report(asyncio.run(measure(build_engine(config))))


if __name__ == "__main__":
    app.run(main)
