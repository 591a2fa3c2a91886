"""Checks sampling settings against the served model. Knows its vocabulary's size: no text."""

from __future__ import annotations

from collections.abc import Iterable

from jserve.errors import InvalidRequest
from jserve.sampling_params import SamplingParams


def check_token_ids(sampling: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidRequest, naming the field and the id, for one that the model does not have."""
    biased = [token_id for token_id, _ in dict(sampling.logit_bias).items()]
    if len(biased) < len(sampling.logit_bias):
        raise InvalidRequest("logit_bias names a token id twice; give each once")
    _check("logit_bias", biased, vocab_size)
    _check("allowed_token_ids", sampling.allowed_token_ids or (), vocab_size)
    _check("stop_token_ids", sampling.stop_token_ids, vocab_size)
    for word in sampling.bad_words:
        if not isinstance(word, str):
            _check("bad_words", word, vocab_size)


def check_min_tokens(sampling: SamplingParams, max_tokens: int) -> None:
    """Raises InvalidRequest where not even `max_tokens`, as resolved, reach min_tokens."""
    if sampling.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens={sampling.min_tokens} is above the {max_tokens} tokens that fit behind "
            "this prompt"
        )


def _check(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{name} has the token id {token_id}; this model has 0 to {vocab_size - 1}"
            )
