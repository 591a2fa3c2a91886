"""Turns text into token ids and back. Knows vocabularies: no files, models, requests or devices.

Decoding is defined on bytes: every id stands for fixed bytes (`Tokenizer.token_bytes`), and text is
those bytes read as UTF-8, malformed ones as U+FFFD. So text can be decoded id by id at constant
cost, and joined pieces always equal the whole, which a decoder that looks at the whole sequence
cannot promise.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers

from jserve.errors import CheckpointError, InvalidRequest

REPLACEMENT = "\ufffd"


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
        if add_special_tokens and self.add_bos and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of `text`, no BOS added, and each one's half-open span of characters."""
        try:
            encoding = self._backend.encode(text, add_special_tokens=False)
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
