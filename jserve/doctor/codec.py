"""Turns prompts into token ids and token ids into text to show. Knows tokenizers: no logs, no
templates."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jserve.checkpoint.resolve import open_checkpoint
from jserve.errors import CheckpointError, ConfigError
from jserve.text.chat import chat_template_of, encode_chat
from jserve.text.gguf_tokenizer import tokenizer_from_gguf
from jserve.text.tokenizer import Tokenizer, load_tokenizer


class Codec(ABC):
    @abstractmethod
    def encode(self, text: str) -> list[int]: ...

    @abstractmethod
    def decode(self, token_ids: Iterable[int]) -> str: ...

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """A chat as plain text, for those without a template."""
        return self.encode("".join(f"{m.get('role')}: {m.get('content')}\n" for m in messages))


class ModelCodec(Codec):
    """Tokens as the model has them, chats in its own template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._template = chat_template_of(tokenizer)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return encode_chat(self._tokenizer, self._template, messages)

    def decode(self, token_ids: Iterable[int]) -> str:
        data = b"".join(map(self._tokenizer.token_bytes, map(int, token_ids)))
        return data.decode("utf-8", "replace")


class ByteCodec(Codec):
    """A token per byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def decode(self, token_ids: Iterable[int]) -> str:
        return bytes(i & 0xFF for i in token_ids).decode("utf-8", "replace")


class WordCodec(Codec):
    """A token per word, the white space before it included."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._words: list[str] = []

    def encode(self, text: str) -> list[int]:
        return [self._id_of(word) for word in re.findall(r"\s*\S+|\s+$", text)]

    def _id_of(self, word: str) -> int:
        token_id = self._ids.setdefault(word, len(self._words))
        if token_id == len(self._words):
            self._words.append(word)
        return token_id

    def decode(self, token_ids: Iterable[int]) -> str:
        return "".join(self._words[i] if i < len(self._words) else f"<{i}>" for i in token_ids)


class IdsOnly(Codec):
    """For logs of token ids, where no tokenizer is named."""

    def encode(self, text: str) -> list[int]:
        raise ConfigError(
            "the log holds texts; name what they are tokenised with: --model=..., or "
            "--tokenizer=whitespace or --tokenizer=bytes for an estimate"
        )

    def decode(self, token_ids: Iterable[int]) -> str:
        return "".join(f"<{i}>" for i in token_ids)


def make_codec(tokenizer: str, model: str, cache_dir: str) -> Codec:
    """Returns the codec that the flags name. Raises CheckpointError."""
    if tokenizer == "bytes":
        return ByteCodec()
    if tokenizer == "whitespace":
        return WordCodec()
    return ModelCodec(_load(model, cache_dir)) if model else IdsOnly()


def _load(model: str, cache_dir: str) -> Tokenizer:
    folder = Path(model).expanduser()
    if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        return load_tokenizer(folder)  # weights need not be there
    checkpoint = open_checkpoint(model, cache_dir)
    if checkpoint.gguf_metadata is not None:
        return tokenizer_from_gguf(checkpoint.gguf_metadata)
    if checkpoint.tokenizer_folder is None:
        raise CheckpointError(f"{checkpoint.source}: has no tokenizer files")
    return load_tokenizer(checkpoint.tokenizer_folder)
