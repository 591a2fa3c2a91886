"""Embeddings: what a request for one may ask, and one vector out of its prompt's hidden states.
Knows fields and numpy arrays: no steps, no devices."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from jserve.errors import InvalidRequest
from jserve.messages import GenerateRequest
from jserve.sampling_params import SamplingParams

POOLINGS = ("last", "mean")
_NOTHING_ASKED = SamplingParams()


def check_pooling(message: GenerateRequest) -> None:
    """Raises InvalidRequest, by name, for another pooling, and for what an embedding has not."""
    pooling = message.pooling
    if pooling not in POOLINGS:
        raise InvalidRequest(f"{pooling=} is none of {', '.join(POOLINGS)}; use one of them")
    if message.messages is not None:
        raise InvalidRequest("messages have no embedding here; give a prompt or prompt_token_ids")
    for field in fields(SamplingParams):
        value = getattr(message.sampling, field.name)
        if value != getattr(_NOTHING_ASKED, field.name):
            raise InvalidRequest(
                f"{field.name}={value!r} has no meaning with {pooling=}, which generates nothing; "
                "leave it out"
            )


class PooledPrompt:
    """The sum of the hidden states that the pooling of one prompt takes, as its chunks come."""

    def __init__(self, pooling: str) -> None:
        self._pooling = pooling
        self._sum: np.ndarray | float = 0.0

    def add(self, start: int, of_chunk: np.ndarray) -> None:
        """Takes in the sum f32[D] over a chunk that begins at position `start`. After a preemption
        chunks come again from 0, or go on with the next."""
        so_far = 0.0 if start == 0 or self._pooling == "last" else self._sum
        self._sum = so_far + of_chunk.astype(np.float64)

    def vector(self) -> np.ndarray:
        """Returns f32[D], of length 1: that of a sum and that of a mean are the same."""
        length = np.linalg.norm(self._sum)
        return np.asarray(self._sum / length if length else self._sum, np.float32)
