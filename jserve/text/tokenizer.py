"""Turns text into token ids and back. Knows vocabularies and their files: no models or requests.

Decoding is defined on bytes: every id stands for fixed bytes (`Tokenizer.token_bytes`), and text is
those bytes read as UTF-8, malformed ones as U+FFFD. So text can be decoded id by id at constant
cost, and joined pieces always equal the whole, which a decoder that looks at the whole sequence
cannot promise.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from jserve.errors import CheckpointError, InvalidRequest

REPLACEMENT = "\ufffd"
_QUICK_CHARS = 1000  # that are encoded in well under a millisecond
SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


def _byte_alphabet() -> dict[str, int]:
    """Characters that byte-level BPE writes for the 256 bytes (the GPT-2 alphabet)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(plain)]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()


class _TokenSpelling:
    """How one token of the vocabulary is spelled in bytes, read off the backend's decoder."""

    def __init__(self, decoder: Any) -> None:
        if decoder is None:
            raise CheckpointError("tokenizer has no decoder, so its ids cannot be turned into text")
        spec = json.loads(decoder.__getstate__())
        steps = spec["decoders"] if spec["type"] == "Sequence" else [spec]
        self.byte_level = False
        self.byte_fallback = False
        self.strips_first_space = False
        self.replacements: list[tuple[str, str]] = []
        for step in steps:
            self._read(step)

    def _read(self, step: Mapping[str, Any]) -> None:
        kind = step["type"]
        if kind == "ByteLevel":
            self.byte_level = True
        elif kind == "ByteFallback":
            self.byte_fallback = True
        elif kind == "Replace" and "String" in step["pattern"]:
            self.replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace":
            self.replacements.append((step["replacement"], " "))
            self.strips_first_space |= step.get("prepend_scheme", "always") != "never"
        elif kind == "Strip" and (step["content"], step["start"], step["stop"]) == (" ", 1, 0):
            self.strips_first_space = True
        elif kind != "Fuse":
            raise CheckpointError(
                f"tokenizer decoder {step} is not supported; "
                "known: ByteLevel, ByteFallback, Replace, Metaspace, Strip of one space, Fuse"
            )

    def __call__(self, token: str) -> bytes:
        if self.byte_fallback and len(token) == 6 and token.startswith("<0x") and token[5] == ">":
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_level:
            try:
                return bytes([BYTE_ALPHABET[char] for char in token])
            except KeyError:  # an added token, spelled as it is
                pass
        return token.encode()


