"""What the engine asks of a device, and how its answers read. Knows numpy arrays: no jax, no
request's life."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from jserve.errors import JserveError
from jserve.messages import TokenLogprobs
from scheduler.packer import PackedBatch

T = TypeVar("T")


class Logprobs(Protocol):
    """Natural logarithms of rows' distributions."""

    @property
    def logprobs(self) -> np.ndarray: ...  # f32[S], of one token

    @property
    def ranks(self) -> np.ndarray: ...  # i32[S], of that token; 1 is the best one

    @property
    def top_ids(self) -> np.ndarray: ...  # i32[S, A]

    @property
    def top_logprobs(self) -> np.ndarray: ...  # f32[S, A]


class StepOutput(Protocol):
    """One step's tokens i32[S], and what else the batch asked for."""

    @property
    def token_ids(self) -> np.ndarray: ...

    @property
    def logprobs(self) -> Logprobs | None: ...

    @property
    def prompt_logprobs(self) -> Sequence[Logprobs]: ...  # of the batch's prompt pieces

    @property
    def row_sums(self) -> np.ndarray | None: ...  # f32[rows, D], hidden states of pooled rows


class StepHandle(Protocol):
    def result(self) -> StepOutput: ...  # waits for the device


class Runner(Protocol):
    """Neither of the first two waits. Each step's tokens are chosen before the next step is
    dispatched."""

    def dispatch(self, batch: PackedBatch) -> Any: ...  # a StepHandle

    def choose(self, handle: Any, allowed: np.ndarray | None = None) -> None: ...  # u32[S, W]

    def reset(self) -> None: ...  # after a step that failed: all pages and slots are lost


class StepFailed(Exception):
    """The device did not compute a step, for the reason that is the cause of this."""


def ask(device: Callable[..., T], *args: Any) -> T:
    """Returns device(*args). Raises StepFailed for what is the device's fault; a broken invariant
    is nobody's to mend."""
    try:
        return device(*args)
    except (AssertionError, JserveError):
        raise
    except Exception as error:
        raise StepFailed(f"{type(error).__name__}: {error!s:.200}") from error


class Profiler(Protocol):
    """Records what the device does; one profile at a time. Calls may take seconds."""

    def start(self) -> str: ...  # the folder where it will be

    def stop(self) -> None: ...  # and write it


def token_logprobs(token_id: int, row: int, found: Logprobs, num_top: int) -> TokenLogprobs:
    """Returns one row's entry, with so many alternatives, or as many as are possible at all."""
    ids, values = found.top_ids[row, :num_top].tolist(), found.top_logprobs[row, :num_top].tolist()
    top = [pair for pair in zip(ids, values, strict=True) if pair[1] > -math.inf]
    return TokenLogprobs(
        token_id,
        float(found.logprobs[row]),
        tuple(top),
        int(found.ranks[row]),
    )
