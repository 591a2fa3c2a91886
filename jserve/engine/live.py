"""What the engine keeps of a live choice besides the scheduler's state. Knows times and tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from jserve.engine.choices import Choices
from jserve.engine.device import Logprobs, token_logprobs
from jserve.engine.input_processor import PreparedRequest
from jserve.engine.pooling import PooledPrompt
from jserve.messages import Timings, TokenLogprobs
from scheduler.packer import PromptPiece
from scheduler.request import FinishReason


@dataclass(slots=True)
class LiveRequest:
    """Times are seconds of the engine's clock."""

    prepared: PreparedRequest
    choices: Choices
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    first_token_time: float | None = None
    last_token_time: float = 0.0
    num_tokens: int = 0
    pooled: PooledPrompt | None = None

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

    def is_stopped_by(self, token_id: int) -> bool:
        return token_id in self.prepared.request.sampling.stop_token_ids

    def stop_reason(self, last_token_id: int) -> str | int | None:
        """The stop string or stop token id that ended the choice, if one did."""
        if self.prepared.detokenizer.stop_hit is not None:
            return self.prepared.detokenizer.stop_hit
        is_stop = self.prepared.request.finish_reason == FinishReason.STOP
        return last_token_id if is_stop and self.is_stopped_by(last_token_id) else None

    def add_prompt_logprobs(self, start: int, piece: PromptPiece, found: Logprobs) -> None:
        """Takes in those of the tokens after position `start`; a prompt that is computed again,
        after a preemption, gives them again."""
        num_top = self.prepared.request.sampling.num_prompt_logprobs
        self.prompt_logprobs[start + 1 :] = [
            token_logprobs(token_id, i, found, num_top)
            for i, token_id in enumerate(piece.target_ids.tolist())
        ]
