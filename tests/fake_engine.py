"""An engine without a model, with the contract of jserve/engine/engine.py: one character is one
token, and an answer is the prompt reversed and repeated; that of choice 1 begins with its second
character, and so on. Knows no device."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from jserve.engine.prompt_input import ModelLimits
from jserve.errors import DeadlineExceeded, EngineDead, InvalidRequest, JserveError, Overloaded
from jserve.messages import GenerateRequest, RequestUpdate, Timings, TokenLogprobs, Usage
from jserve.text.output_formats import OutputFormats, ToolCallFormat
from jserve.text.tool_calls import OutputParser, output_parser
from jserve.text.tools import forced_tools

VOCAB_SIZE = 128  # ASCII
SPLIT_CHARACTER = 127  # stands for half of an emoji
SPECIAL_CHARACTER = 1


class FakeTokenizer:
    vocab_size = VOCAB_SIZE
    special_token_ids = frozenset({SPECIAL_CHARACTER})
    strips_first_space = False
    chat_template: str | None = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))

    def special_spans(self, text: str) -> list[tuple[int, int, int]]:
        return []

    def token_bytes(self, token_id: int) -> bytes:
        return b"\xf0\x9f" if token_id == SPLIT_CHARACTER else bytes([token_id])


@dataclass
class _Running:
    request_id: str
    request: GenerateRequest
    prompt: list[int]
    max_tokens: int
    num_steps: int = 0
    live_choices: list[int] = field(default_factory=list)


class FakeChat:
    """Calls as Hermes writes them."""

    def encode(self, request: GenerateRequest) -> list[int]:
        assert request.messages is not None
        text = "".join(f"{m['role']}:{m['content']};" for m in request.messages)
        return FakeTokenizer().encode(text)

    def form(self, request: GenerateRequest, prompt: Sequence[int]) -> None:
        forced_tools(request.tools, request.tool_choice)

    def parser(self, request: GenerateRequest, prompt: Sequence[int]) -> OutputParser:
        formats = OutputFormats(ToolCallFormat.HERMES, ("<think>", "</think>"))
        return output_parser(formats, tools=request.tools, tool_choice=request.tool_choice)


class FakeProcessor:
    """Checks a request and returns its prompt's token ids."""

    tokenizer = FakeTokenizer()
    chat = FakeChat()

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self.limits = ModelLimits("fake", VOCAB_SIZE, max_model_len, ())
        self.prompts = self

    def check_length(self, text: str) -> None:
        pass

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
            return self.chat.encode(request)
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
        self.fail_choice: int | None = None
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
        choices = list(range(request.sampling.n))
        self._requests.append(_Running(request_id, request, prompt, limit, 0, choices))
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
        updates = [update for row in rows for update in self._advance(row)]
        ended = {u.request_id for u in updates if u.is_last}
        self._requests = deque(r for r in self._requests if r.request_id not in ended)
        return updates

    def _advance(self, row: _Running) -> list[RequestUpdate]:
        row.num_steps += 1
        return [self._advance_choice(row, index) for index in list(row.live_choices)]

    def _advance_choice(self, row: _Running, index: int) -> RequestUpdate:
        token = row.prompt[-1 - (row.num_steps - 1 + index) % len(row.prompt)]
        first = row.num_steps == 1 and index == 0
        sampling = row.request.sampling
        stopped = chr(token) in sampling.stop
        if row.request.timeout_s is not None and row.num_steps > 1:
            late = DeadlineExceeded(f"took longer than {row.request.timeout_s:g} s")
            return self._failed(row, index, "deadline", late)
        if row.request.tenant == "cursed":
            return self._failed(row, index, "error", RuntimeError("bad page"))
        if index == self.fail_choice:
            return self._failed(row, index, "error", JserveError("the logits are not a number"))
        last = stopped or row.num_steps == row.max_tokens
        if last:
            row.live_choices.remove(index)
        n = sampling.logprobs
        return RequestUpdate(
            request_id=row.request_id,
            index=index,
            text="" if stopped else chr(token),
            token_ids=(token,),
            logprobs=() if n is None else (TokenLogprobs(token, -0.5, ((token, -0.5),) * n, 1),),
            prompt_token_ids=tuple(row.prompt) if first else (),
            prompt_logprobs=_prompt_logprobs(row) if first else (),
            finish_reason=("stop" if stopped else "length") if last else None,
            num_live_choices=len(row.live_choices) if last else 0,
            stop_reason=chr(token) if stopped else None,
            usage=Usage(len(row.prompt), row.num_steps, 0) if last else None,
            timings=Timings(0.001, 0.002, 0.003, 0.0005) if last else None,
        )

    def _failed(self, row: _Running, index: int, reason: str, error: Exception) -> RequestUpdate:
        row.live_choices.remove(index)
        return RequestUpdate(
            request_id=row.request_id,
            index=index,
            finish_reason=reason,
            num_live_choices=len(row.live_choices),
            error=error,
        )

    def stats(self) -> dict[str, int]:
        return {"running": len(self._requests)}

    def close(self) -> None:
        self.closed = True


def _prompt_logprobs(row: _Running) -> tuple[TokenLogprobs | None, ...]:
    n = row.request.sampling.prompt_logprobs
    if n is None:
        return ()
    return (None, *(TokenLogprobs(i, -1.5, ((0, -0.5),) * n, 3) for i in row.prompt[1:]))


def answer(prompt: str, num_tokens: int, index: int = 0) -> str:
    """What FakeEngine says to `prompt`."""
    return "".join(prompt[-1 - (i + index) % len(prompt)] for i in range(num_tokens))
