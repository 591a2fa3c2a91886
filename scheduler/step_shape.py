"""What of a step decides how long it takes. Knows counts only."""

from __future__ import annotations

from typing import NamedTuple


class StepShape(NamedTuple):
    """The work of one step.

    Attributes:
      num_rows: requests that have tokens in the step.
      decode_rows: those of them with one token.
      prefill_tokens: tokens of the others.
      context_tokens: KV tokens that attention reads: each row's length, this step's included.
      attended_pairs: query-key pairs of the prefill chunks: what their attention computes.
    """

    num_rows: int
    decode_rows: int
    prefill_tokens: int
    context_tokens: int
    attended_pairs: int

    @property
    def num_tokens(self) -> int:
        return self.decode_rows + self.prefill_tokens
