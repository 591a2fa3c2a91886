"""Splits a model's answer into content and tool calls, as the text comes. Knows the formats of
calls: no reasoning, no templates, no requests."""

from __future__ import annotations

import secrets
import string
from collections.abc import Collection, Generator
from dataclasses import dataclass, field
from typing import Any

from jserve.text.json_object import ArgumentsObject, CallObject
from jserve.text.output_formats import ToolCallFormat

_SPACE = " \t\r\n"
_END = ""  # read at the end of the text
_ID_CHARS = string.ascii_letters + string.digits
_MAX_HEADER_CHARS = 256
_Reading = Generator[None, str, Any]  # is sent one character after the other, then `_END`


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of one tool call: the first has id and name, the later ones arguments only.

    `arguments` are the model's own JSON text; joined over a call's pieces they are whole.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass
class _Call:
    index: int
    id: str | None
    name: str | None
    arguments: list[str] = field(default_factory=list)


class CallParser:
    """Parses one answer; `jserve.text.tool_calls.OutputParser` says by which rules.

    The formats below are generators over these primitives, each of which reads characters until it
    knows. What one reads and does not want is put back.
    """

    def __init__(self, format: ToolCallFormat, names: Collection[str]) -> None:
        self.num_complete = 0
        self.is_cut = False  # some call began and did not end
        self.names = names
        self._short_ids = format in (ToolCallFormat.MISTRAL, ToolCallFormat.MISTRAL_ARGS)
        self._num_calls = 0
        self._ended = False
        self._back = ""  # put back, to be read again
        self._raw = ""  # read and not yet given out: markers, space, a call that may be none
        self._after_content = False  # text stands since the last call
        self._content: list[str] = []
        self._calls: list[_Call] = []
        self._reading = _READERS[format](self)
        next(self._reading)

    def feed(self, text: str) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """Takes the next text and returns what is now sure of (content, calls)."""
        for char in text:
            self._reading.send(char)
        return self._taken()

    def finish(self) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """Returns what was held back, at the output's end."""
        self._ended = True
        self._reading.send(_END)
        return self._taken()

    def _taken(self) -> tuple[str, tuple[ToolCallDelta, ...]]:
        content, self._content = "".join(self._content), []
        calls, self._calls = self._calls, []
        deltas = [ToolCallDelta(c.index, c.id, c.name, "".join(c.arguments)) for c in calls]
        return content, tuple(deltas)

    def read(self) -> _Reading:
        """The next character, or `_END`, over and over."""
        if self._back:
            char, self._back = self._back[0], self._back[1:]
            return char
        return _END if self._ended else (yield)

    def put_back(self, text: str) -> None:
        self._back = text + self._back

    def content(self, text: str = "") -> None:
        """Gives out what was held back, and `text`, as content."""
        self._content += (self._raw, text)
        self._raw = ""
        self._after_content = True

    def until(self, marker: str, at_once: str | None = None) -> _Reading:
        """Gives out content up to `marker`, and without the space before it.

        `at_once` counts too where nothing but space precedes it; it is then left to be read.
        """
        part = ""
        while True:
            char = yield from self.read()
            if char == at_once and not part and not self._after_content:
                self.put_back(char)
                return
            part += char
            if char == _END:
                if part or self._after_content or not self._num_calls:
                    self.content(part)
                yield  # for good
            if part == marker:
                self._raw += part
                return
            if char in _SPACE and part == char:
                self._raw += char
                part = ""
            elif not marker.startswith(part):
                self.content(part[0])
                self.put_back(part[1:])
                part = ""

    def skip(self, text: str) -> _Reading:
        """Passes over space and `text`, or the part of it that the output ends with; where
        something else comes, over nothing. Returns whether there was `text`."""
        seen = ""
        while not seen.endswith(text):
            char = yield from self.read()
            seen += char
            if char == _END:
                return False
            if not text.startswith(seen.lstrip(_SPACE)):
                self.put_back(seen)
                return False
        return True

    def opens_list(self) -> _Reading:
        """Whether a `[` comes next, after space perhaps; then it is read."""
        char = " "
        while char and char in _SPACE:
            char = yield from self.read()
            self._raw += char
        if char not in ("[", _END):
            self._raw = self._raw[:-1]
            self.put_back(char)
        return char == "["

    def call(self, known: str | None = None) -> _Reading:
        """Reads one call's object, or the arguments of the function `known`.

        Returns whether there was a whole call; what is none becomes content.
        """
        reader = CallObject(self.names) if known is None else ArgumentsObject(known)
        begun, arguments = False, ""
        while not reader.done:
            char = yield from self.read()
            if char == _END or not reader.feed(char):
                self.is_cut |= begun or char == _END
                self.put_back(char)
                if not begun:
                    self.content()
                return False
            self._raw += "" if begun else char
            arguments += reader.take()
            # Broken JSON shows by the first key, most often; and then there is no call yet.
            if reader.name is not None and (begun or arguments.strip(_SPACE + "{")):
                self._add(None if begun else reader.name, arguments)
                begun, arguments = True, ""
        if not begun:
            self._add(reader.name, arguments or "{}")
        self.num_complete += 1
        return True

    def header(self) -> _Reading:
        """Reads `name[CALL_ID]id[ARGS]`, the last two optional, before a `{`; returns the name, or
        None where there is none and all became content."""
        text = ""
        while True:
            char = yield from self.read()
            if char == "{":
                break
            if char == _END or len(text) > _MAX_HEADER_CHARS:
                self.is_cut |= char == _END
                self.content()
                self.put_back(char)
                return None
            text += char
            self._raw += char
        self.put_back("{")
        name = text.removesuffix("[ARGS]").partition("[CALL_ID]")[0].strip()
        if name in self.names:
            return name
        self.content()
        return None

    def _add(self, name: str | None, arguments: str) -> None:
        """Adds to the calls: a new one where a name is given."""
        if name is not None:
            self._raw = ""
            self._after_content = False
            self._calls.append(_Call(self._num_calls, self._new_id(), name))
            self._num_calls += 1
        elif not self._calls:
            self._calls.append(_Call(self._num_calls - 1, None, None))
        self._calls[-1].arguments.append(arguments)

    def _new_id(self) -> str:
        """Mistral's templates refuse all ids but those of nine letters and digits."""
        length = 9 if self._short_ids else 24
        text = "".join(secrets.choice(_ID_CHARS) for _ in range(length))
        return text if self._short_ids else f"call_{text}"


def _hermes(parser: CallParser) -> _Reading:
    while True:
        yield from parser.until("<tool_call>")
        if (yield from parser.call()):
            yield from parser.skip("</tool_call>")


def _llama3(parser: CallParser) -> _Reading:
    while True:
        yield from parser.until("<|python_tag|>", at_once="{")
        if (yield from parser.call()):
            yield from parser.skip(";")


def _mistral(parser: CallParser) -> _Reading:
    while True:
        yield from parser.until("[TOOL_CALLS]")
        if (yield from parser.opens_list()):
            while (yield from parser.call()):
                if not (yield from parser.skip(",")):
                    yield from parser.skip("]")
                    break
        elif (name := (yield from parser.header())) is not None:
            yield from parser.call(name)


_READERS = {
    ToolCallFormat.HERMES: _hermes,
    ToolCallFormat.LLAMA3: _llama3,
    ToolCallFormat.MISTRAL: _mistral,
    ToolCallFormat.MISTRAL_ARGS: _mistral,
}