class Tokenizer:
    """A vocabulary with the settings that a model's files give it. Safe to share among threads.

    Attributes:
      vocab_size: one more than the largest id that the vocabulary knows.
      longest_token_chars: no token stands for more characters of a text.
      bos_token_id: the id that begins a text, or None.
      eos_token_ids: every id that ends a generation, the vocabulary's own first.
      add_bos: whether `encode` begins texts with BOS.
      special_token_ids: ids that steer the model and are no part of its text.
      chat_template: Jinja source from the model's files, or None.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Iterable[int] = (),
        add_bos: bool = False,
        extra_special_ids: Iterable[int] = (),
        chat_template: str | None = None,
        vocab_size: int | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.add_bos = add_bos and bos_token_id is not None
        self.chat_template = chat_template
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(
            [id for id, token in added.items() if token.special] + list(extra_special_ids)
        )
        # Where ids have holes, the number of tokens is less than the largest id.
        self.vocab_size = vocab_size or max(backend.get_vocab_size(), *(id + 1 for id in added), 0)
        self.longest_token_chars = max(map(len, backend.get_vocab()), default=1)
        self._spelling = _TokenSpelling(backend.decoder)
        self._bytes: dict[int, bytes] = {}
        # A content without any of these characters cannot hold a special token's text.
        self._special_heads = frozenset(
            added[id].content[0] for id in self.special_token_ids if id in added
        )

    @property
    def strips_first_space(self) -> bool:
        """Whether one leading space of a whole text is the vocabulary's own and not shown."""
        return self._spelling.strips_first_space

    @property
    def bos_token(self) -> str:
        """BOS as templates write it; empty where there is none."""
        return self._text_of(self.bos_token_id)

    @property
    def eos_token(self) -> str:
        """The vocabulary's own EOS as templates write it; empty where there is none."""
        return self._text_of(next(iter(self.eos_token_ids), None))

    def _text_of(self, token_id: int | None) -> str:
        return "" if token_id is None else self._backend.id_to_token(token_id) or ""

    def settings(self) -> dict[str, Any]:
        """Returns what Hugging Face's libraries call a tokenizer's config; None for what it has
        not."""
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self.bos_token or None,
            "eos_token": self.eos_token or None,
            "add_bos_token": self.add_bos,
            "chat_template": self.chat_template,
            "clean_up_tokenization_spaces": False,
        }

    def files(self) -> dict[str, str]:
        """Returns what Hugging Face's libraries need to make the same of texts and chats: a text
        for each file name, wherever this tokenizer came from."""
        return {
            "tokenizer.json": self._backend.to_str(),
            "tokenizer_config.json": json.dumps(
                {name: value for name, value in self.settings().items() if value is not None}
            ),
        }

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of text that `token_id` stands for; none for an id outside the vocabulary."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
            known = self._bytes[token_id] = b"" if token is None else self._spelling(token)
        return known

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`.

        Special tokens' text in `text` becomes their ids, as elsewhere in the ecosystem; chat
        messages are kept from that by `jserve.text.chat.encode_chat`. With `add_special_tokens`,
        BOS comes first where the model wants one, and never twice if the text has it already.

        Raises:
          InvalidRequest: `text` is no valid Unicode (it holds half of a surrogate pair).
        """
        ids, _ = self.encode_with_offsets(text)
        bos = self.bos_token_id
        if add_special_tokens and self.add_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of `text`, no BOS added, and each one's half-open span of characters."""
        try:
            if len(text) <= _QUICK_CHARS:
                encoding = self._backend.encode(text, add_special_tokens=False)
            else:  # unlike the above it lets other threads run, for up to a second
                [encoding] = self._backend.encode_batch([text], add_special_tokens=False)
        except (TypeError, UnicodeEncodeError) as error:  # which one depends on the library
            raise InvalidRequest(
                "the text is not valid Unicode (half a surrogate pair?)"
            ) from error
        return encoding.ids, encoding.offsets

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of `text` read as mere characters: none of them is a special id."""
        backend = self._backend
        normalized = backend.normalizer.normalize_str(text) if backend.normalizer else text
        pieces = [normalized]
        if backend.pre_tokenizer:
            pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(normalized)]
        ids = [token.id for piece in pieces for token in backend.model.tokenize(piece)]
        if self.special_token_ids.isdisjoint(ids):
            return ids
        # Some vocabularies can spell a special token by merging. No single character is one.
        ids = [token.id for piece in pieces for c in piece for token in backend.model.tokenize(c)]
        return [id for id in ids if id not in self.special_token_ids]

    def special_spans(self, text: str) -> list[tuple[int, int, int]]:
        """Each special id that `encode(text)` would hold, with its half-open span of characters:
        (id, start, end)."""
        if self._special_heads.isdisjoint(text):
            return []
        ids, offsets = self.encode_with_offsets(text)
        specials = self.special_token_ids
        return [(id, *span) for id, span in zip(ids, offsets, strict=True) if id in specials]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Ids outside the vocabulary are empty; malformed UTF-8 is U+FFFD."""
        skipped = self.special_token_ids if skip_special_tokens else ()
        data = b"".join(self.token_bytes(id) for id in ids if id not in skipped)
        if self.strips_first_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")


def check_length(tokenizer: Tokenizer, num_chars: int, max_tokens: int) -> None:
    """Refuses a text that no tokenisation could make fit, before minutes are spent on trying.
    Raises InvalidRequest."""
    most = max_tokens * tokenizer.longest_token_chars
    if num_chars > most:
        raise InvalidRequest(
            f"the prompt has {num_chars} characters; max_model_len={max_tokens} tokens hold at "
            f"most {most}"
        )


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
        try:
            return file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{file} cannot be read as text: {error}") from error
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        entries = [entry for entry in template if isinstance(entry, dict)]
        named = {entry.get("name"): entry.get("template") for entry in entries}
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
    from jserve.text.gguf_tokenizer import backend_from_gguf  # which imports this module
    from jserve.text.sentencepiece_model import read_sentencepiece_model

    return backend_from_gguf(read_sentencepiece_model(model))


def _eos_ids(folder: Path, own: int | None) -> list[int]:
    """The vocabulary's own EOS, then those of generation_config.json, or else config.json."""
    eos = _read_json(folder / "generation_config.json").get("eos_token_id")
    if eos is None:
        eos = _read_json(folder / "config.json").get("eos_token_id")
    listed = eos if isinstance(eos, list) else [eos]
    return [id for id in (own, *listed) if isinstance(id, int) and id >= 0]  # -1: there is none


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
