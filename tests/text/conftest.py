"""Two small vocabularies that the original libraries trained, by
scripts/make_tokenizer_reference.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from jserve.text.gguf_tokenizer import tokenizer_from_gguf
from jserve.text.sentencepiece_model import read_sentencepiece_model
from jserve.text.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data" / "text"


@pytest.fixture(scope="session")
def text_data() -> Path:
    return DATA


@pytest.fixture(scope="session")
def json_schema_suite() -> list[list[Any]]:
    """[description, drafts, schema, values that fit, values that do not] of a public suite."""
    return json.loads((DATA / "json_schema_suite.json").read_text())["schemas"]


@pytest.fixture(scope="session")
def expected() -> dict[str, Any]:
    return json.loads((DATA / "expected_ids.json").read_text("utf-8"))


@pytest.fixture(scope="session")
def byte_level_metadata() -> dict[str, Any]:
    """The tiny byte-level vocabulary as a GGUF file would carry it; ids 0 to 2 are special."""
    model = json.loads((DATA / "tiny_byte_level.json").read_text("utf-8"))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
    }


@pytest.fixture(scope="session")
def spm_metadata() -> dict[str, Any]:
    """The tiny SentencePiece vocabulary: <unk> 0, <s> 1, </s> 2, <think> 3, bytes from 4."""
    ids = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    return read_sentencepiece_model(DATA / "tiny_spm.model") | ids


@pytest.fixture(scope="session")
def byte_level(byte_level_metadata) -> Tokenizer:
    return tokenizer_from_gguf(byte_level_metadata)


@pytest.fixture(scope="session")
def spm(spm_metadata) -> Tokenizer:
    return tokenizer_from_gguf(spm_metadata)


@pytest.fixture(scope="session")
def backends(byte_level, spm) -> dict[str, tokenizers.Tokenizer]:
    """The Rust library's own tokenizers behind the two, as the judges of decoding."""
    return {"byte_level": byte_level._backend, "spm": spm._backend}


@pytest.fixture(params=["byte_level", "spm"])
def tokenizer(request) -> Tokenizer:
    return request.getfixturevalue(request.param)
