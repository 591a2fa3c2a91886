"""What a caller asks of one generation. Knows the fields and their legal ranges, no model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from jserve.errors import InvalidRequest
from jserve.structured import StructuredOutput

MAX_LOGPROBS = 20  # alternatives per token; the device returns this many in one fixed shape
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024  # entries; the device takes this many per row in one fixed shape
MAX_BIAS = 100.0
MAX_ALLOWED_TOKEN_IDS = 2**20
MAX_BAD_WORDS = 256
MAX_BAD_WORD_SIZE = 128  # characters or token ids
MAX_CHOICES = 128


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


def _token_ids(name: str, ids: Any) -> tuple[int, ...]:
    return tuple(_integer(name, i, 0, 2**31 - 1, "ids of 0 or more") for i in ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stop settings of one request, checked on construction.

    Attributes:
      temperature: 0 is greedy; otherwise logits are divided by it. Range 0 to 100.
      top_k: keep the k most likely tokens; 0 or -1 keeps all.
      top_p: keep the smallest set with at least this probability; in (0, 1].
      min_p: keep tokens with at least this share of the best one's probability; in [0, 1].
      seed: equal seeds give equal tokens whatever shares the batch; None draws one per request.
      presence_penalty: subtracted from the logit of every token of the output so far; -2 to 2.
      frequency_penalty: subtracted once for each time that it is there; -2 to 2. Both as OpenAI
        defines them: the prompt does not count.
      repetition_penalty: divides the positive logits of tokens of the prompt and the output, and
        multiplies negative ones (arXiv 1909.05858, as in Hugging Face); 0.01 to 100, 1 is none.
      logit_bias: added to the logits of these token ids, {id: -100 to 100}.
      allowed_token_ids: only these may come; None is all.
      bad_words: what may not come: each a text (as it is and behind a space), or token ids.
      min_tokens: no EOS id, stop token id or stop string ends the output before; 0 is none.
      n: how many choices to generate; they share the prompt's pages. Choice i has seed + i.
      best_of: generate so many, return the n of the highest mean log-probability; None is n.
      structured: a grammar that the output has to follow.
      max_tokens: most tokens to generate, at least 1; None means up to the model's length limit.
      stop: strings that end the generation; left out of the text unless `include_stop_str`.
      stop_token_ids: ids that end the generation, in addition to the model's EOS ids.
      ignore_eos: do not stop at the model's EOS ids.
      logprobs: None for none, n for the chosen token's and the n best alternatives' (0 to 20).
      prompt_logprobs: the same for the prompt's tokens, given what is before each.
      skip_special_tokens: leave special tokens out of the text.
      include_stop_str: keep the stop string that ended the generation in the text.

    Raises:
      InvalidRequest: naming the field, its value and what is legal.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()  # kept as pairs
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    min_tokens: int = 0
    n: int = 1
    best_of: int | None = None
    structured: StructuredOutput | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
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
        for name in ("presence_penalty", "frequency_penalty"):
            put(name, _real(name, getattr(self, name), -2, 2, "-2 to 2"))
        put("repetition_penalty", self._checked_repetition_penalty())
        put("logit_bias", self._checked_logit_bias())
        put("allowed_token_ids", self._checked_allowed())
        put("bad_words", self._checked_bad_words())
        put("min_tokens", _integer("min_tokens", self.min_tokens, 0, 2**31 - 1, "0 or more"))
        self._check_choices(put)
        self._check_structured()
        if self.seed is not None:
            put("seed", _integer("seed", self.seed, -(2**63), 2**64 - 1, "a 64-bit integer"))
        if self.max_tokens is not None:
            put("max_tokens", _integer("max_tokens", self.max_tokens, 1, 2**31 - 1, "1 or more"))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                limit = f"0 to {MAX_LOGPROBS}, or none"
                put(name, _integer(name, value, 0, MAX_LOGPROBS, limit))
        put("stop", self._checked_stop())
        put("stop_token_ids", self._checked_stop_token_ids())
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name}={getattr(self, name)!r} is not true or false")

    def _checked_repetition_penalty(self) -> float:
        return _real("repetition_penalty", self.repetition_penalty, 0.01, 100, "0.01 to 100")

    def _checked_logit_bias(self) -> tuple[tuple[int, float], ...]:
        given = self.logit_bias
        pairs = given.items() if isinstance(given, Mapping) else given
        is_known = isinstance(given, Mapping) or (
            isinstance(given, tuple) and all(isinstance(p, tuple) and len(p) == 2 for p in given)
        )
        if not is_known or len(given) > MAX_LOGIT_BIAS:
            raise InvalidRequest(
                f"logit_bias is not an object of at most {MAX_LOGIT_BIAS} token ids and numbers"
            )
        limit = f"{-MAX_BIAS:g} to {MAX_BIAS:g}"
        return tuple(
            (
                _integer("logit_bias key", token_id, 0, 2**31 - 1, "token ids"),
                _real(f"logit_bias[{token_id}]", bias, -MAX_BIAS, MAX_BIAS, limit),
            )
            for token_id, bias in pairs
        )

    def _checked_allowed(self) -> tuple[int, ...] | None:
        ids = self.allowed_token_ids
        if ids is None:
            return None
        if not isinstance(ids, (tuple, list)) or not 0 < len(ids) <= MAX_ALLOWED_TOKEN_IDS:
            raise InvalidRequest("allowed_token_ids is not a list of at least one token id")
        return _token_ids("allowed_token_ids", ids)

    def _checked_bad_words(self) -> tuple[str | tuple[int, ...], ...]:
        words = self.bad_words
        if not isinstance(words, (tuple, list)) or len(words) > MAX_BAD_WORDS:
            raise InvalidRequest(
                f"bad_words is not a list of at most {MAX_BAD_WORDS} texts or lists of token ids"
            )
        for index, word in enumerate(words):
            if not isinstance(word, (str, tuple, list)) or not 0 < len(word) <= MAX_BAD_WORD_SIZE:
                raise InvalidRequest(
                    f"bad_words[{index}] is not a text or a list of token ids, of 1 to "
                    f"{MAX_BAD_WORD_SIZE} characters or ids"
                )
        return tuple(w if isinstance(w, str) else _token_ids("bad_words", w) for w in words)

    def _check_choices(self, put: Any) -> None:
        limit = f"1 to {MAX_CHOICES}"
        put("n", _integer("n", self.n, 1, MAX_CHOICES, limit))
        if self.best_of is None:
            return
        put("best_of", _integer("best_of", self.best_of, 1, MAX_CHOICES, limit))
        if self.best_of < self.n:
            raise InvalidRequest(f"best_of={self.best_of} is below n={self.n}")

    def _check_structured(self) -> None:
        if self.structured is None:
            return
        if not isinstance(self.structured, StructuredOutput):
            raise InvalidRequest("structured is not a StructuredOutput")
        if self.ignore_eos:
            raise InvalidRequest("ignore_eos contradicts structured: a grammar ends with EOS")

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
        return _token_ids("stop_token_ids", ids)
