"""Splits a model's reasoning off its answer as the text comes. Knows the two markers: no requests,
no tool calls."""

from __future__ import annotations

from collections.abc import Sequence

from jserve.text.tokenizer import Tokenizer

_TAIL_TOKENS = 16  # a generation prompt that opens the reasoning ends with its marker


class ReasoningSplitter:
    """Splits text into (reasoning, answer), in increments.

    A block counts only where it begins the output, once: later markers are the answer's own text.
    Newlines next to the markers belong to them, as chat templates write them so. A block that never
    ends takes all the text there is.

    Args:
      start, end: the markers.
      inside: the prompt has the start marker already.
    """

    def __init__(self, start: str, end: str, inside: bool = False) -> None:
        self._start, self._end = start, end
        self._state = self._inside if inside else self._before
        self._held = ""  # may be a part of a marker, or newlines next to one
        self._at_edge = True  # only newlines since the marker

    def feed(self, text: str) -> tuple[str, str]:
        """Takes the next text and returns what is now sure of (reasoning, answer)."""
        self._held += text
        reasoning = answer = ""
        state = None
        while state != self._state:  # a marker was passed: the rest is another state's
            state = self._state
            more_reasoning, more_answer = state()
            reasoning += more_reasoning
            answer += more_answer
        return reasoning, answer

    def finish(self) -> tuple[str, str]:
        """Returns what was held back, at the output's end."""
        rest, self._held = self._held, ""
        return (rest.rstrip("\n"), "") if self._state == self._inside else ("", rest)

    def _before(self) -> tuple[str, str]:
        text = self._held.lstrip()
        if text.startswith(self._start):
            self._held = text[len(self._start) :]
            self._state = self._inside
        elif not self._start.startswith(text):
            self._at_edge = False
            self._state = self._after
        return "", ""

    def _inside(self) -> tuple[str, str]:
        text = self._trimmed()
        body, found, rest = text.partition(self._end)
        if found:
            self._held = rest
            self._at_edge = True
            self._state = self._after
            return body.rstrip("\n"), ""
        keep = len(text) - _held_from(text, self._end)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], ""

    def _after(self) -> tuple[str, str]:
        text, self._held = self._trimmed(), ""
        return "", text

    def _trimmed(self) -> str:
        text = self._held.lstrip("\n") if self._at_edge else self._held
        self._at_edge = self._at_edge and not text
        return text


def _held_from(text: str, marker: str) -> int:
    """Where the end of `text` begins that may yet be newlines before `marker`, or a part of it."""
    longest = min(len(marker) - 1, len(text))
    part = next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
    return len(text[: len(text) - part].rstrip("\n"))


def starts_inside(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int], reasoning: tuple[str, str] | None
) -> bool:
    """Whether a prompt ends with the marker that begins reasoning: then the output goes on in it.

    Only white space may follow the marker: a marker in a message is no sign of it.
    """
    if reasoning is None:
        return False
    tail = tokenizer.decode(prompt_token_ids[-_TAIL_TOKENS:], skip_special_tokens=False)
    return tail.rstrip().endswith(reasoning[0])
