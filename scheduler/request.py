"""One request's life as the scheduler sees it. Knows token ids and counts: no text, no arrays on
devices, no clients."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import IntEnum


class RequestStatus(IntEnum):
    """Where a request is in its life."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2  # waiting again, with all of its tokens to recompute
    FINISHED = 3


class FinishReason(IntEnum):
    """Why a request ended."""

    STOP = 0  # a stop token, an EOS id, or a stop string
    LENGTH = 1  # max_tokens or the model's length limit
    ABORT = 2  # the client left
    DEADLINE = 3
    ERROR = 4


@dataclass(frozen=True, slots=True)
class SamplingView:
    """The part of a request's sampling settings that scheduling and packing need."""

    max_tokens: int  # resolved: always fits the model's length limit
    stop_token_ids: frozenset[int] = frozenset()  # EOS ids included unless they are ignored
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # uint32
    num_logprobs: int = -1  # -1: none


@dataclass(eq=False, slots=True)
class Request:
    """A request and all of its scheduling state. Times are seconds of one monotonic clock."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingView
    priority: int = 0  # lower is served first
    tenant: str = ""
    request_class: str = ""  # the name of one of SchedulerConfig.classes, or ""
    arrival_time: float = 0.0
    deadline: float | None = None  # absolute, on the same clock
    queue_deadline: float | None = None  # the same, for what has not started by then
    cache_keys: tuple[tuple[str, Hashable], ...] = ()  # tagged: ("tenant", salt), ("adapter", id)

    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    token_ids: list[int] = field(default_factory=list)  # prompt, then what was generated
    num_computed_tokens: int = 0  # tokens whose KV is in pages, steps in flight included
    num_inflight_tokens: int = 0  # sampled by steps not collected yet; ids unknown to the host
    page_ids: list[int] = field(default_factory=list)
    page_digests: list[bytes] = field(default_factory=list)  # of the leading full pages
    num_cached_pages: int = 0  # leading pages already offered to the prefix cache
    slot: int = -1
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    num_preemptions: int = 0
    first_scheduled_time: float | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """All tokens that exist, those in flight included."""
        return len(self.token_ids) + self.num_inflight_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_finished(self) -> bool:
        return self.status == RequestStatus.FINISHED

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]
