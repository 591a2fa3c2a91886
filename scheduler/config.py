"""The scheduler's own limits and targets. Knows numbers only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

BATCHINGS = ("continuous", "dynamic", "static")
POLICY_NAMES = ("fcfs", "priority", "sjf", "fair", "prefix")  # the keys of policy.POLICIES
NO_BOUND = 2**62


class LatencyTargets(NamedTuple):
    """Targets in seconds; 0: none."""

    ttft_s: float
    itl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestClass:
    """What is promised and allowed to one kind of request, such as interactive or batch.

    Attributes:
      name: what a request says it belongs to.
      priority: added to each request's own; lower is served first.
      max_num_seqs: most of this class that run at once; 0: no limit but the engine's.
      itl_slo_s: target for the time between tokens; 0: the engine's own.
      ttft_slo_s: target for the time to the first token; 0: the engine's own.
    """

    name: str
    priority: int = 0
    max_num_seqs: int = 0
    itl_slo_s: float = 0.0
    ttft_slo_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one engine.

    Attributes:
      max_num_seqs: slots: most requests that run at once.
      max_num_batched_tokens: most tokens of one step.
      prefill_chunk: most tokens of one prompt in one step.
      page_size: tokens per KV page.
      num_pages: pages of the pool, the null page, which is never handed out, included.
      max_model_len: most tokens of one request, prompt and output.
      enable_prefix_cache: keep full pages for prompts that begin alike.
      policy: who is admitted next, one of POLICY_NAMES.
      max_starvation_s: longest wait before a request comes first under any policy.
      tenant_weights: shares of policy "fair"; 1 for tenants that are not named.
      classes: what is promised and allowed to named kinds of requests.
      batching: "continuous"; "static": a group runs until its last request has ended; "dynamic":
        the same, but a group that is not full waits until its oldest has waited batch_window_s.
      batch_window_s: see batching.
      prefill_first: prompts take a step's budget before decode rows do.
      long_prompt_tokens: prompts with more tokens to compute are long; 0: none is.
      max_long_prompts: long prompts that are prefilled at once.
      long_prompt_share: of a step's prefill budget that long prompts may take while short ones
        want it too.
      itl_slo_s: target for the time between tokens; 0: none, fixed limits hold.
      ttft_slo_s: target for the time to the first token, which bounds how much prefill the ITL
        target may hold back; 0: none.
      min_prefill_tokens: prefill tokens that a step may always have, whatever the targets.
      watermark: share of the pool that an admission leaves free.
      max_queued_requests: most that wait, besides those that would fill the slots.
      max_queued_tokens: most prompt tokens that wait; 0: no bound.
      num_host_pages: pages of host memory for preempted requests; 0: they are recomputed.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk: int
    page_size: int
    num_pages: int
    max_model_len: int
    enable_prefix_cache: bool = True
    policy: str = "priority"
    max_starvation_s: float = math.inf
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    classes: tuple[RequestClass, ...] = ()
    batching: str = "continuous"
    batch_window_s: float = 0.0
    prefill_first: bool = False
    long_prompt_tokens: int = 0
    max_long_prompts: int = 1
    long_prompt_share: float = 0.5
    itl_slo_s: float = 0.0
    ttft_slo_s: float = 0.0
    min_prefill_tokens: int = 16
    watermark: float = 0.0
    max_queued_requests: int = NO_BOUND
    max_queued_tokens: int = 0
    num_host_pages: int = 0

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"{self.max_num_batched_tokens=} must hold a token of each of {self.max_num_seqs=}"
            )
        if self.num_pages < 2:
            raise ValueError(f"{self.num_pages=} must be at least 2: the null page and one more")
        if self.batching not in BATCHINGS:
            raise ValueError(f"{self.batching=} is none of {', '.join(BATCHINGS)}")
        if self.policy not in POLICY_NAMES:
            raise ValueError(f"{self.policy=} is none of {', '.join(POLICY_NAMES)}")

    @property
    def max_pages_per_seq(self) -> int:
        """J: what a request of max_model_len tokens holds."""
        return -(-self.max_model_len // self.page_size)

    def latency_targets(self) -> dict[str, LatencyTargets]:
        """Returns the targets of each class, the engine's where it has none of its own; those of
        requests without a class under ""."""
        targets = {"": LatencyTargets(self.ttft_slo_s, self.itl_slo_s)}
        for kind in self.classes:
            ttft_s = kind.ttft_slo_s or self.ttft_slo_s
            targets[kind.name] = LatencyTargets(ttft_s, kind.itl_slo_s or self.itl_slo_s)
        return targets
