"""Which tokens a choice may take next, as a bit for each token of the vocabulary. Knows token ids
and grammars' matchers: no rows, no devices."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy
from typing import Protocol

import numpy as np

ALL = 0xFFFFFFFF  # of a word
BITS = 32  # of a word: bit v % 32 of word v // 32 is that of token v
# Which is the caller's mistake; all else that ends an output here is not.
CONTRADICTION = "the request's settings together allow no token here"


class Matcher(Protocol):
    """Where one output stands in its grammar (text/grammar.py)."""

    @property
    def error(self) -> str | None: ...

    @property
    def is_finished(self) -> bool: ...

    def fill(self, words: np.ndarray) -> bool: ...

    def accept(self, token_id: int) -> bool: ...

    def forced_tokens(self) -> list[int]: ...

    def copy(self) -> Matcher: ...


class Constraint:
    """The tokens that one choice may take, given what it has so far.

    Args:
      allowed_token_ids: None is all.
      bad_word_ids: sequences of token ids that the output may not hold; the prompt is no part.
      min_tokens: before so many, none of `stop_token_ids` may come.
      matcher: of a grammar; it sees each token once, by `accept`.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        allowed_token_ids: Sequence[int] | None = None,
        bad_word_ids: Sequence[tuple[int, ...]] = (),
        min_tokens: int = 0,
        stop_token_ids: Collection[int] = (),
        matcher: Matcher | None = None,
    ) -> None:
        self.matcher = matcher
        self._fault = ""  # why nothing more can be said
        self._min_tokens = min_tokens
        self._not_stop = ~_bits(vocab_size, stop_token_ids)
        never = [ids[0] for ids in bad_word_ids if len(ids) == 1]
        self._always = ~_bits(vocab_size, never)
        self._always[-1] &= np.uint32(ALL >> -vocab_size % BITS)  # what lies beyond is no token
        if allowed_token_ids is not None:
            self._always &= _bits(vocab_size, allowed_token_ids)
        self._is_grammar_alone = allowed_token_ids is None and not (bad_word_ids or min_tokens)
        self._bad_after: dict[int, list[tuple[int, ...]]] = {}  # by their last token but one
        for ids in bad_word_ids:
            if len(ids) > 1:
                self._bad_after.setdefault(ids[-2], []).append(ids)

    def for_another(self, matcher: Matcher | None) -> Constraint:
        """The same for another choice that begins, at a copy of `matcher`; the rest is shared."""
        other = copy(self)
        other.matcher = matcher and matcher.copy()
        return other

    def fill(self, words: np.ndarray, output_token_ids: Sequence[int], num_output: int) -> str:
        """Writes the bits u32[W] of token number `num_output`, counted from 0, after those of
        `output_token_ids`. Returns why no token may come; "" where some may."""
        try:
            return self._fault or self._fill(words, output_token_ids, num_output)
        except Exception as error:  # it may end this output, and no other
            return self._fault_of(error)

    def _fault_of(self, error: Exception) -> str:
        self._fault = f"what the output is limited to failed: {error!r:.200}"
        return self._fault

    def _fill(self, words: np.ndarray, output_token_ids: Sequence[int], num_output: int) -> str:
        if self.matcher is None:
            words.fill(ALL)
        elif not self.matcher.fill(words):
            return self.matcher.error or "the grammar allows no token here"
        words &= self._always
        if num_output < self._min_tokens:
            words &= self._not_stop
        last = output_token_ids[-1] if output_token_ids else -1
        for ids in self._bad_after.get(last, ()):
            if tuple(output_token_ids[1 - len(ids) :]) == ids[:-1]:
                words[ids[-1] // BITS] &= np.uint32(ALL ^ (1 << ids[-1] % BITS))
        return "" if words.any() else CONTRADICTION

    def accept(self, token_id: int) -> None:
        """Goes on by one token."""
        if self.matcher is None:
            return
        try:
            if not self.matcher.accept(token_id):
                self._fault = self.matcher.error or f"the grammar does not take token {token_id}"
        except Exception as error:
            self._fault_of(error)

    @property
    def is_complete(self) -> bool:
        """Whether the output is whole, so that only an end may follow."""
        return self.matcher is not None and self.matcher.is_finished

    def forced_tokens(self) -> list[int]:
        """Returns the tokens that have to come next, if they are sure."""
        if self.matcher is None or not self._is_grammar_alone:
            return []
        return self.matcher.forced_tokens()


def num_mask_words(vocab_size: int) -> int:
    return -(-vocab_size // BITS)


def _bits(vocab_size: int, token_ids: Collection[int] | Sequence[int]) -> np.ndarray:
    """Returns u32[W] with the bits of `token_ids` set."""
    flags = np.zeros(num_mask_words(vocab_size) * BITS, bool)
    flags[np.fromiter(token_ids, np.int64, len(token_ids))] = True
    return np.packbits(flags, bitorder="little").view(np.uint32)
