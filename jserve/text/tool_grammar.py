"""Writes the grammar that makes a model call a tool. Knows the formats and llguidance's Lark: no
tokens' masks, no parsing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jserve.errors import InvalidRequest
from jserve.structured import GrammarKind, StructuredOutput
from jserve.text.output_formats import OutputFormats, ToolCallFormat
from jserve.text.tools import Tool, forced_tools

# Spaces as templates' own JSON has them, so as models learnt it; no others.
_LIKE_TEMPLATES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def tool_grammar(
    tools: Sequence[Tool] | None,
    tool_choice: Any,
    formats: OutputFormats,
    *,
    inside_reasoning: bool = False,
) -> StructuredOutput | None:
    """The form of an output that has to call a tool, or None where `tool_choice` asks for none.

    The call is in the model's own format, its arguments follow the function's JSON Schema, and
    reasoning may precede it where the model marks it. "required" allows several calls, where the
    format has them; a named function is called once.

    Args:
      tools, tool_choice: OpenAI's; the tools as `checked_tools` returns them.
      inside_reasoning: as `output_parser`'s.

    Raises:
      InvalidRequest: a bad choice, or a model whose template shows no known format of calls.
    """
    forced = forced_tools(tools, tool_choice)
    if not forced:
        return None
    if formats.tool_calls is None:
        raise InvalidRequest(
            f"{tool_choice=} needs a model whose chat template writes tool calls in a known form; "
            'use tool_choice="auto"'
        )
    rules = _Rules(formats)
    calls = rules.calls(formats.tool_calls, forced, several=tool_choice == "required")
    rules.add("start", f"{rules.reasoning(inside_reasoning)} {calls}".strip())
    return StructuredOutput(GrammarKind.LARK, rules.text())


class _Rules:
    """Lark rules that are collected while the later ones are written."""

    def __init__(self, formats: OutputFormats) -> None:
        self._formats = formats
        self._special = dict(formats.special_ids)
        self._rules: list[str] = []

    def add(self, name: str, body: str) -> str:
        self._rules.append(f"{name}: {body}")
        return name.partition("[")[0]

    def text(self) -> str:
        return "\n".join(["%llguidance {}", *self._rules])

    def marker(self, text: str, after: str = "") -> str:
        """A marker, as the token that it is or as text, and text that follows it."""
        if text in self._special:
            return f"<[{self._special[text]}]> {_quoted(after)}".rstrip()
        return _quoted(text + after)

    def reasoning(self, inside: bool) -> str:
        """What may, or where the prompt began it must, precede the calls."""
        if self._formats.reasoning is None:
            return ""
        start, end = self._formats.reasoning
        if end in self._special:
            body = self.add("thought", rf"/(.|\n)*/ {self.marker(end)}")
        else:
            body = self.add("thought[lazy]", rf"/(.|\n)*/ {_quoted(end)}")
        if inside:
            return rf"{body} /\n{{0,2}}/"
        return self.add("reasoning", rf"{self.marker(start)} {body} /\n{{0,2}}/") + "?"

    def calls(self, format: ToolCallFormat, tools: Sequence[Tool], several: bool) -> str:
        options = [self._call(format, i, tool["function"]) for i, tool in enumerate(tools)]
        call = self.add("call", " | ".join(options))
        if format == ToolCallFormat.MISTRAL:
            more = f'(", " {call})*' if several else ""
            return f'{self.marker("[TOOL_CALLS]", "[")} {call} {more} "]"'
        if format == ToolCallFormat.LLAMA3 or not several:  # Llama 3 knows one call only
            return call
        separator = _quoted("\n") if format == ToolCallFormat.HERMES else ""
        return f"{call} ({separator} {call})*"

    def _call(self, format: ToolCallFormat, index: int, function: Any) -> str:
        """One function's call; returns the rule's name."""
        arguments = self._arguments(index, function)
        name = json.dumps(function["name"])
        key = "parameters" if format == ToolCallFormat.LLAMA3 else "arguments"
        before = f'{{"name": {name}, "{key}": '
        if format == ToolCallFormat.HERMES:
            opening = self.marker("<tool_call>", "\n" + before)
            body = f'{opening} {arguments} "}}\\n" {self.marker("</tool_call>")}'
        elif format == ToolCallFormat.MISTRAL_ARGS:
            opening = f"{self.marker('[TOOL_CALLS]', function['name'])} {self.marker('[ARGS]')}"
            body = f"{opening} {arguments}"
        else:
            body = f'{_quoted(before)} {arguments} "}}"'
        return self.add(f"call_{index}", body)

    def _arguments(self, index: int, function: Any) -> str:
        """The arguments: of any kind that the schema allows, whose unknown words count as none
        unless the function is strict."""
        schema = function.get("parameters")
        if not schema:
            return '"{}"'
        options = {**_LIKE_TEMPLATES, "lenient": not function.get("strict")}
        schema = {"type": "object", **schema, "x-guidance": options}
        return self.add(f"arguments_{index}", f"%json {json.dumps(schema)}")


def _quoted(text: str) -> str:
    """Text as Lark writes it; nothing for none."""
    return json.dumps(text) if text else ""
