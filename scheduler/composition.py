"""What goes into one step: how much of it is for prompts, which pieces of which, and the rows that
come of it. Knows the requests that run: not who is admitted or gives way."""

from __future__ import annotations

import numpy as np

from scheduler.admission import Admission
from scheduler.budget import StepBudget, StepBudgeter
from scheduler.config import SchedulerConfig
from scheduler.pages import RequestPages
from scheduler.plan import StepPlan
from scheduler.request import Request
from scheduler.slots import Slots
from scheduler.step_shape import StepShape
from scheduler.step_time import StepTime


class Composer:
    """Composes steps of decode rows and pieces of prompts.

    Attributes:
      prefilling: running requests with a prompt to compute, the most urgent first
        where that counts, then in order of admission.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        slots: Slots,
        pages: RequestPages,
        waiting: Admission,
        budgeter: StepBudgeter,
    ) -> None:
        self.prefilling: dict[Request, None] = {}
        self.budgeter = budgeter
        self._config = config
        self._slots = slots
        self._pages = pages
        self._waiting = waiting
        self._ones = np.ones(config.max_num_seqs, np.int32)
        self._trues = np.ones(config.max_num_seqs, bool)

    def limits(self, now: float, decodes: np.ndarray) -> StepBudget:
        """How many prompt tokens the step may have, and how many requests may run."""
        config = self._config
        num_decodes = 0 if config.prefill_first else len(decodes)
        itl_slo_s = self._waiting.strictest_itl_slo_s()
        if not itl_slo_s:
            return self.budgeter.fixed(num_decodes)
        first = next(iter(self.prefilling), None)
        return self.budgeter.decide(
            num_decodes=num_decodes,
            num_rows_running=config.max_num_seqs - self._slots.num_free,
            context_tokens=int(self._slots.num_computed[decodes].sum()) + num_decodes,
            prefill_context=0 if first is None else int(self._slots.num_computed[first.slot]),
            itl_slo_s=itl_slo_s,
            ttft_slack_s=self._waiting.ttft_slack_s(now, self.prefilling),
        )

    def enlist(self, request: Request, is_next: bool = False) -> None:
        """Lists a running request as one with tokens to compute: behind the others, or before those
        that are no more urgent."""
        requests = [request, *self.prefilling] if is_next else [*self.prefilling, request]
        if self._waiting.queue.preempts:  # the most urgent one has the first piece of each step
            requests.sort(key=lambda r: r.priority)
        self.prefilling = dict.fromkeys(requests)

    def for_long(self, budget: int) -> int:
        """The tokens that long prompts may take before others had their turn."""
        return max(int(budget * self._config.long_prompt_share), 1)

    def plan_chunks(self, chunks: dict[Request, int], budget: int, for_long: int) -> int:
        """Plans, or enlarges, the next pieces of running prompts; returns the budget left."""
        for request in self.prefilling:
            is_long = request in self._waiting.long
            count = self.plan_chunk(chunks, request, min(budget, for_long) if is_long else budget)
            budget -= count
            for_long -= count if is_long else 0
        return budget

    def plan_chunk(self, chunks: dict[Request, int], request: Request, budget: int) -> int:
        """Plans what of a prompt may still enter the step; returns how many tokens that is."""
        slot, planned = request.slot, chunks.get(request, 0)
        left = int(self._slots.num_tokens[slot] - self._slots.num_computed[slot])
        count = max(min(min(left, self._config.prefill_chunk) - planned, budget), 0)
        if count:
            chunks[request] = planned + count
        return count

    def commit(self, decodes: np.ndarray, chunks: dict[Request, int]) -> StepPlan:
        """Returns the plan of a step, whose tokens count as computed from now on."""
        slots = self._slots
        starts = slots.num_computed[decodes]
        ending = slots.owners[slots.advance(decodes)].tolist()
        requests = slots.owners[decodes].tolist()
        if self._waiting.queue.counts_decodes:
            self._waiting.queue.on_decoded(requests, 1)
        num_decodes = len(decodes)
        rows, counts, samples = decodes, self._ones[:num_decodes], self._trues[:num_decodes]
        prefill_tokens = pairs = 0
        if chunks:
            ordered = sorted(chunks.items(), key=lambda item: item[1] > 1)
            requests += [request for request, _ in ordered]
            chunk_slots = [request.slot for request, _ in ordered]
            chunk_starts = slots.num_computed[chunk_slots]
            for (_, count), start in zip(ordered, chunk_starts.tolist(), strict=True):
                if count > 1:
                    prefill_tokens += count
                    pairs += count * start + count * (count + 1) // 2
            rows = np.concatenate([rows, chunk_slots])
            starts = np.concatenate([starts, chunk_starts])
            counts = np.concatenate([counts, [count for _, count in ordered]])
            of_chunks = [self._commit_chunk(*item, ending) for item in ordered]
            samples = np.concatenate([samples, of_chunks])
        num_tokens = num_decodes + sum(chunks.values())
        shape = StepShape(
            num_rows=len(requests),
            decode_rows=num_tokens - prefill_tokens,
            prefill_tokens=prefill_tokens,
            context_tokens=int(starts.sum()) + num_tokens,
            attended_pairs=pairs,
        )
        return StepPlan(
            requests, rows, starts, counts, samples, num_decodes, slots.page_table, shape, ending
        )

    def _commit_chunk(self, request: Request, count: int, ending: list[Request]) -> bool:
        """Counts a piece of a prompt as computed. Returns whether it yields a token; if that is the
        request's last one, or none is wanted, it is put on the list of those ending."""
        slots, slot = self._slots, request.slot
        start = int(slots.num_computed[slot])
        end = start + count
        is_whole = end == int(slots.num_tokens[slot])
        samples = is_whole and request.sampling.max_tokens > 0
        slots.num_computed[slot] = end
        if is_whole:
            slots.num_tokens[slot] = end + samples
            slots.is_decoding[slot] = end + 1 < slots.end[slot]
            if not slots.is_decoding[slot]:
                ending.append(request)
            del self.prefilling[request]
            self._waiting.long.discard(request)
        self._pages.offer(request)
        self._pages.announce(request)
        is_new = start < request.num_prompt_tokens and not request.num_preemptions
        of_prompt = count if is_new else 0  # what a preemption cost is not the tenant's to pay
        self._waiting.queue.on_served(request, of_prompt, int(samples))
        return samples

    def saves_time(self, request: Request, num_tokens: int, step_time: StepTime) -> bool:
        """See `Scheduler.saves_time`; the request decodes."""
        slots, num_rows = self._slots, len(self._slots.decoding())
        length, context = int(slots.num_tokens[request.slot]), int(slots.num_computed.sum())
        prefilling = [other.slot for other in self.prefilling]
        waiting = int((slots.num_tokens[prefilling] - slots.num_computed[prefilling]).sum())
        waiting = min(waiting, self._config.max_num_batched_tokens - num_rows)
        others, num_chunks = num_rows - 1, len(prefilling)
        without = StepShape(others + num_chunks, others, waiting, context - length, 0)
        with_it = StepShape(
            num_rows + num_chunks, others, waiting + num_tokens, context, num_tokens * length
        )
        decode = StepShape(num_rows, num_rows, 0, context, 0)
        times = [step_time.predict(s) if s.num_rows else 0.0 for s in (with_it, without)]
        share = step_time.predict(decode) / num_rows
        return times[0] - times[1] < num_tokens * share
