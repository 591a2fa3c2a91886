"""Writes the grammar of outputs that call tools. Knows the formats and llguidance's Lark: no masks
and no parsing."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jserve.errors import InvalidRequest
from jserve.structured import GrammarKind, OwnLark, StructuredOutput
from jserve.text.json_schema_keywords import ANNOTATIONS, OF_SCHEMAS, OF_SCHEMAS_BY_NAME
from jserve.text.json_schema_rules import check_schema
from jserve.text.output_formats import MARKERS, OutputFormats, ToolCallFormat
from jserve.text.tools import Tool, forced_tools

MAX_CHARS = 2**17  # 0.1 s to compile: 128 functions of ten arguments each
_ANY = r"(.|\n)*"
# Spaces as templates' own JSON has them, so as models learnt it; no others.
_LIKE_TEMPLATES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def tool_grammar(
    tools: Sequence[Tool] | None,
    tool_choice: Any,
    formats: OutputFormats,
    *,
    inside_reasoning: bool = False,
) -> StructuredOutput | None:
    """The form of an output that has to call a tool, or that may call a strict one.

    Calls are in the model's own format, and their arguments follow the function's JSON Schema.
    "required" allows several calls, where the format has them; a named function is called once.
    Otherwise a grammar is needed only if some function is strict: text is free up to a call.
    Reasoning may precede it all where the model marks it.

    Args:
      tools, tool_choice: OpenAI's; the tools as `checked_tools` returns them.
      inside_reasoning: as `output_parser`'s.

    Returns None where the output may have any form.

    Raises:
      InvalidRequest: a bad choice, or a model whose template shows no known format of calls.
    """
    forced = forced_tools(tools, tool_choice)
    offered = tools if tools and tool_choice != "none" else ()
    if not forced and not any(tool["function"].get("strict") for tool in offered):
        return None
    if formats.tool_calls is None:
        raise InvalidRequest(
            f"{tool_choice=}, or a strict function, needs a model whose chat template writes tool "
            'calls in a known form; use tool_choice="auto" and no strict function'
        )
    rules = _Rules(formats, formats.tool_calls)
    preface = rules.reasoning(inside_reasoning)
    if forced:
        output = rules.forced(forced, several=tool_choice == "required")
    else:
        output = rules.free(offered)
    rules.add("start", f"{preface} {output}".strip())
    text = rules.text()
    if len(text) > MAX_CHARS:
        raise InvalidRequest(
            f"{len(forced or offered)} functions make a grammar of {len(text)} characters, over "
            f"{MAX_CHARS}; to force a call, or with strict ones, offer fewer or simpler ones"
        )
    return OwnLark(GrammarKind.LARK, text)


class _Rules:
    """Lark rules, collected while those that use them are written."""

    def __init__(self, formats: OutputFormats, format: ToolCallFormat) -> None:
        self._formats = formats
        self._format = format
        self._special = dict(formats.special_ids)
        self._rules: list[str] = []

    def add(self, name: str, body: str) -> str:
        self._rules.append(f"{name}: {body}")
        return name.partition("[")[0]

    def text(self) -> str:
        return "\n".join(["%llguidance {}", *self._rules])

    def reasoning(self, inside: bool) -> str:
        """What may, or where the prompt began it must, precede the rest."""
        if self._formats.reasoning is None:
            return ""
        start, end = self._formats.reasoning
        thought = self._text_until("thought", end)
        if inside:
            return rf"{thought} /\n{{0,2}}/"
        return self.add("reasoning", rf"{self._marker(start)} {thought} /\n{{0,2}}/") + "?"

    def forced(self, tools: Sequence[Tool], several: bool) -> str:
        """Calls and nothing else."""
        body = self._body(tools, several)
        if self._format == ToolCallFormat.LLAMA3:
            return body
        group = f"{self._marker(MARKERS[self._format][0])} {body}"
        if not several or self._format == ToolCallFormat.MISTRAL:
            return group
        separator = '"\\n"' if self._format == ToolCallFormat.HERMES else ""
        return f"{group} ({separator} {group})*"

    def free(self, tools: Sequence[Tool]) -> str:
        """Any text in which what begins as a call is one."""
        body = self._body(tools, several=True)
        if self._format == ToolCallFormat.LLAMA3:  # an object at the beginning is a call
            text = self.add("TEXT", rf"/\s*([^{{\s]{_ANY})?/{self._no_thought()}")
            return self.add("output", f"{body} | {text}")
        text = self.add("TEXT", f"/{_ANY}/{self._no_thought()}")
        opening = self._text_until("opening", MARKERS[self._format][0], text)
        return f"({opening} {body})* {text}"

    def _no_thought(self) -> str:
        """Keeps text from beginning as reasoning does: llguidance takes the longest lexeme."""
        start = (self._formats.reasoning or ("",))[0]
        if not start or start in self._special:
            return ""
        return f" & ~/{re.escape(start)}{_ANY}/"

    def _marker(self, text: str) -> str:
        """A marker, as the token that it is or as text."""
        return f"<[{self._special[text]}]>" if text in self._special else json.dumps(text)

    def _text_until(self, name: str, marker: str, text: str = f"/{_ANY}/") -> str:
        how = "" if marker in self._special else "[lazy]"
        return self.add(name + how, f"{text} {self._marker(marker)}")

    def _body(self, tools: Sequence[Tool], several: bool) -> str:
        """What follows a format's first marker."""
        options = [self._call(i, tool["function"]) for i, tool in enumerate(tools)]
        call = self.add("call", " | ".join(options))
        if self._format != ToolCallFormat.MISTRAL:
            return call
        more = f'(", " {call})*' if several else ""
        return self.add("calls", rf'/ ?\[/ {call} {more} "]"')

    def _call(self, index: int, function: Mapping[str, Any]) -> str:
        name, arguments = json.dumps(function["name"]), self._arguments(index, function)
        if self._format == ToolCallFormat.MISTRAL_ARGS:
            return self.add(f"call_{index}", f"{name} {self._marker('[ARGS]')} {arguments}")
        key = "parameters" if self._format == ToolCallFormat.LLAMA3 else "arguments"
        before, after = f'{{"name": {name}, "{key}": ', "}"
        if self._format == ToolCallFormat.HERMES:
            before, after = f"\n{before}", f"{after}\n"
        body = f"{json.dumps(before)} {arguments} {json.dumps(after)}"
        if self._format == ToolCallFormat.HERMES:
            body += f" {self._marker('</tool_call>')}"
        return self.add(f"call_{index}", body)

    def _arguments(self, index: int, function: Mapping[str, Any]) -> str:
        """Words of a schema that llguidance does not know are passed over, but not where the
        function is strict."""
        schema = function.get("parameters")
        if not schema:
            return '"{}"'
        if function.get("strict"):
            schema = check_schema(f"tools: {function['name']}.parameters", schema)
        options = {**_LIKE_TEMPLATES, "lenient": True}
        schema = {"type": "object", **_undescribed(schema), "x-guidance": options}
        return self.add(f"arguments_{index}", f"%json {json.dumps(schema)}")


def _undescribed(schema: Any) -> Any:
    """A schema without its descriptions, which make most of its length and change no grammar."""
    if isinstance(schema, (list, tuple)):
        return [_undescribed(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    bare = {}
    for key, value in schema.items():
        if key in OF_SCHEMAS_BY_NAME and isinstance(value, Mapping):
            bare[key] = {name: _undescribed(item) for name, item in value.items()}
        elif key not in ANNOTATIONS or key.startswith("$"):
            bare[key] = _undescribed(value) if key in OF_SCHEMAS else value
    return bare
