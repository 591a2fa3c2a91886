"""Turns sampling settings into their proto message and back. Knows both; no requests, no calls."""

from __future__ import annotations

from typing import Any

from jserve.errors import InvalidRequest
from jserve.sampling_params import SamplingParams
from jserve.server.proto import generate_pb2 as pb
from jserve.structured import GrammarKind, StructuredOutput

_OPTIONAL = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "n", "best_of"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logprobs", "prompt_logprobs", "skip_special_tokens"),
)
_PLAIN = ("ignore_eos", "include_stop_str", "min_tokens")
_REPEATED = ("stop", "stop_token_ids")


def sampling_to_proto(sampling: SamplingParams) -> pb.SamplingParams:
    """Returns the message, with every field written out that has a value.

    Raises:
      TypeError, ValueError: a value that no proto field can hold.
    """
    given = {name: getattr(sampling, name) for name in _OPTIONAL + _PLAIN}
    given |= {name: list(getattr(sampling, name)) for name in _REPEATED}
    message = pb.SamplingParams(**{k: v for k, v in given.items() if v is not None})
    for token_id, bias in dict(sampling.logit_bias).items():
        message.logit_bias.add(token_id=token_id, bias=bias)
    if sampling.allowed_token_ids is not None:
        message.allowed_token_ids.ids.extend(sampling.allowed_token_ids)
    for word in sampling.bad_words:
        if isinstance(word, str):
            message.bad_words.add(text=word)
        else:
            message.bad_words.add(token_ids=pb.TokenIds(ids=word))
    if (structured := sampling.structured) is not None:
        message.structured.kind, message.structured.value = structured.kind, structured.value
    return message


def sampling_from_proto(message: pb.SamplingParams) -> SamplingParams:
    """Fields not given keep SamplingParams' default; of max_tokens that is None here: no limit of
    its own, as protobuf users read "not set". Raises InvalidRequest as SamplingParams does."""
    given: dict[str, Any] = {"max_tokens": None}
    given |= {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}
    given |= {name: getattr(message, name) for name in _PLAIN}
    given |= {name: tuple(getattr(message, name)) for name in _REPEATED}
    given["logit_bias"] = {entry.token_id: entry.bias for entry in message.logit_bias}
    if len(given["logit_bias"]) < len(message.logit_bias):
        raise InvalidRequest("logit_bias names a token id twice; give each once")
    if message.HasField("allowed_token_ids"):
        given["allowed_token_ids"] = tuple(message.allowed_token_ids.ids)
    given["bad_words"] = tuple(
        tuple(word.token_ids.ids) if word.HasField("token_ids") else word.text
        for word in message.bad_words
    )
    if message.HasField("structured"):
        kind, value = message.structured.kind, message.structured.value
        known = {str(k): k for k in GrammarKind}
        given["structured"] = StructuredOutput(known.get(kind, kind), value)  # type: ignore[arg-type]
    return SamplingParams(**given)
