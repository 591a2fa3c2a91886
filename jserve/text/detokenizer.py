"""Turns one request's growing token ids into text that can be shown at once. Knows bytes and stop
strings: no requests, no clients."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import islice

from jserve.text.tokenizer import REPLACEMENT, Tokenizer

_MAX_UTF8_BYTES = 4
_FIRST_SYMBOL = 0xD800  # surrogates: UTF-8 text never holds them


class _StopMatcher:
    """Finds one stop string in text that comes in pieces (Knuth, Morris and Pratt, 1977)."""

    __slots__ = ("_fallback", "matched", "pattern", "stop")

    def __init__(self, stop: str, pattern: str) -> None:
        self.stop = stop  # as the caller wrote it
        self.pattern = pattern
        self.matched = 0  # characters of `pattern` that the text so far ends with
        self._fallback = [0]  # [k]: longest proper prefix of pattern that ends pattern[:k+1]
        for char in pattern[1:]:
            self._fallback.append(self._longest(self._fallback[-1], char))

    def _longest(self, matched: int, char: str) -> int:
        while matched and self.pattern[matched] != char:
            matched = self._fallback[matched - 1]
        return matched + (self.pattern[matched] == char)

    def feed(self, char: str) -> bool:
        """Takes the text's next character; returns whether it completes the pattern."""
        self.matched = self._longest(self.matched, char)
        return self.matched == len(self.pattern)


class Detokenizer:
    """Text of one request's output, in increments.

    Characters are given out only when whole, and text that may yet become a stop string is held
    back; what comes before token number `min_tokens` is part of none. Joined, the increments are
    what the output adds to the prompt: decode(prompt + output) less decode(prompt). Each token
    costs constant time per stop string.

    Args:
      keep: special tokens that are shown although `skip_special_tokens`.

    Attributes:
      stop_hit: the stop string that ended the text, or None.
      num_tokens_at_stop: output tokens up to and with the one that completed it, or None. Where
        stop strings overlap, the one that is complete first counts, and the longest of those.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        stop: tuple[str, ...] = (),
        skip_special_tokens: bool = True,
        keep: frozenset[int] = frozenset(),
        include_stop_str: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self.stop_hit: str | None = None
        self.num_tokens_at_stop: int | None = None
        self._tokenizer = tokenizer
        self._include_stop_str = include_stop_str
        specials = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._skipped = specials - keep
        self._num_tokens, self._min_tokens = 0, min_tokens
        self._held = ""  # whole characters that may belong to a stop string
        # Special tokens that are not shown but named in a stop string: a symbol that no text holds
        self._symbols: dict[int, str] = {}
        self._matchers = [_StopMatcher(s, self._with_symbols(s)) for s in stop]
        self._matchers += [_StopMatcher(s, s) for s in stop if self._symbols]
        self._stop_heads = frozenset(m.pattern[0] for m in self._matchers)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._drop_replacement = self._seed_utf8(prompt_token_ids)
        self._strip_space = tokenizer.strips_first_space and not self._any_text(prompt_token_ids)

    def add(self, token_ids: Sequence[int]) -> str:
        """Takes the next output ids, up to one that completes a stop string; the rest is ignored.

        Returns the text that is now sure; once `stop_hit` is set, all that there will be.
        """
        shown = ""
        for token_id in token_ids:
            if self.stop_hit is not None:
                break
            self._num_tokens += 1
            if token_id not in self._skipped:
                text = self._text(self._tokenizer.token_bytes(token_id))
                shown += self._release(text) if text else ""
            elif token_id in self._symbols:
                shown += self._release(self._symbols[token_id])
        return shown

    def finish(self) -> str:
        """Gives out what is still held, when generation ended for a reason other than a stop."""
        if self.stop_hit is not None:
            return ""
        shown = self._release(self._text(b"", final=True))
        if self.stop_hit is None:
            shown += self._take(len(self._held))
        return shown

    def _with_symbols(self, stop: str) -> str:
        """`stop` with each special token's text that would not be shown replaced by its symbol."""
        for token_id, start, end in reversed(self._tokenizer.special_spans(stop)):
            if token_id in self._skipped:
                symbol = chr(_FIRST_SYMBOL + len(self._symbols))
                symbol = self._symbols.setdefault(token_id, symbol)
                stop = stop[:start] + symbol + stop[end:]
        return stop

    def _any_text(self, token_ids: Sequence[int]) -> bool:
        token_bytes, skipped = self._tokenizer.token_bytes, self._skipped
        return any(id not in skipped and token_bytes(id) for id in token_ids)

    def _seed_utf8(self, prompt_token_ids: Sequence[int]) -> bool:
        """Lets the output complete a character that the prompt began; says whether it did begin."""
        shown = (id for id in reversed(prompt_token_ids) if id not in self._skipped)
        tail = b""
        # 4 non-empty tokens hold any character; empty ones are rare enough not to be searched past.
        for token_id in islice(shown, 2 * _MAX_UTF8_BYTES):
            tail = self._tokenizer.token_bytes(token_id) + tail
            if len(tail) >= _MAX_UTF8_BYTES:
                break
        self._utf8.decode(tail)
        return bool(self._utf8.getstate()[0])

    def _text(self, data: bytes, final: bool = False) -> str:
        """Characters that `data` completes; what belongs to the prompt's own text is left out."""
        text = self._utf8.decode(data, final)
        if text and self._drop_replacement:
            self._drop_replacement = False
            text = text.removeprefix(REPLACEMENT)  # the prompt's text ends with it already
        if text and self._strip_space:
            self._strip_space = False
            text = text.removeprefix(" ")
        return text

    def _release(self, text: str) -> str:
        """Matches `text` and returns what no longer can become part of a stop string."""
        if self._num_tokens < self._min_tokens:
            return self._shown(text)
        if not self._held and self._stop_heads.isdisjoint(text):
            return self._shown(text)
        start = len(self._held)
        self._held += text
        for end, char in enumerate(text, start + 1):
            hits = [m for m in self._matchers if m.feed(char)]
            if hits:
                hit = max(hits, key=lambda m: len(m.pattern))
                self.stop_hit = hit.stop
                self.num_tokens_at_stop = self._num_tokens
                return self._take(end if self._include_stop_str else end - len(hit.pattern))
        return self._take(len(self._held) - max(m.matched for m in self._matchers))

    def _take(self, end: int) -> str:
        """Cuts `_held` at `end` and returns what can be shown of the part before it."""
        text, self._held = self._held[:end], self._held[end:]
        return self._shown(text)

    def _shown(self, text: str) -> str:
        for symbol in self._symbols.values():
            text = text.replace(symbol, "")
        return text
