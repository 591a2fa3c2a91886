"""The real engine, scheduler, packer and tokenizer over the fake runner of tests/fakes.py: one byte
is one token, and a step takes microseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from jserve.engine.engine import Engine
from jserve.engine.input_processor import InputProcessor
from jserve.engine.metrics import EngineMetrics
from jserve.engine.prompt_input import ModelLimits
from jserve.engine.request_log import RequestLog
from jserve.engine.step_log import StepLog
from jserve.messages import GenerateRequest, RequestUpdate
from jserve.sampling_params import SamplingParams
from jserve.text.chat import chat_template_of
from jserve.text.tokenizer import BYTE_ALPHABET, Tokenizer
from scheduler.bucket import make_buckets
from scheduler.config import SchedulerConfig
from scheduler.packer import PackedBatch, Packer
from scheduler.scheduler import Scheduler
from tests.fakes import VOCAB, FakeRunner, expected_output

MAX_MODEL_LEN = 64
PAGE_SIZE = 4
REQUEST_FIELDS = (
    *("tenant", "identity", "request_class", "priority", "model", "timeout_s", "queue_timeout_s"),
)
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def byte_tokenizer() -> Tokenizer:
    """A byte-level vocabulary in which each byte's id is its value."""
    backend = Backend(models.BPE({char: byte for char, byte in BYTE_ALPHABET.items()}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, chat_template=CHAT_TEMPLATE)


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class StepOutput(NamedTuple):
    token_ids: np.ndarray
    logprobs: None = None
    prompt_logprobs: tuple[()] = ()
    row_sums: np.ndarray | None = None


class Handle:
    def __init__(self, device: FakeDevice, number: int, token_ids: np.ndarray) -> None:
        self._device, self._number, self._token_ids = device, number, token_ids

    def result(self) -> StepOutput:
        self._device.events.append(("collect", self._number))
        self._device.on_collect()
        return StepOutput(self._token_ids)


class FakeDevice(FakeRunner):
    """The fake runner with the engine's interface. From step `fail_at` on it is lost for good;
    `on_dispatch` and `on_collect` may raise too."""

    def __init__(self, config: SchedulerConfig, fail_at: int | None) -> None:
        super().__init__(config)
        self.fail_at = fail_at
        self.events: list[tuple[str, int]] = []
        self.on_dispatch: Callable[[], None] = lambda: None
        self.on_collect: Callable[[], None] = lambda: None
        self.num_resets = 0

    def dispatch(self, batch: PackedBatch) -> Handle:
        number = self.num_steps
        if number == self.fail_at:
            raise RuntimeError("the device is lost")
        self.on_dispatch()
        self.events.append(("dispatch", number))
        return Handle(self, number, self.run(batch))

    def choose(self, handle: Handle, allowed: np.ndarray | None = None) -> None:
        """The fake model chooses as it computes, and has no logits to mask."""

    def reset(self) -> None:
        if self.num_steps == self.fail_at:
            raise RuntimeError("the device is lost")
        self.num_resets += 1
        self.forget()


@dataclass
class Tiny:
    """An engine with the parts that tests look at."""

    engine: Engine
    device: FakeDevice
    clock: Clock

    def value(self, name: str, **labels: str) -> float | None:
        return self.engine.metrics.registry.get_sample_value(f"jserve_{name}", labels)

    def assert_idle(self) -> None:
        """Nothing runs, waits or holds a page, and the gauges say so."""
        self.engine.scheduler.check_integrity()
        stats = self.engine.stats()
        assert not self.engine.has_work
        assert [stats[n] for n in ("running", "waiting", "pages_used", "live_tokens")] == [0] * 4
        assert self.value("requests_running") == self.value("requests_waiting") == 0
        assert self.value("live_tokens") == self.value("kv_pages", state="used") == 0
        free = self.value("kv_pages", state="free") + self.value("kv_pages", state="cached")
        assert free == self.engine.scheduler.pool.num_usable


def tiny(
    *,
    overlap: bool = True,
    max_queued: int = 8,
    fail_at: int | None = None,
    eos: tuple[int, ...] = (),
    queue_timeout_s: float = 0.0,
    step_log: StepLog | None = None,
    request_log: RequestLog | None = None,
    **limits: Any,
) -> Tiny:
    """Returns an engine of 4 slots and 63 pages of 4 tokens; `limits` are SchedulerConfig's."""
    given = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "prefill_chunk": 8,
        "page_size": PAGE_SIZE,
        "num_pages": 64,
        "max_model_len": MAX_MODEL_LEN,
        "max_queued_requests": max_queued,
    } | limits
    config = SchedulerConfig(**given)
    clock, scheduler, tokenizer = Clock(), Scheduler(config), byte_tokenizer()
    device = FakeDevice(config, fail_at)
    processor = InputProcessor(
        tokenizer,
        chat_template_of(tokenizer),
        ModelLimits("tiny", VOCAB, MAX_MODEL_LEN, eos),
        scheduler.why_too_large,
        clock,
        classes=config.classes,
        queue_timeout_s=queue_timeout_s,
    )
    buckets = make_buckets(config.max_num_seqs, config.max_num_batched_tokens)
    engine = Engine(
        processor=processor,
        scheduler=scheduler,
        packer=Packer(config, buckets),
        runner=device,
        metrics=EngineMetrics(),
        overlap=overlap,
        clock=clock,
        step_log=step_log,
        request_log=request_log,
    )
    return Tiny(engine, device, clock)


