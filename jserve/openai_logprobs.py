"""Shapes log-probabilities as OpenAI bodies have them, and finds where tokens are in the text.
Knows tokens and text: no requests, no transport.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jserve.messages import TokenLogprobs
from jserve.text.detokenizer import Detokenizer
from jserve.text.tokenizer import Tokenizer


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """The token's text, or "bytes:\\xf0\\x9f" where it is a part of a character, as OpenAI has it,
    or "token_id:7" where it has none: two tokens must never have one name."""
    data = tokenizer.token_bytes(token_id)
    if not data:
        return f"token_id:{token_id}"
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(logprobs: Iterable[TokenLogprobs], tokenizer: Tokenizer) -> dict[str, Any]:
    """Those of a chat's output tokens, an object for each."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        return {"token": token_name(tokenizer, token_id), "logprob": logprob, "bytes": list(data)}

    return {
        "content": [
            entry(p.token_id, p.logprob) | {"top_logprobs": [entry(*top) for top in p.top]}
            for p in logprobs
        ]
    }


def columns(
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    offsets: list[int],
    tokenizer: Tokenizer,
) -> dict[str, list[Any]]:
    """Those of a completion, which come as columns."""

    def name(token_id: int) -> str:
        return token_name(tokenizer, token_id)

    return {
        "tokens": [name(token_id) for token_id in token_ids],
        "token_logprobs": [p and p.logprob for p in logprobs],
        "top_logprobs": [p and {name(i): value for i, value in p.top} for p in logprobs],
        "text_offset": offsets,
    }


def prompt_logprobs(
    logprobs: Iterable[TokenLogprobs | None], tokenizer: Tokenizer
) -> list[dict[str, Any] | None]:
    """Those of a prompt's tokens: for each the alternatives and itself, by id."""
    return [None if p is None else _prompt_entry(p, tokenizer) for p in logprobs]


def _prompt_entry(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, Any]:
    ranked = [(i, value, rank) for rank, (i, value) in enumerate(entry.top, 1)]
    return {
        str(i): {
            "logprob": value,
            "rank": rank,
            "decoded_token": token_name(tokenizer, i),
        }
        for i, value, rank in [*ranked, (entry.token_id, entry.logprob, entry.rank)]
    }


class TextOffsets:
    """Where in a text each of its tokens begins, in characters; text and tokens may come in pieces.

    Args:
      prompt_token_ids: what is before the text, whose last character it may complete.
      start: of the text, in what the caller shows.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        start: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(
            tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens
        )
        self._start = start
        self._end = 0
        self._text = ""

    def take(self, token_ids: Iterable[int], text: str, *, is_last: bool) -> list[int]:
        """Returns those of the next tokens. What is not shown takes no room; the parts of one
        character all begin where it does. With the last text, none lies beyond its end."""
        self._text += text
        starts = []
        for token_id in token_ids:
            starts.append(self._start + self._end)
            piece = self._detokenizer.add((token_id,))
            if not piece and token_id in self._tokenizer.special_token_ids:
                name = token_name(self._tokenizer, token_id)
                # It is shown where the caller has written it.
                piece = name if self._text.startswith(name, self._end) else ""
            self._end += len(piece)
            if is_last:
                self._end = min(self._end, len(self._text))
        limit = self._start + len(self._text)
        return [min(start, limit) for start in starts] if is_last else starts
