"""Checks a request and turns it into what the scheduler and the detokeniser need: the one
validation behind every front end. Knows the model's limits, not the queue."""

from __future__ import annotations

import math
import random
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any
from uuid import uuid4

from jserve.engine.chat_input import ChatInput
from jserve.engine.constraint import Constraint, Matcher
from jserve.engine.pooling import check_pooling
from jserve.engine.prompt_input import ModelLimits, PromptInput
from jserve.engine.sampling_checks import check_min_tokens, check_token_ids
from jserve.errors import InvalidRequest, UnknownModel
from jserve.messages import GenerateRequest
from jserve.sampling_params import SamplingParams
from jserve.structured import StructuredOutput
from jserve.text.chat import ChatTemplate
from jserve.text.detokenizer import Detokenizer
from jserve.text.tokenizer import Tokenizer
from scheduler.config import RequestClass
from scheduler.request import Request, SamplingView

MAX_ID_CHARS = 256
MAX_TIMEOUT_S = 1e9  # some thirty years


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """One choice of a request that passed every check, ready to be queued."""

    request: Request
    sampling: SamplingParams
    detokenizer: Detokenizer
    constraint: Constraint | None = None
    index: int = 0
    siblings: tuple[PreparedRequest, ...] = ()  # the other choices, of choice 0

    @property
    def choices(self) -> tuple[PreparedRequest, ...]:
        return (self, *self.siblings)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that wait while none of the choices has started."""
        return self.request.num_prompt_tokens * len(self.choices)


class InputProcessor:
    """Prepares requests. Safe to call from any thread.

    Args:
      why_too_large: says why a number of tokens can never fit the KV pool, or None.
      classes: those that a request may name.
      queue_timeout_s: longest that any request waits before it starts; 0: no bound.
      new_matcher: compiles a grammar, at its first use, and begins an output of it.
      knows_grammar: says whether that would take no time.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate,
        limits: ModelLimits,
        why_too_large: Callable[[int], str | None],
        clock: Callable[[], float] = time.monotonic,
        *,
        classes: Sequence[RequestClass] = (),
        queue_timeout_s: float = 0.0,
        new_matcher: Callable[[StructuredOutput], Matcher] | None = None,
        knows_grammar: Callable[[StructuredOutput], bool] = lambda structured: False,
    ) -> None:
        self.limits = limits
        self.tokenizer = tokenizer
        self._classes = {"": RequestClass(name=""), **{c.name: c for c in classes}}
        self._queue_timeout_s = queue_timeout_s or math.inf
        self.chat = ChatInput(tokenizer, chat_template, limits.max_model_len)
        self.prompts = PromptInput(tokenizer, self.chat, limits)
        self._why_too_large = why_too_large
        self.clock = clock
        self.knows_grammar = knows_grammar
        self._new_matcher = new_matcher

    def prepare(
        self, message: GenerateRequest, arrival_time: float | None = None
    ) -> PreparedRequest:
        """Returns the request to queue, which came at `arrival_time`, by default now.

        Raises:
          InvalidRequest: naming the field, its value and what is legal.
        """
        now = self.clock() if arrival_time is None else arrival_time
        request_id = self._checked_fields(message)
        message, prompt = self._with_prompt(message)
        sampling = message.sampling
        view = (
            self._pooling_view(message, len(prompt))
            if message.pooling
            else self._view(sampling, len(prompt))
        )
        check_min_tokens(sampling, view.max_tokens)
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling=view,
            priority=message.priority + self._classes[message.request_class].priority,
            tenant=message.identity or message.tenant,
            request_class=message.request_class,
            arrival_time=now,
            deadline=None if message.timeout_s is None else now + message.timeout_s,
            queue_deadline=self._queue_deadline(message, now),
            cache_keys=_cache_keys(message),
        )
        constraint = self._constraint(sampling, view)
        matcher = self._matcher(sampling.structured)
        requests = [request]
        for index in range(1, sampling.best_of or sampling.n):
            requests.append(_sibling(request, index, _seed32(sampling.seed, index)))
        first, *siblings = (
            self._choice(request, message, index, constraint and constraint.for_another(matcher))
            for index, request in enumerate(requests)
        )
        return replace(first, siblings=tuple(siblings))

    def _view(self, sampling: SamplingParams, num_prompt: int) -> SamplingView:
        """What the scheduler and the sampler need to know of the settings."""
        stop_ids = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_ids.update(self.limits.eos_token_ids)
        is_constrained = (
            sampling.structured is not None
            or sampling.allowed_token_ids is not None
            or bool(sampling.bad_words)
            or sampling.min_tokens > 0
        )
        num_logprobs = -1 if sampling.logprobs is None else sampling.logprobs
        if sampling.best_of is not None:
            num_logprobs = max(num_logprobs, 0)  # it goes by them
        return SamplingView(
            max_tokens=self._max_tokens(num_prompt, sampling.max_tokens),
            stop_token_ids=frozenset(stop_ids),
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=sampling.logit_bias,  # type: ignore[arg-type]  # pairs, once checked
            is_constrained=is_constrained,
            seed=_seed32(sampling.seed),
            num_logprobs=num_logprobs,
            num_prompt_logprobs=-1
            if sampling.prompt_logprobs is None
            else sampling.prompt_logprobs,
        )

    def _pooling_view(self, message: GenerateRequest, num_prompt: int) -> SamplingView:
        """The same of a request for an embedding: its prompt is computed, and nothing after it."""
        limit = self.limits.max_model_len
        if num_prompt > limit:
            raise InvalidRequest(
                f"the prompt has {num_prompt} tokens; an embedding's may have max_model_len={limit}"
            )
        if why := self._why_too_large(num_prompt):
            raise InvalidRequest(f"the request can never run: {why}")
        return SamplingView(max_tokens=0, pooling=message.pooling)

    def _choice(
        self, request: Request, message: GenerateRequest, index: int, constraint: Constraint | None
    ) -> PreparedRequest:
        sampling = message.sampling
        detokenizer = Detokenizer(
            self.tokenizer,
            request.prompt_token_ids,
            stop=sampling.stop,
            skip_special_tokens=sampling.skip_special_tokens,
            keep=self.chat.kept_ids(message),
            include_stop_str=sampling.include_stop_str,
            min_tokens=sampling.min_tokens,
        )
        return PreparedRequest(request, sampling, detokenizer, constraint, index)

    def _matcher(self, structured: StructuredOutput | None) -> Matcher | None:
        if structured is None:
            return None
        if self._new_matcher is None or not self.limits.eos_token_ids:
            raise InvalidRequest(
                "structured output needs a model with an EOS token; leave the grammar out"
            )
        return self._new_matcher(structured)

    def _constraint(self, sampling: SamplingParams, view: SamplingView) -> Constraint | None:
        """What all choices of a request are limited to, but for the grammar."""
        if not view.is_constrained:
            return None
        vocab_size = self.limits.vocab_size
        return Constraint(
            vocab_size,
            allowed_token_ids=sampling.allowed_token_ids,
            bad_word_ids=self._bad_word_ids(sampling.bad_words),
            min_tokens=sampling.min_tokens,
            stop_token_ids=[i for i in view.stop_token_ids if i < vocab_size],
        )

    def _bad_word_ids(self, words: Sequence[str | tuple[int, ...]]) -> list[tuple[int, ...]]:
        """The token sequences of bad words: a text as it is and behind a space. Those with a token
        that the model lacks cannot come anyway."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            if not isinstance(word, str):
                found[word] = None
                continue
            for text in (word, " " + word.lstrip()):
                found[tuple(self.tokenizer.encode(text, add_special_tokens=False))] = None
        return [ids for ids in found if ids and max(ids) < self.limits.vocab_size]

    def _checked_fields(self, message: GenerateRequest) -> str:
        if message.model not in ("", self.limits.name):
            raise UnknownModel(
                f"model={message.model!r} is not served here; use {self.limits.name!r}"
            )
        if message.pooling != "":
            check_pooling(message)
        priority = message.priority
        if isinstance(priority, bool) or not isinstance(priority, Integral):
            raise InvalidRequest(f"{priority=} is not an integer")
        if abs(priority) >= 2**31:
            raise InvalidRequest(f"{priority=} is out of range; use a 32-bit integer")
        for name in ("tenant", "identity"):
            text = getattr(message, name)
            if not isinstance(text, str) or len(text) > MAX_ID_CHARS:
                raise InvalidRequest(
                    f"{name} must be a string of at most {MAX_ID_CHARS} characters"
                )
        known = [name for name in self._classes if name]
        if not isinstance(message.request_class, str) or message.request_class not in self._classes:
            raise InvalidRequest(
                f"request_class={message.request_class!r} is not known here; use "
                f"{' or '.join(known) if known else 'none: the engine has no classes'}"
            )
        _check_seconds("timeout_s", message.timeout_s)
        _check_seconds("queue_timeout_s", message.queue_timeout_s)
        request_id = message.request_id
        if request_id is None:
            return uuid4().hex
        if not isinstance(request_id, str) or not 0 < len(request_id) <= MAX_ID_CHARS:
            raise InvalidRequest(f"request_id must have 1 to {MAX_ID_CHARS} characters")
        return request_id

    def _queue_deadline(self, message: GenerateRequest, now: float) -> float | None:
        longest = min(self._queue_timeout_s, message.queue_timeout_s or math.inf)
        return None if longest == math.inf else now + longest

    def _with_prompt(self, message: GenerateRequest) -> tuple[GenerateRequest, list[int]]:
        """The request, as the model's template and vocabulary have it, and its prompt's ids."""
        prompt = self.prompts.token_ids(message)
        sampling = message.sampling
        check_token_ids(sampling, self.limits.vocab_size)
        form = self.chat.form(message, prompt)
        if form is not sampling.structured:
            sampling = replace(sampling, structured=form)
        return replace(message, sampling=sampling), prompt

    def _max_tokens(self, num_prompt: int, asked: int | None) -> int:
        """The tokens to generate; all that fit when none are asked for."""
        limit = self.limits.max_model_len
        room = limit - num_prompt
        if room < 1:
            raise InvalidRequest(
                f"the prompt has {num_prompt} tokens; with at least one to generate the limit is "
                f"max_model_len={limit}: use at most {limit - 1}"
            )
        if asked is None:
            too_large = lambda n: self._why_too_large(num_prompt + n) is not None  # noqa: E731
            asked = max(bisect_left(range(1, room + 1), True, key=too_large), 1)
        elif asked > room:
            raise InvalidRequest(
                f"max_tokens={asked} and {num_prompt} prompt tokens exceed max_model_len={limit}; "
                f"use max_tokens of at most {room}"
            )
        why = self._why_too_large(num_prompt + asked)
        if why:
            raise InvalidRequest(f"the request can never run: {why}")
        return asked


def _check_seconds(name: str, value: Any) -> None:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 < value <= MAX_TIMEOUT_S):
        raise InvalidRequest(
            f"{name}={value!r} is not a number of seconds above 0, at most {MAX_TIMEOUT_S:g}"
        )


def _cache_keys(message: GenerateRequest) -> tuple[tuple[str, str], ...]:
    """What a cached prefix must share. The identity leads: a caller may divide what is its own,
    and can name nothing that reaches another's."""
    keys = (("identity", message.identity), ("tenant", message.tenant))
    return tuple(key for key in keys if key[1])


def _sibling(request: Request, index: int, seed: int) -> Request:
    """Another choice of the same request; its prompt is shared, not copied. The request has started
    with its first choice, so that this one may wait for a place."""
    return replace(
        request,
        request_id=f"{request.request_id}#{index}",
        sampling=replace(request.sampling, seed=seed, num_prompt_logprobs=-1),
        queue_deadline=None,
        output_token_ids=[],
    )


def _seed32(seed: int | None, index: int = 0) -> int:
    """Folds a choice's 64-bit seed into 32 bits, small ones as they are; draws one where none is
    given."""
    if seed is None:
        return random.getrandbits(32)
    seed += index
    return (seed ^ (seed >> 32) * 0x9E3779B1) & 0xFFFFFFFF  # odd, so that no two halves cancel


def reason_name(reason: Any) -> str:
    """The name of a FinishReason in messages and metrics."""
    return reason.name.lower()