def asking(name: str, prompt: list[int], max_tokens: int = 8, **fields) -> GenerateRequest:
    """A greedy request; `fields` are SamplingParams' or GenerateRequest's."""
    own = {n: fields.pop(n) for n in REQUEST_FIELDS if n in fields}
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, **fields)
    return GenerateRequest(prompt_token_ids=prompt, sampling=sampling, request_id=name, **own)


def answer(request: GenerateRequest) -> list[int]:
    """What the fake model says to a request that nothing but max_tokens ends."""
    return expected_output(request.prompt_token_ids, request.sampling.max_tokens)


@dataclass
class Output:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)
    last: RequestUpdate | None = None


def joined(updates: Iterable[RequestUpdate]) -> dict[str, Output]:
    """Joins the updates by request; none may come after a request's last one."""
    outputs: dict[str, Output] = {}
    for update in updates:
        output = outputs.setdefault(update.request_id, Output())
        assert output.last is None, f"{update.request_id}: an update after the last one"
        output.text += update.text
        output.token_ids += update.token_ids
        output.prompt_token_ids += update.prompt_token_ids
        if update.finish_reason is not None:
            output.last = update
    return outputs


def run(engine: Engine, max_turns: int = 2000) -> list[RequestUpdate]:
    """Turns the crank until nothing is left to do."""
    updates = []
    for _ in range(max_turns):
        if not engine.has_work:
            return updates
        updates += engine.step()
    raise AssertionError(f"still busy after {max_turns} turns: {engine.stats()}")


def fail_once(t: Tiny, where: str, at: int) -> None:
    """Lets the device fail at its event number `at` of a kind."""
    events = []

    def on_event() -> None:
        events.append(1)
        if len(events) == at:
            raise RuntimeError("a cosmic ray")

    setattr(t.device, where, on_event)


def fail_with(t: Tiny, *names: str, after: int = 0) -> None:
    """Lets all steps fail that hold one of these requests, once it has so many tokens."""

    def on_dispatch() -> None:
        for request in t.engine._newest_plan.requests:
            if request.request_id in names and len(request.output_token_ids) >= after:
                raise RuntimeError(f"the device cannot do {request.request_id}")

    t.device.on_dispatch = on_dispatch


def requests(count: int = 6):
    return [asking(f"r{i}", [(7 * i + j) % 90 for j in range(3 * i + 1)], 9) for i in range(count)]


def outputs_of(t: Tiny, asked) -> dict:
    for request in asked:
        t.engine.add(request)
    outputs = joined(run(t.engine))
    t.assert_idle()
    return outputs
