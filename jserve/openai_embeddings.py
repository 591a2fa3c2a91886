"""Reads bodies of /v1/embeddings into the engine's messages, and shapes vectors as their answers.
Knows field names and shapes: no transport, no engine.

Source: the OpenAI API reference, /v1/embeddings; `pooling` is ours.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jserve.errors import InvalidRequest
from jserve.messages import GenerateRequest, Usage
from jserve.openai_fields import MAX_EMBEDDING_INPUTS
from jserve.openai_format import given_fields, refuse_rest, take_request_fields

_ENCODINGS = ("float", "base64")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingsCall:
    """Attributes:
    requests: one for each input.
    is_base64: the vectors are to come as the bytes of their float32 numbers, lowest first.
    dimensions: how many numbers each is expected to have; None leaves that to the model.
    """

    requests: tuple[GenerateRequest, ...]
    is_base64: bool = False
    dimensions: int | None = None


def read_embeddings_body(body: Mapping[str, Any]) -> EmbeddingsCall:
    """Reads a body; a field of null counts as absent, and without pooling it is "last". Raises
    InvalidRequest for a missing, unknown or unsupported field, by its name."""
    fields = given_fields(body)
    inputs = _inputs(fields.pop("input", None))
    encoding = fields.pop("encoding_format", "float")
    if encoding not in _ENCODINGS:
        raise InvalidRequest(f"encoding_format={encoding!r:.80} is none of {', '.join(_ENCODINGS)}")
    dimensions = fields.pop("dimensions", None)
    if dimensions is not None and (type(dimensions) is not int or dimensions < 1):
        raise InvalidRequest(f"dimensions={dimensions!r:.80} is not an integer of 1 or more")
    pooling = fields.pop("pooling", "last")
    if not isinstance(pooling, str) or not pooling:
        raise InvalidRequest(f"pooling={pooling!r:.80} is not a word; use last or mean")
    common = take_request_fields(fields)
    refuse_rest(fields)
    return EmbeddingsCall(
        requests=tuple(GenerateRequest(**one, **common, pooling=pooling) for one in inputs),
        is_base64=encoding == "base64",
        dimensions=dimensions,
    )


def _inputs(given: Any) -> list[dict[str, Any]]:
    """The inputs, as fields of GenerateRequest."""
    is_one = isinstance(given, str) or (isinstance(given, list) and given and _is_id(given[0]))
    inputs = [given] if is_one else given
    if not isinstance(inputs, list) or not inputs:
        raise InvalidRequest("input must be a text, a list of token ids, or a list of these")
    if len(inputs) > MAX_EMBEDDING_INPUTS:
        raise InvalidRequest(
            f"input has {len(inputs)} entries; use at most {MAX_EMBEDDING_INPUTS} in a call"
        )
    found: list[dict[str, Any]] = []
    for index, one in enumerate(inputs):
        if isinstance(one, str):
            found.append({"prompt": one})
        elif isinstance(one, list) and all(map(_is_id, one)):
            found.append({"prompt_token_ids": one})
        else:
            name = "input" if is_one else f"input[{index}]"
            raise InvalidRequest(f"{name} is neither a text nor a list of token ids")
    return found


def _is_id(value: Any) -> bool:
    return type(value) is int


def embeddings_body(
    call: EmbeddingsCall, vectors: Sequence[np.ndarray], usages: Sequence[Usage], *, model: str
) -> dict[str, Any]:
    """Returns the body of the answer; `vectors` f32[D] and `usages` are in the inputs' order."""
    num_tokens = sum(usage.prompt_tokens for usage in usages)
    return {
        "object": "list",
        "data": [
            {
                "object": "embedding",
                "index": index,
                "embedding": _base64(vector) if call.is_base64 else vector.tolist(),
            }
            for index, vector in enumerate(vectors)
        ],
        "model": model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
