"""Runs packed batches on the devices, in order, without waiting. Knows buffers and executables."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from jserve.runner.sampling import Sampled
from jserve.runner.step import StepState
from jserve.runner.swap import SwapSpace
from scheduler.bucket import Bucket
from scheduler.packer import PackedBatch


class StepOutput(NamedTuple):
    """What a step gives the host. The last three are None unless the batch asked for them."""

    token_ids: np.ndarray  # i32[S]
    logprobs: np.ndarray | None  # f32[S], of the token
    top_ids: np.ndarray | None  # i32[S, A], best first
    top_logprobs: np.ndarray | None  # f32[S, A]


class StepHandle:
    """A step that is running. `result` is the one blocking read of the device."""

    def __init__(self, sampled: Sampled, wants_logprobs: bool) -> None:
        self._arrays = tuple(sampled) if wants_logprobs else sampled[:1]
        for array in self._arrays:
            array.copy_to_host_async()

    def result(self) -> StepOutput:
        arrays = [np.asarray(array) for array in self._arrays]
        return StepOutput(*arrays, *[None] * (4 - len(arrays)))


class Runner:
    """Owns the weights, the device state and the compiled steps of one engine."""

    def __init__(
        self,
        params: Any,
        state: StepState,
        steps: dict[Bucket, jax.stages.Compiled],
        swap: SwapSpace | None = None,
    ) -> None:
        self._params = params
        self._state = state
        self._steps = steps
        self._swap = swap

    def dispatch(self, batch: PackedBatch) -> StepHandle:
        """Starts the page copies and the step of `batch` behind those before, and returns at once;
        only many copies wait, as swap.py says."""
        if len(batch.copies_out) or len(batch.copies_in):
            assert self._swap is not None, "pages cannot move without a swap space"
            kv_pool = self._swap.move(self._state.kv_pool, batch.copies_out, batch.copies_in)
            self._state = self._state._replace(kv_pool=kv_pool)
        self._state, sampled = self._steps[batch.bucket](self._params, self._state, batch.buffer)
        return StepHandle(sampled, batch.wants_logprobs)
