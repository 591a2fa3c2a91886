"""Splits what a model writes into content, reasoning and tool calls, as the text comes. Knows the
joint rules: formats are `output_formats`', parsing is `reasoning`'s and `call_parser`'s."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jserve.text.call_parser import CallParser, ToolCallDelta
from jserve.text.output_formats import OutputFormats
from jserve.text.reasoning import ReasoningSplitter


@dataclass(frozen=True)
class OutputDelta:
    """What some more text of an output adds. `tool_calls` has at most one piece of each call."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class OutputParser:
    """One output's content, reasoning and tool calls, in increments.

    However the text is cut, the joined result is the same. What may yet become a marker, or a call,
    is held back and given out as content where it is none: nothing is lost but markers, and white
    space next to a call or a block of reasoning; nothing comes twice.

    A call is given out from the moment that its name is known and its arguments begin, then piece
    by piece. Text that turns out to be no call before that (broken JSON, a function that was not
    offered) is content as it stands, markers and all. Where the JSON breaks later, the call ends
    there, counts as cut, and what follows is content.
    """

    def __init__(self, reasoning: ReasoningSplitter | None, calls: CallParser | None) -> None:
        self._reasoning = reasoning
        self._calls = calls

    @property
    def has_calls(self) -> bool:
        """Whether there is a complete call and none was cut: with an output that stopped by itself,
        this is finish reason `tool_calls`; one that ran into its limit keeps `length`."""
        calls = self._calls
        return calls is not None and calls.num_complete > 0 and not calls.is_cut

    def feed(self, text: str) -> OutputDelta:
        """Takes the output's next text and returns what is now sure."""
        reasoning, answer = self._reasoning.feed(text) if self._reasoning else ("", text)
        content, calls = self._calls.feed(answer) if self._calls else (answer, ())
        return OutputDelta(content, reasoning, calls)

    def finish(self) -> OutputDelta:
        """Returns what was held back; call it once, at the output's end."""
        reasoning, answer = self._reasoning.finish() if self._reasoning else ("", "")
        content, calls = self._calls.feed(answer) if self._calls else (answer, ())
        if self._calls:
            rest, more = self._calls.finish()
            content, calls = content + rest, calls + more
        return OutputDelta(content, reasoning, calls)


def output_parser(
    formats: OutputFormats,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: Any = None,
    inside_reasoning: bool = False,
) -> OutputParser:
    """A parser for one output (one choice of a request).

    Args:
      tools: OpenAI's list, as `encode_chat` checks it; without it no text is a call.
      tool_choice: OpenAI's; with "none" no text is a call.
      inside_reasoning: the prompt ends inside a block of reasoning (`reasoning.starts_inside`).
    """
    reasoning = (
        ReasoningSplitter(*formats.reasoning, inside_reasoning) if formats.reasoning else None
    )
    calls = None
    if tools and tool_choice != "none" and formats.tool_calls is not None:
        calls = CallParser(formats.tool_calls, {tool["function"]["name"] for tool in tools})
    return OutputParser(reasoning, calls)
