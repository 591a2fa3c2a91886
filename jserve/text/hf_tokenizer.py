"""Reads the tokenizer of a Hugging Face model folder. Knows the folder's files, no models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from jserve.errors import CheckpointError
from jserve.text.gguf_tokenizer import backend_from_gguf
from jserve.text.sentencepiece_model import read_sentencepiece_model
from jserve.text.tokenizer import Tokenizer

SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def _token_strings(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens a config names; each is written as a string or as {"content": ...}."""
    tokens = {}
    for key in SPECIAL_TOKEN_KEYS:
        value = config.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str) and value:
            tokens[key] = value
    return tokens


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text("utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _load_backend(folder: Path) -> tokenizers.Tokenizer:
    file = folder / "tokenizer.json"
    if file.exists():
        try:
            return tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the Rust library raises bare Exceptions
            raise CheckpointError(f"{file} is not a tokenizer: {error}") from error
    model = folder / "tokenizer.model"
    if not model.exists():
        raise CheckpointError(f"{folder} holds no tokenizer: neither {file.name} nor {model.name}")
    return backend_from_gguf(read_sentencepiece_model(model))


def _eos_ids(folder: Path, own: int | None) -> list[int]:
    """The vocabulary's own EOS, then those of generation_config.json, or else config.json."""
    eos = _read_json(folder / "generation_config.json").get("eos_token_id")
    if eos is None:
        eos = _read_json(folder / "config.json").get("eos_token_id")
    listed = eos if isinstance(eos, list) else [eos]
    return [id for id in (own, *listed) if isinstance(id, int)]


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Reads the tokenizer of a Hugging Face model folder.

    Uses tokenizer.json, or else a SentencePiece tokenizer.model, with tokenizer_config.json,
    special_tokens_map.json and the EOS list of generation_config.json.

    Raises:
      CheckpointError: naming the file that is missing, damaged or of an unsupported kind.
    """
    folder = Path(folder)
    backend = _load_backend(folder)
    config = _read_json(folder / "tokenizer_config.json")
    named = _token_strings(_read_json(folder / "special_tokens_map.json")) | _token_strings(config)
    ids = {key: backend.token_to_id(token) for key, token in named.items()}
    bos = ids.get("bos_token")
    add_bos = config.get("add_bos_token")
    if not isinstance(add_bos, bool):  # then the file decides; SentencePiece models want it
        own = backend.encode("a").ids[:1] == [bos]
        add_bos = own or not (folder / "tokenizer.json").exists()
    return Tokenizer(
        backend,
        bos_token_id=bos,
        eos_token_ids=_eos_ids(folder, ids.get("eos_token")),
        add_bos=add_bos,
        extra_special_ids=[id for id in ids.values() if id is not None],
        chat_template=_chat_template(folder, config),
    )
