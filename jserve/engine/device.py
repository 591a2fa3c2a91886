"""What the engine asks of a device, and how its answers read. Knows numpy arrays: no jax, no
request's life."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from jserve.messages import TokenLogprobs
from scheduler.packer import PackedBatch
from scheduler.request import Request


class StepOutput(Protocol):
    """One step's tokens i32[S], and log-probabilities where the batch asked for them."""

    @property
    def token_ids(self) -> np.ndarray: ...

    @property
    def logprobs(self) -> np.ndarray | None: ...  # f32[S]

    @property
    def top_ids(self) -> np.ndarray | None: ...  # i32[S, A]

    @property
    def top_logprobs(self) -> np.ndarray | None: ...  # f32[S, A]


class StepHandle(Protocol):
    def result(self) -> StepOutput: ...  # waits for the device


class Runner(Protocol):
    def dispatch(self, batch: PackedBatch) -> StepHandle: ...  # never waits


def logprobs_of(
    request: Request, token_id: int, row: int, output: StepOutput
) -> tuple[TokenLogprobs, ...]:
    """Returns what a request asked for of one row's token; empty where it asked for nothing."""
    count = request.sampling.num_logprobs
    if count < 0 or output.logprobs is None:
        return ()
    assert output.top_ids is not None, "log-probabilities come together"
    assert output.top_logprobs is not None, "log-probabilities come together"
    ids, values = output.top_ids[row, :count].tolist(), output.top_logprobs[row, :count].tolist()
    top = tuple(zip(ids, values, strict=True))
    return (TokenLogprobs(token_id, float(output.logprobs[row]), top),)
