"""Real engines over the tiny models: compiled once per process, arranged anew for each test.

A test's engine has its own scheduler, pages, queue and metrics over the shared runner. Limits only
shrink: the compiled steps hold any smaller number of pages, rows and tokens.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jserve.build import build_engine
from jserve.engine.async_engine import AsyncEngine
from jserve.engine.engine import Engine, StepHandle
from jserve.engine.input_processor import InputProcessor
from jserve.engine.metrics import EngineMetrics
from jserve.llm import LLM, engine_config
from jserve.messages import GenerateRequest
from jserve.offline import RequestOutput
from jserve.sampling_params import SamplingParams
from jserve.text.chat import chat_template_of
from scheduler.packer import PackedBatch, Packer
from scheduler.scheduler import Scheduler
from tests.e2e.chain_model import VOCAB, TinyModel, write_chain_model, write_random_model
from tests.server.conftest import Served, serving, until

PAGE = 16
SLOTS, BUDGET = 4, 64
SETTINGS = {
    "max_num_seqs": SLOTS,
    "max_num_batched_tokens": BUDGET,
    "kv_memory_bytes": 2 * 2**20,
    "served_model_name": "tiny",
}
SIXTEEN = {"max_num_seqs": 16, "max_num_batched_tokens": 128}  # the settings of that model
INVARIANT = SIXTEEN | {"invariant": True}
POISON = {251: float("nan"), 252: float("inf")}  # token ids and what their embeddings hold
EOS = ("<eos a>", "<eos b>")
END_OF_TURN = "<|im_end|>"  # a special token, but no EOS
WALKS = (
    ("A", "one", "two", *reversed(EOS)),
    ("B", "red", "green", "blue", END_OF_TURN, "after"),
    ("C", "ABC", "DEF", "GHI", "J.", "KLM"),
    ("D", "ABX", "DEX", "GHX", "JX.", "KLX"),
    ("0", *"123456789", ";"),
)
# One that thinks, says something and calls add(a=12), and its template, whose answers begin at "T".
CALL_WALK = (
    *("T", "<think>", "Hm, ", "hm.", "</think>", "Sure", ": ", "<tool_call>", '\n{"name": '),
    *('"add", ', '"arguments": ', '{"a": ', "12", "}}", "\n</tool_call>", EOS[0]),
)
CALL_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content or '' }}"
    "{% if m.tool_calls %}<tool_call>{{ m.tool_calls | tojson }}</tool_call>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}T{% endif %}{# arguments </think> #}"
)
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@cache
def model(kind: str) -> TinyModel:
    """The "chain", the "caller" or the "random" model; "sixteen" and "invariant", random ones with
    EOS ids and more rows; or "poisoned", a random one with tokens that break it. Its folder lives
    as long as the process."""
    folder = tempfile.TemporaryDirectory(prefix="jserve-tiny-")
    _folders.append(folder)
    path = Path(folder.name)
    if kind == "chain":
        return write_chain_model(path, WALKS, special=(*EOS, END_OF_TURN), eos=EOS)
    if kind == "caller":
        caller = write_chain_model(path, [CALL_WALK], special=EOS[:1], eos=EOS[:1])
        settings = json.dumps({"chat_template": CALL_TEMPLATE})
        (path / "tokenizer_config.json").write_text(settings)
        return caller
    if kind == "poisoned":
        return write_random_model(path, poison=POISON)
    if kind in ("sixteen", "invariant"):
        return write_random_model(path, eos=EOS)
    return write_random_model(path)


_folders: list[tempfile.TemporaryDirectory] = []


@cache
def _built(kind: str, role: str) -> Engine:
    settings = SETTINGS | {"sixteen": SIXTEEN, "invariant": INVARIANT}.get(kind, {})
    return build_engine(engine_config(model=str(model(kind).folder), **settings))


class _Turn:
    """The runner that engines share, in the hands of the newest one."""

    _holders: ClassVar[dict[Engine, _Turn]] = {}

    def __init__(self, built: Engine) -> None:
        self._built = built
        self._holders[built] = self

    def dispatch(self, batch: PackedBatch) -> StepHandle:
        assert self._holders[self._built] is self, "a newer engine has overwritten the pages"
        return self._built._runner.dispatch(batch)

    def choose(self, handle: StepHandle, allowed: np.ndarray | None = None) -> None:
        self._built._runner.choose(handle, allowed)

    def reset(self) -> None:
        self._built._runner.reset()


def rearranged(
    built: Engine,
    *,
    runner: Any = None,
    max_model_len: int | None = None,
    overlap: bool = True,
    jump_forward: str = "auto",
    clock: Callable[[], float] = time.monotonic,
    **limits: int | bool,
) -> Engine:
    """Returns an engine with its own scheduler, queue and metrics over the compiled steps and the
    pages of `built`, which must not run meanwhile. `limits` are SchedulerConfig's; they can only
    shrink, as the steps hold any smaller number of rows, tokens and pages."""
    base, model_limits = built.scheduler.config, built.processor.limits
    config = dataclasses.replace(base, **limits)
    for name in ("num_pages", "max_num_seqs", "max_num_batched_tokens"):
        assert getattr(config, name) <= getattr(base, name), f"{name} is more than was built"
    scheduler = Scheduler(config)
    if max_model_len is not None:
        model_limits = dataclasses.replace(model_limits, max_model_len=max_model_len)
    return Engine(
        processor=InputProcessor(
            built.tokenizer,
            chat_template_of(built.tokenizer),
            model_limits,
            scheduler.why_too_large,
            clock,
            new_matcher=built.processor._new_matcher,
        ),
        scheduler=scheduler,
        packer=Packer(config, built._packer.buckets),
        runner=runner or built._runner,
        metrics=EngineMetrics(),
        overlap=overlap,
        jump_forward=jump_forward,
        clock=clock,
    )


def arranged(
    kind: str = "random", *, role: str = "tested", jump_forward: str = "always", **settings: Any
) -> Engine:
    """Returns a fresh engine over a tiny model; `settings` are those of `rearranged`.

    It takes the device's pages over from the engine before it of the same model and role, which
    must not run again.
    """
    built = _built(kind, role)
    runner = _Turn(built)
    return rearranged(built, runner=runner, jump_forward=jump_forward, **settings)


def generate(engine: Engine, prompts, params=GREEDY) -> list[RequestOutput]:
    """What the offline API gives on `engine`, which stays open."""
    return LLM.from_engine(engine).generate(prompts, params)


def outcomes(engine: Engine, messages: Iterable[GenerateRequest]) -> list[Any]:
    """Runs all at once; per message its embedding, its token ids, or the error that ended it."""
    ids = [engine.add(message) for message in messages]
    found: dict[str, Any] = {request_id: [] for request_id in ids}
    while engine.has_work:
        for update in engine.step():
            if update.error is not None:
                found[update.request_id] = update.error
            elif update.embedding is not None:
                assert (update.token_ids, update.finish_reason) == ((), "stop")
                found[update.request_id] = update.embedding
            else:
                found[update.request_id] += update.token_ids
            assert all(0 <= token_id < VOCAB for token_id in update.token_ids)
            assert all(math.isfinite(entry.logprob) for entry in update.logprobs)
    return [found[request_id] for request_id in ids]


def fail_on(engine: Engine, is_bad: Callable[[PackedBatch], bool]) -> None:
    """From now on a step that is bad breaks the device."""
    dispatch = engine._runner.dispatch

    def failing(batch: PackedBatch) -> StepHandle:
        if is_bad(batch):
            raise RuntimeError("the device is lost")
        return dispatch(batch)

    engine._runner.dispatch = failing


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def alone(prompt, params=GREEDY, kind: str = "random") -> list[int]:
    """The tokens of a prompt that has another engine to itself."""
    return tokens_of(generate(reference(kind), [prompt], params))[0]


def reference(kind: str = "random") -> Engine:
    """Returns a fresh engine that shares nothing with those under test."""
    return arranged(kind, role="reference", enable_prefix_cache=False)


def greedy(max_tokens: int, **fields) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **fields)


def prompt_of(length: int, start: int = 0) -> list[int]:
    """Token ids without a pattern; prompts of different `start` share no prefix."""
    return [(start * 101 + 7 * i + i * i // 3) % 250 for i in range(1, length + 1)]


def value(engine: Engine, name: str, **labels: str) -> float | None:
    return engine.metrics.registry.get_sample_value(f"jserve_{name}", labels)


def assert_balanced(engine: Engine) -> None:
    """Check B of the fault reports: when idle, nothing runs or waits, and all pages are there."""
    engine.scheduler.check_integrity()
    stats = engine.stats()
    assert [stats[n] for n in ("running", "waiting", "pages_used", "live_tokens")] == [0] * 4
    assert stats["pages_free"] + stats["pages_cached"] == engine.scheduler.pool.num_usable
    assert value(engine, "requests_running") == value(engine, "requests_waiting") == 0
    assert value(engine, "kv_pages", state="used") == value(engine, "live_tokens") == 0


async def idle(engine: Engine) -> None:
    """Returns when the engine, in its thread, has nothing left to do."""
    await until(lambda: not engine.has_work)


@asynccontextmanager
async def serving_real(
    engine: Engine, *, max_unread_updates: int = 4096, **settings: object
) -> AsyncIterator[Served]:
    """A real gRPC server over `engine` in its thread; at the end all must have been given back."""
    front = AsyncEngine(engine, max_unread_updates=max_unread_updates)
    try:
        async with serving(front, **settings) as served:
            yield served
            await idle(engine)
    finally:
        await front.drain(0)
    assert_balanced(engine)
