"""What a caller asks of one generation. Knows the fields and their legal ranges, no model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from jserve.errors import InvalidRequest

MAX_LOGPROBS = 20  # alternatives per token; the device returns this many in one fixed shape
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 64


def _real(name: str, value: Any, low: float, high: float, expected: str) -> float:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    try:
        number = float(value) if is_number else math.nan
    except OverflowError:  # an integer that no float holds
        number = math.inf
    if not math.isfinite(number):
        raise InvalidRequest(f"{name}={value!r} is not a finite number; use {expected}")
    if not low <= number <= high:
        raise InvalidRequest(f"{name}={value!r} is out of range; use {expected}")
    return number


def _integer(name: str, value: Any, low: int, high: int, expected: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidRequest(f"{name}={value!r} is not an integer; use {expected}")
    if not low <= int(value) <= high:
        raise InvalidRequest(f"{name}={value!r} is out of range; use {expected}")
    return int(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stop settings of one request, checked on construction.

    Attributes:
      temperature: 0 is greedy; otherwise logits are divided by it. Range 0 to 100.
      top_k: keep the k most likely tokens; 0 or -1 keeps all.
      top_p: keep the smallest set with at least this probability; in (0, 1].
      min_p: keep tokens with at least this share of the best one's probability; in [0, 1].
      seed: equal seeds give equal tokens whatever shares the batch; None draws one per request.
      max_tokens: most tokens to generate, at least 1; None means up to the model's length limit.
      stop: strings that end the generation; left out of the text unless `include_stop_str`.
      stop_token_ids: ids that end the generation, in addition to the model's EOS ids.
      ignore_eos: do not stop at the model's EOS ids.
      logprobs: None for none, n for the chosen token's and the n best alternatives' (0 to 20).
      skip_special_tokens: leave special tokens out of the text.
      include_stop_str: keep the stop string that ended the generation in the text.

    Raises:
      InvalidRequest: naming the field, its value and what is legal.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str: bool = False

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        put("temperature", _real("temperature", self.temperature, 0, 100, "0 to 100"))
        top_k = _integer("top_k", self.top_k, -1, 2**31 - 1, "k >= 1, or 0 or -1 for all")
        put("top_k", max(top_k, 0))
        put("top_p", _real("top_p", self.top_p, 0, 1, "a number above 0, at most 1"))
        if self.top_p == 0:
            raise InvalidRequest("top_p=0.0 is out of range; use a number above 0, at most 1")
        put("min_p", _real("min_p", self.min_p, 0, 1, "0 to 1"))
        if self.seed is not None:
            put("seed", _integer("seed", self.seed, -(2**63), 2**64 - 1, "a 64-bit integer"))
        if self.max_tokens is not None:
            put("max_tokens", _integer("max_tokens", self.max_tokens, 1, 2**31 - 1, "1 or more"))
        if self.logprobs is not None:
            limit = f"0 to {MAX_LOGPROBS}, or none"
            put("logprobs", _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS, limit))
        put("stop", self._checked_stop())
        put("stop_token_ids", self._checked_stop_token_ids())
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name}={getattr(self, name)!r} is not true or false")

    def _checked_stop(self) -> tuple[str, ...]:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, (tuple, list)) or not all(isinstance(s, str) for s in stop):
            raise InvalidRequest(f"stop={self.stop!r} is not a string or a list of strings")
        if len(stop) > MAX_STOP_STRINGS or any(not 0 < len(s) <= MAX_STOP_CHARS for s in stop):
            raise InvalidRequest(
                f"stop has {len(stop)} strings; use at most {MAX_STOP_STRINGS}, "
                f"each of 1 to {MAX_STOP_CHARS} characters"
            )
        return tuple(stop)

    def _checked_stop_token_ids(self) -> tuple[int, ...]:
        ids = self.stop_token_ids
        if not isinstance(ids, (tuple, list)) or len(ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(
                f"stop_token_ids is not a list of at most {MAX_STOP_TOKEN_IDS} token ids"
            )
        return tuple(_integer("stop_token_ids", i, 0, 2**31 - 1, "ids of 0 or more") for i in ids)
