"""What one step computes, as arrays over its rows. Knows slots and counts: not how they were
chosen, not how they are packed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from scheduler.request import Request
from scheduler.step_shape import StepShape

NO_COPIES = np.zeros((0, 2), np.int32)


class PlanRow(NamedTuple):
    """One request's place in a step: tokens [start, start + num_tokens) of its sequence."""

    request: Request
    start: int
    num_tokens: int
    samples: bool  # the row reaches the last token there is, so it yields the next one
    reads_last_token: bool  # its input id is the one that the device keeps for its slot


@dataclass(slots=True, eq=False)
class StepPlan:
    """One step's rows: `num_decodes` decode rows, whose input the device keeps, then pieces of
    prompts, those of one token first.

    `page_table` i32[slots, J] is the scheduler's own, to be read before its next step.
    `copies_out` i32[n, 2] are (device page, host page) to be copied before the step, and then
    `copies_in` i32[m, 2] (host page, device page).
    """

    requests: list[Request]
    slots: np.ndarray  # i32[rows]
    starts: np.ndarray  # i32[rows]
    counts: np.ndarray  # i32[rows]
    samples: np.ndarray  # bool[rows]
    num_decodes: int
    page_table: np.ndarray
    shape: StepShape
    ending: list[Request] = field(default_factory=list)  # that need no step after this one
    predicted_s: float = 0.0
    copies_out: np.ndarray = field(default_factory=lambda: NO_COPIES)
    copies_in: np.ndarray = field(default_factory=lambda: NO_COPIES)

    @property
    def num_tokens(self) -> int:
        return self.shape.num_tokens

    @property
    def num_chunks(self) -> int:
        return len(self.requests) - self.num_decodes

    def samples_for(self, request: Request) -> bool:
        return request in self.requests and bool(self.samples[self.requests.index(request)])

    def void(self, request: Request) -> bool:
        """Lets nobody read what the step samples for a request; returns whether it did sample."""
        if not self.samples_for(request):
            return False
        self.samples = self.samples.copy()  # steps may share it
        self.samples[self.requests.index(request)] = False
        self.ending = [other for other in self.ending if other is not request]
        return True

    def sampling(self) -> Iterator[tuple[Request, bool]]:
        """Yields each row's request and whether the row samples."""
        return zip(self.requests, self.samples.tolist(), strict=True)

    @property
    def rows(self) -> list[PlanRow]:
        """The rows one by one, for whoever looks at a plan at leisure."""
        columns = (self.starts.tolist(), self.counts.tolist(), self.samples.tolist())
        return [
            PlanRow(request, start, count, samples, row < self.num_decodes)
            for row, (request, start, count, samples) in enumerate(
                zip(self.requests, *columns, strict=True)
            )
        ]


class NewToken(NamedTuple):
    """One token that a step gave one request; `row` is its row in that step's plan."""

    request: Request
    token_id: int
    row: int
