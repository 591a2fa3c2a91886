"""An engine without a model, with the contract of jserve/engine/engine.py: one character is one
token, and an answer is the prompt reversed and repeated. Knows no device."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field

from jserve.errors import DeadlineExceeded, EngineDead, InvalidRequest, Overloaded
from jserve.messages import GenerateRequest, RequestUpdate, Timings, TokenLogprobs, Usage

VOCAB_SIZE = 128  # ASCII
SPLIT_CHARACTER = 127  # stands for half of an emoji


class FakeTokenizer:
    vocab_size = VOCAB_SIZE

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))

    def token_bytes(self, token_id: int) -> bytes:
        return b"\xf0\x9f" if token_id == SPLIT_CHARACTER else bytes([token_id])


@dataclass
class _Running:
    request_id: str
    request: GenerateRequest
    prompt: list[int]
    max_tokens: int
    generated: list[int] = field(default_factory=list)


class FakeProcessor:
    """Checks a request and returns its prompt's token ids."""

    tokenizer = FakeTokenizer()

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len

    def prepare(self, request: GenerateRequest) -> list[int]:
        if request.model not in ("", "fake"):
            raise InvalidRequest(f"model={request.model!r} is not served; use 'fake'")
        prompt = self._prompt_ids(request)
        if not prompt:
            raise InvalidRequest("the prompt is empty; give at least one token")
        if len(prompt) >= self.max_model_len:
            raise InvalidRequest(
                f"the prompt has {len(prompt)} tokens; max_model_len={self.max_model_len} allows "
                f"{self.max_model_len - 1}"
            )
        if any(not 0 <= i < VOCAB_SIZE for i in prompt):
            raise InvalidRequest(f"prompt_token_ids must be in 0 to {VOCAB_SIZE - 1}")
        return prompt

    def _prompt_ids(self, request: GenerateRequest) -> list[int]:
        if request.messages is not None:
            text = "".join(f"{m['role']}:{m['content']};" for m in request.messages)
            return self.tokenizer.encode(text)
        if request.prompt is not None:
            return self.tokenizer.encode(request.prompt)
        return list(request.prompt_token_ids)


class FakeEngine:
    """Each step gives one token to each of the first `max_num_seqs` requests, in order.

    A request with a timeout meets its deadline at its second token; tenant "cursed" fails.
    """

    def __init__(self, max_num_seqs=4, max_queued_requests=8, max_model_len=64, **behaviour):
        self.max_num_seqs = max_num_seqs
        self.max_queued_requests = max_queued_requests
        self.processor = FakeProcessor(max_model_len)
        self.fail_after_steps = behaviour.pop("fail_after_steps", None)
        self.before_step = behaviour.pop("before_step", lambda: None)
        assert not behaviour
        self.num_steps = 0
        self.max_seen = 0
        self.added: list[GenerateRequest] = []
        self.closed = False
        self._ids = itertools.count()
        self._requests: deque[_Running] = deque()

    def add(self, request: GenerateRequest) -> str:
        if self.closed:
            raise EngineDead("the engine is closed")
        prompt = self.processor.prepare(request)
        if len(self._requests) >= self.max_num_seqs + self.max_queued_requests:
            raise Overloaded("the queue is full")
        room = self.processor.max_model_len - len(prompt)
        request_id = f"req-{next(self._ids)}"
        limit = min(request.sampling.max_tokens or room, room)
        self._requests.append(_Running(request_id, request, prompt, limit))
        self.added.append(request)
        self.max_seen = max(self.max_seen, len(self._requests))
        return request_id

    def abort(self, request_id: str) -> None:
        self._requests = deque(r for r in self._requests if r.request_id != request_id)

    @property
    def tokenizer(self) -> FakeTokenizer:
        return self.processor.tokenizer

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def idle_s(self) -> float:
        return 0.0

    def step(self) -> list[RequestUpdate]:
        self.before_step()
        self.num_steps += 1
        if self.fail_after_steps is not None and self.num_steps > self.fail_after_steps:
            raise EngineDead("the device is lost")
        rows = list(itertools.islice(self._requests, self.max_num_seqs))
        updates = [self._advance(row) for row in rows]
        ended = {u.request_id for u in updates if u.finish_reason}
        self._requests = deque(r for r in self._requests if r.request_id not in ended)
        return updates

    def _advance(self, row: _Running) -> RequestUpdate:
        token = row.prompt[-1 - len(row.generated) % len(row.prompt)]
        first = not row.generated
        row.generated.append(token)
        sampling = row.request.sampling
        stopped = chr(token) in sampling.stop
        if row.request.timeout_s is not None and len(row.generated) > 1:
            late = DeadlineExceeded(f"took longer than {row.request.timeout_s:g} s")
            return RequestUpdate(request_id=row.request_id, finish_reason="deadline", error=late)
        if row.request.tenant == "cursed":
            return RequestUpdate(
                request_id=row.request_id, finish_reason="error", error=RuntimeError("bad page")
            )
        last = stopped or len(row.generated) == row.max_tokens
        n = sampling.logprobs
        return RequestUpdate(
            request_id=row.request_id,
            text="" if stopped else chr(token),
            token_ids=(token,),
            logprobs=() if n is None else (TokenLogprobs(token, -0.5, ((token, -0.5),) * n),),
            prompt_token_ids=tuple(row.prompt) if first else (),
            finish_reason=("stop" if stopped else "length") if last else None,
            stop_reason=chr(token) if stopped else None,
            usage=Usage(len(row.prompt), len(row.generated), 0) if last else None,
            timings=Timings(0.001, 0.002, 0.003, 0.0005) if last else None,
        )

    def stats(self) -> dict[str, int]:
        return {"running": len(self._requests)}

    def close(self) -> None:
        self.closed = True


def answer(prompt: str, num_tokens: int) -> str:
    """What FakeEngine says to `prompt`."""
    return "".join(prompt[-1 - i % len(prompt)] for i in range(num_tokens))
