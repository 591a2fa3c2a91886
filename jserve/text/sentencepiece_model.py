"""Reads a SentencePiece model file as the same metadata that a GGUF file would carry. Knows the
protocol buffer's field numbers (sentencepiece_model.proto), no vocabulary's meaning."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jserve.errors import CheckpointError

# Wire types and field numbers that matter here
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
PIECES, TRAINER_SPEC, NORMALIZER_SPEC = 1, 2, 3
PIECE_TEXT, PIECE_SCORE, PIECE_TYPE = 1, 2, 3
MODEL_TYPE, UNIGRAM, BPE = 3, 1, 2
UNKNOWN_ID = 40
CHARSMAP, ADD_DUMMY_PREFIX, REMOVE_EXTRA_SPACES = 2, 3, 4


def read_sentencepiece_model(path: str | Path) -> dict[str, Any]:
    """GGUF-style metadata (`tokenizer.ggml.*`, kind `llama`) of a SentencePiece BPE model.

    Raises:
      CheckpointError: the file is damaged, is no BPE model, or changes text before splitting it.
    """
    path = Path(path)
    try:
        fields = list(_fields(path.read_bytes()))
        pieces = [dict(_fields(value)) for number, value in fields if number == PIECES]
        by_number = dict(fields)
        trainer = dict(_fields(by_number.get(TRAINER_SPEC, b"")))
        normalizer = dict(_fields(by_number.get(NORMALIZER_SPEC, b"")))
        tokens = [piece[PIECE_TEXT].decode() for piece in pieces]
        scores = [struct.unpack("<f", piece.get(PIECE_SCORE, bytes(4)))[0] for piece in pieces]
    except (OSError, ValueError, LookupError, AttributeError, TypeError, struct.error) as error:
        raise CheckpointError(f"{path} is not a SentencePiece model: {error}") from error
    if trainer.get(MODEL_TYPE, UNIGRAM) != BPE:
        raise CheckpointError(f"{path} is not a SentencePiece BPE model; no other is supported")
    if normalizer.get(CHARSMAP) or normalizer.get(REMOVE_EXTRA_SPACES, 1):
        raise CheckpointError(f"{path} normalises text, which is not supported")
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [piece.get(PIECE_TYPE, 1) for piece in pieces],
        "tokenizer.ggml.unknown_token_id": trainer.get(UNKNOWN_ID, 0),
        "tokenizer.ggml.add_space_prefix": bool(normalizer.get(ADD_DUMMY_PREFIX, 1)),
    }


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Field numbers and values of one message: int for varints, bytes for the rest."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == BYTES:
            size, at = _varint(data, at)
        elif wire in (FIXED32, FIXED64):
            size = 4 if wire == FIXED32 else 8
        else:
            raise ValueError(f"wire type {wire} at byte {at}")
        if at + size > len(data):
            raise ValueError(f"ends inside a field of {size} bytes at byte {at}")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at `at` in base 128, lowest digit first, and where it ends."""
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
        shift += 7
