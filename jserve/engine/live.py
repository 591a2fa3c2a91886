"""What the engine keeps of a live request besides the scheduler's state. Knows times and tokens."""

from __future__ import annotations

from dataclasses import dataclass

from jserve.engine.input_processor import PreparedRequest
from jserve.messages import Timings


@dataclass(slots=True)
class LiveRequest:
    """Times are seconds of the engine's clock."""

    prepared: PreparedRequest
    first_token_time: float | None = None
    last_token_time: float = 0.0
    num_tokens: int = 0

    def timings(self, now: float) -> Timings:
        request, first = self.prepared.request, self.first_token_time
        started = request.first_scheduled_time
        return Timings(
            queue_s=(now if started is None else started) - request.arrival_time,
            ttft_s=None if first is None else first - request.arrival_time,
            e2e_s=now - request.arrival_time,
            itl_s=None
            if first is None or self.num_tokens < 2
            else (self.last_token_time - first) / (self.num_tokens - 1),
        )
