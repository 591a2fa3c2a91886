"""Follows JSON objects character by character. Knows JSON (RFC 8259), and the object that models
write for a tool call: no markers, no requests."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

_SPACE = " \t\r\n"
_SCALAR_CHARS = frozenset("+-.0123456789eEtrufalsn")
_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_CLOSES = {"{": "}", "[": "]"}
_ARGUMENT_KEYS = ("arguments", "parameters")
_KEYS = (*_ARGUMENT_KEYS, "name", "type", "id")


class JsonObject:
    """One object, complete or not.

    Attributes:
      depth: open objects and arrays; 0 before the object and after it.
      done: whether the object is complete.
      ended: a string of the object itself, with its quotes, where the last character ended it.
      is_key: whether the last string is a key.
    """

    def __init__(self) -> None:
        self.done = False
        self.ended = ""
        self.is_key = False
        self._open: list[str] = []
        self._allowed = "object"
        self._in_string = False
        self._string: list[str] = []  # what is open of it, where it may be asked for
        self._escape = 0  # characters that an escape still takes; -1: its first
        self._scalar = ""

    @property
    def depth(self) -> int:
        return len(self._open)

    @property
    def wants_value(self) -> bool:
        """Whether a value comes next."""
        return self._allowed == "value" and not self._in_string and not self._scalar

    def feed(self, char: str) -> bool:
        """Takes one character; False where no object goes on so, and then all is over."""
        self.ended = ""
        if self._in_string:
            return self._feed_string(char)
        if self._scalar:
            if char in _SCALAR_CHARS:
                self._scalar += char
                return True
            if not _SCALAR.fullmatch(self._scalar):
                return False
            self._scalar = ""
            self._allowed = "next"
        return char in _SPACE or (not self.done and self._feed_token(char))

    def _feed_token(self, char: str) -> bool:
        allowed = self._allowed
        if allowed == "object" and char != "{":
            return False
        if char in "}]":
            ends = allowed in ("next", "first key", "first value")
            if not ends or _CLOSES[self._open.pop()] != char:
                return False
            self._allowed = "next"
            self.done = not self._open
            return True
        if allowed == "next":
            self._allowed = "key" if self._open[-1] == "{" else "value"
            return char == ","
        if allowed == "colon":
            self._allowed = "value"
            return char == ":"
        if char == '"':
            self._in_string = True
            self._string = [char]
            self.is_key = allowed in ("key", "first key")
            return True
        if allowed in ("key", "first key"):
            return False
        if char in _CLOSES:
            self._open.append(char)
            self._allowed = "first key" if char == "{" else "first value"
            return True
        self._scalar = char
        return char in _SCALAR_CHARS

    def _feed_string(self, char: str) -> bool:
        if len(self._open) == 1:
            self._string.append(char)
        if self._escape < 0:
            self._escape = 4 if char == "u" else 0
            return char in '"\\/bfnrtu'
        if self._escape:
            self._escape -= 1
            return char in "0123456789abcdefABCDEF"
        if char == "\\":
            self._escape = -1
        elif char == '"':
            self.ended = "".join(self._string) if len(self._open) == 1 else ""
            self._in_string = False
            self._allowed = "colon" if self.is_key else "next"
        return char >= " "


class _Arguments:
    """The JSON text of a call's arguments, as it grows."""

    def __init__(self) -> None:
        self._json = JsonObject()
        self._arguments: list[str] = []

    @property
    def done(self) -> bool:
        return self._json.done

    def take(self) -> str:
        """Returns what was added to the arguments' JSON text, as the model wrote it."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text


class CallObject(_Arguments):
    """The object of one tool call: {"name": ..., "arguments" or "parameters": {...}}.

    Arguments may also be the text of an object. Other members are passed over, but those that may
    precede the name are few, so that an object which is an answer shows early.

    Attributes:
      name: the function's name once it is there, one of `names`.
    """

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self.name: str | None = None
        self._names = names
        self._key = ""
        self._in_arguments = self._had_arguments = False

    def feed(self, char: str) -> bool:
        """Takes one character; False where this is no call of a known function."""
        scan = self._json
        depth = scan.depth
        is_value = self._in_arguments and depth == 1 and scan.wants_value
        if (is_value and char not in '{"' + _SPACE) or not scan.feed(char):
            return False
        if self._in_arguments and max(depth, scan.depth) > 1:
            self._arguments.append(char)
        if scan.ended:
            return self._read(json.loads(scan.ended))
        return not scan.done or self.name is not None

    def _read(self, text: str) -> bool:
        """Takes a key or a string of the object itself."""
        if self._json.is_key:
            self._key = text
            self._in_arguments = text in _ARGUMENT_KEYS and not self._had_arguments
            self._had_arguments |= self._in_arguments
            return self.name is not None or text in _KEYS
        elif self._in_arguments:
            self._arguments = [text]
            return is_object(text)
        elif self._key == "name":
            self.name = text
            return text in self._names
        return True


class ArgumentsObject(_Arguments):
    """The bare arguments of a call whose name is known; the same face as `CallObject`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def feed(self, char: str) -> bool:
        self._arguments.append(char)
        return self._json.feed(char)


def is_object(text: str) -> bool:
    """Whether `text` is one JSON object, without half a surrogate pair."""
    scan = JsonObject()
    is_text = not any("\ud800" <= char <= "\udfff" for char in text)
    return is_text and all(map(scan.feed, text)) and scan.done
