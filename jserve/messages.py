"""What crosses between front ends and the engine: a request in, updates out; no transport."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jserve.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """What every front end turns its message into. Exactly one of the three inputs is given.

    Attributes:
      prompt: text; the tokenizer adds the model's BOS where the model wants one.
      prompt_token_ids: ids, taken as they are.
      messages: chat turns ({"role": ..., "content": ...}), rendered with the model's template.
      tools: with messages, the functions that the model may call, as in OpenAI's API.
      tool_choice: "auto", "none", "required", or the object that names a function, likewise.
      add_generation_prompt: with messages, the prompt ends with the head of the answer's turn.
      continue_final_message: the answer goes on with the last message instead of a new turn.
      template_args: with messages, further variables of the template, such as enable_thinking.
      pooling: "last" or "mean": instead of text, the prompt's embedding, from the hidden state of
        its last token or the mean over all of them.
      request_id: the caller's name for it, unique among live requests; None draws one.
      model: the name the caller expects to be served; "" is any.
      priority: lower is served first; added to that of its class.
      request_class: one of the engine's classes; "" is none.
      tenant: requests of different tenants share no cached prefix.
      identity: who the front end has authenticated, never what the caller says; "" is nobody. It
        is the tenant then, and `tenant` only divides what it has in the prefix cache.
      timeout_s: give up this many seconds after submission; None never.
      queue_timeout_s: the same, if it has not started by then.
    """

    prompt: str | None = None
    prompt_token_ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: str | Mapping[str, Any] = "auto"
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_args: Mapping[str, Any] | None = None
    pooling: str = ""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    request_id: str | None = None
    model: str = ""
    priority: int = 0
    request_class: str = ""
    tenant: str = ""
    identity: str = ""
    timeout_s: float | None = None
    queue_timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, natural logarithm: of the model's own distribution, or
    with --logprobs_mode=processed of the one that was drawn from."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # best first; entry i has rank i + 1
    rank: int = 0  # of the token: 1 is the most likely one


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # of the prompt, found in the prefix cache

    @classmethod
    def of_choices(cls, usages: Iterable[Usage]) -> Usage:
        """Returns that of a whole request: its choices, of which there is at least one, share the
        prompt."""
        first, *others = usages
        num_output = first.completion_tokens + sum(other.completion_tokens for other in others)
        return cls(first.prompt_tokens, num_output, first.cached_tokens)

    @classmethod
    def total(cls, usages: Iterable[Usage]) -> Usage:
        """Returns that of several requests."""
        counts = [(u.prompt_tokens, u.completion_tokens, u.cached_tokens) for u in usages]
        return cls(*map(sum, zip(*counts, strict=True)))


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds. ITL is the mean gap between output tokens; None with fewer than two."""

    queue_s: float
    ttft_s: float | None
    e2e_s: float
    itl_s: float | None


@dataclass(slots=True, kw_only=True)  # frozen would take 4 times as long to make, once per token
class RequestUpdate:
    """New output of one choice of a request, which nobody changes once it is made. The last one of
    each choice has finish_reason, usage (of that choice) and timings.

    `text` and `token_ids` are deltas: joined, they are the whole output. Text may lag behind the
    ids while a character or a possible stop string is incomplete.
    finish_reason is "stop", "length", "abort", "deadline" or "error".
    stop_reason is the stop string or stop token id that ended it, if one did.
    embedding f32[D], of length 1, comes with the one update of a request with pooling.
    """

    request_id: str
    index: int = 0  # of the choice, below n
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()  # with the first update only
    # With the first update of choice 0, where asked for; None for the first token.
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    embedding: np.ndarray | None = field(default=None, compare=False)
    finish_reason: str | None = None
    num_live_choices: int = 0  # with finish_reason: other choices that have not ended
    stop_reason: str | int | None = None
    error: Exception | None = None  # with finish_reason "error" or "deadline"
    usage: Usage | None = None
    timings: Timings | None = None

    @property
    def is_last(self) -> bool:
        """Whether the request has ended, with all of its choices."""
        return self.finish_reason is not None and not self.num_live_choices


def joined(updates: Iterable[RequestUpdate]) -> list[RequestUpdate]:
    """Returns one update for each choice, in order of index, that holds all that the `updates` of
    one request hold of it."""
    parts: dict[int, list[RequestUpdate]] = {}
    for update in updates:
        parts.setdefault(update.index, []).append(update)
    return [replace(_merged_choice(parts[i]), num_live_choices=0) for i in sorted(parts)]


def merged(updates: Iterable[RequestUpdate]) -> list[RequestUpdate]:
    """Returns what consecutive `updates` of one request say as one update for each choice, that of
    the newest last: of those that end a choice, the order stays. An error comes by itself."""
    parts: dict[tuple[int, bool], list[RequestUpdate]] = {}
    for update in updates:
        key = update.index, update.error is not None
        of_choice = parts.pop(key, [])
        of_choice.append(update)
        parts[key] = of_choice
    return [p[0] if len(p) == 1 else _merged_choice(p) for p in parts.values()]


def _merged_choice(parts: Sequence[RequestUpdate]) -> RequestUpdate:
    return replace(
        parts[-1],
        text="".join(p.text for p in parts),
        token_ids=tuple(i for p in parts for i in p.token_ids),
        logprobs=tuple(e for p in parts for e in p.logprobs),
        prompt_token_ids=parts[0].prompt_token_ids,
        prompt_logprobs=parts[0].prompt_logprobs,
    )
