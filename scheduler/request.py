"""One request's life as the scheduler sees it. Knows token ids and counts: no text, no arrays on
devices, no clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from scheduler.kv_events import CacheKeys, token_bytes
from scheduler.prefix_cache import Node


class RequestStatus(IntEnum):
    """Where a request is in its life."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2  # waiting again, its tokens to recompute or to swap in
    FINISHED = 3


class FinishReason(IntEnum):
    """Why a request ended."""

    STOP = 0  # a stop token, an EOS id, or a stop string
    LENGTH = 1  # max_tokens or the model's length limit
    ABORT = 2  # the client left
    DEADLINE = 3
    ERROR = 4


BAD_TOKEN = -1  # what a step gives for a row whose logits are not numbers, or exclude every token


@dataclass(frozen=True, slots=True)
class SamplingView:
    """The part of a request's sampling settings that scheduling and packing need."""

    max_tokens: int  # resolved: always fits the model's length limit; 0 with pooling
    stop_token_ids: frozenset[int] = frozenset()  # EOS ids included unless they are ignored
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # uint32
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    is_constrained: bool = False  # a mask of allowed tokens comes with each of its steps
    num_logprobs: int = -1  # -1: none
    num_prompt_logprobs: int = -1  # likewise, of the prompt's tokens
    pooling: str = ""  # "last" or "mean": of the prompt's hidden states, instead of tokens

    @property
    def has_penalties(self) -> bool:
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether all of the prompt has to be computed, as something is wanted of each token."""
        return self.num_prompt_logprobs >= 0 or self.pooling == "mean"


@dataclass(eq=False, slots=True)
class Request:
    """A request and what is kept of it wherever it is; what changes with each step is in Slots.

    Times are seconds of one monotonic clock. The prompt may be any sequence of ids, an array too;
    it is not copied.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingView
    priority: int = 0  # lower is served first
    tenant: str = ""
    request_class: str = ""  # the name of one of SchedulerConfig.classes, or ""
    arrival_time: float = 0.0
    deadline: float | None = None  # absolute, on the same clock
    queue_deadline: float | None = None  # the same, for what has not started by then
    cache_keys: CacheKeys = ()  # tagged: ("tenant", salt), ("adapter", id)

    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    output_token_ids: list[int] = field(default_factory=list)
    num_output_tokens: int = 0  # collected; of a simulation, brought up to date on leaving a slot
    num_inflight_tokens: int = 0  # while preempted: sampled by steps not collected yet
    slot: int = -1
    prefix: Node | None = None  # what it locks of the prefix cache
    num_prefix_pages: int = 0  # its leading pages, which belong to the prefix cache
    host_pages: np.ndarray | None = None  # where its pages were swapped out to, i32[n]
    num_swapped_tokens: int = 0  # tokens whose KV they hold
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    num_preemptions: int = 0
    first_scheduled_time: float | None = None
    _prompt_bytes: bytes | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known to the host, plus those in flight of a preempted one."""
        return len(self.prompt_token_ids) + self.num_output_tokens + self.num_inflight_tokens

    @property
    def num_known_tokens(self) -> int:
        """Tokens whose ids the host knows."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def token_ids(self) -> list[int]:
        """All ids that the host knows."""
        return [*self.prompt_token_ids, *self.output_token_ids]

    def ids_between(self, start: int, stop: int) -> Sequence[int]:
        """Returns the ids of tokens [start, stop), which the host must know."""
        num_prompt = len(self.prompt_token_ids)
        if stop <= num_prompt:
            return self.prompt_token_ids[start:stop]
        ids = self.output_token_ids[max(start - num_prompt, 0) : stop - num_prompt]
        return ids if start >= num_prompt else [*self.prompt_token_ids[start:], *ids]

    def cut(self, token_ids: Sequence[int]) -> tuple[list[int], FinishReason | None]:
        """Returns those of `token_ids` that its output may still take, up to a stop token or
        max_tokens, and why it ends with them, if it does."""
        room = self.sampling.max_tokens - len(self.output_token_ids)
        ids = list(token_ids[:room])
        for count, token_id in enumerate(ids, 1):
            if token_id in self.sampling.stop_token_ids:
                return ids[:count], FinishReason.STOP
        return ids, FinishReason.LENGTH if len(ids) == room else None

    def known_bytes(self) -> bytes:
        """Returns all known ids in the form that the prefix cache compares."""
        if self._prompt_bytes is None:
            self._prompt_bytes = token_bytes(self.prompt_token_ids)
        if not self.output_token_ids:
            return self._prompt_bytes
        return self._prompt_bytes + token_bytes(self.output_token_ids)

    @property
    def is_finished(self) -> bool:
        return self.status == RequestStatus.FINISHED
