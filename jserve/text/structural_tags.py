"""Turns structural tags (free text in which a trigger opens JSON of a given form) into a grammar.
Knows the two ways in which callers write them: no limits, no state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from jserve.errors import InvalidRequest
from jserve.text.json_schema_rules import check_schema
from jserve.text.tokenizer import Tokenizer


class Tag(NamedTuple):
    begin: str
    schema: dict[str, Any]
    end: str


def lark_text(text: str) -> str:
    """A literal of llguidance's Lark."""
    return json.dumps(text)


def lark_of_structural_tag(
    name: str, value: Any, json_options: Mapping[str, Any], tokenizer: Tokenizer
) -> str:
    """Lark of {"structures": [{"begin", "schema", "end"}], "triggers": [...]}, or of
    {"format": {"type": "triggered_tags", "triggers": [...], "tags": [{"begin", "content": {"type":
    "json_schema", "json_schema": ...}, "end"}], "at_least_one": false, "stop_after_first": false}}.

    A trigger that is a special token's text stands for that token, and so does such text in `begin`
    and `end`.

    Raises:
      InvalidRequest: naming the field that is missing, unknown or contradictory.
    """
    form = _object(name, value, {"type", "format", "structures", "triggers"})
    if form.get("type", "structural_tag") != "structural_tag":
        raise InvalidRequest(f"{name}: type={form['type']!r} is not 'structural_tag'")
    at_least_one = stop_after_first = False
    if "format" in form:
        name = f"{name}.format"
        keys = {"type", "triggers", "tags", "at_least_one", "stop_after_first"}
        form = _object(name, form["format"], keys)
        if form.get("type") != "triggered_tags":
            raise InvalidRequest(f"{name}.type={form.get('type')!r}; supported: 'triggered_tags'")
        at_least_one = _flag(name, form, "at_least_one")
        stop_after_first = _flag(name, form, "stop_after_first")
        tags = [_tag(f"{name}.tags[{i}]", tag) for i, tag in _items(name, form, "tags")]
    else:
        tags = [
            _structure(f"{name}.structures[{i}]", tag)
            for i, tag in _items(name, form, "structures")
        ]
    triggers = [trigger for _, trigger in _items(name, form, "triggers")]
    return _Lark(name, triggers, tags, tokenizer, json_options).text(at_least_one, stop_after_first)


def _object(name: str, value: Any, keys: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} is not a JSON object")
    if unknown := sorted(value.keys() - keys):
        raise InvalidRequest(f"{name}: field {unknown[0]!r} is not supported; use {sorted(keys)}")
    return value


def _items(name: str, form: Mapping[str, Any], key: str) -> list[tuple[int, Any]]:
    if not isinstance(items := form.get(key), list) or not items:
        raise InvalidRequest(f"{name}.{key} is not a list of at least one item")
    return list(enumerate(items))


def _flag(name: str, form: Mapping[str, Any], key: str) -> bool:
    if not isinstance(flag := form.get(key, False), bool):
        raise InvalidRequest(f"{name}.{key} is not true or false")
    return flag


def _text(name: str, form: Mapping[str, Any], key: str) -> str:
    if not isinstance(text := form.get(key), str):
        raise InvalidRequest(f"{name}.{key} is not a text")
    return text


def _structure(name: str, value: Any) -> Tag:
    form = _object(name, value, {"begin", "schema", "end"})
    schema = check_schema(f"{name}.schema", form.get("schema"))
    return Tag(_text(name, form, "begin"), schema, _text(name, form, "end"))


def _tag(name: str, value: Any) -> Tag:
    form = _object(name, value, {"type", "begin", "content", "end"})
    content = _object(f"{name}.content", form.get("content"), {"type", "json_schema"})
    if content.get("type") != "json_schema":
        raise InvalidRequest(f"{name}.content.type={content.get('type')!r}; use 'json_schema'")
    schema = check_schema(f"{name}.content.json_schema", content.get("json_schema"))
    return Tag(_text(name, form, "begin"), schema, _text(name, form, "end"))


class _Lark:
    """Writes the grammar: free text, then a trigger, then one of the tags that begin with it."""

    def __init__(
        self,
        name: str,
        triggers: list[Any],
        tags: list[Tag],
        tokenizer: Tokenizer,
        json_options: Mapping[str, Any],
    ) -> None:
        self.tokenizer = tokenizer
        self.json_options = json_options
        self.tags_of: dict[str, list[Tag]] = {}
        for trigger in triggers:
            if not isinstance(trigger, str) or not trigger:
                raise InvalidRequest(f"{name}.triggers holds {trigger!r}, not a text")
            if any(
                trigger.startswith(other) or other.startswith(trigger) for other in self.tags_of
            ):
                raise InvalidRequest(f"{name}.triggers: {trigger!r} and another begin alike")
            self.tags_of[trigger] = [tag for tag in tags if tag.begin.startswith(trigger)]
        for tag in tags:
            if not tag.begin.startswith(tuple(self.tags_of)):
                raise InvalidRequest(
                    f"{name}: begin={tag.begin!r} starts with none of the triggers"
                )

    def text(self, at_least_one: bool, stop_after_first: bool) -> str:
        used = [(trigger, tags) for trigger, tags in self.tags_of.items() if tags]
        any_tag = " | ".join(f"tag_{i}" for i in range(len(used)))
        if stop_after_first:
            start = f"({any_tag})" if at_least_one else f"{any_tag} | tail"
        else:
            start = f"({any_tag}){'+' if at_least_one else '*'} tail"
        lines = [f"start: {start}", "tail: TEXT", r"TEXT: /(.|\n)*/"]
        for i, (trigger, tags) in enumerate(used):
            # A lazy rule ends at the first trigger, so the text before it cannot hold one.
            special = self._special(trigger)
            lazy = "" if special else "[lazy]"
            lines.append(f"open_{i}{lazy}: TEXT {special or lark_text(trigger)}")
            bodies = " | ".join(self._body(tag, len(trigger)) for tag in tags)
            lines.append(f"tag_{i}: open_{i} ({bodies})")
        return "\n".join(lines)

    def _special(self, trigger: str) -> str | None:
        spans = self.tokenizer.special_spans(trigger)
        if not spans:
            return None
        if spans[0][1:] != (0, len(trigger)):
            raise InvalidRequest(f"trigger {trigger!r} mixes text and special tokens")
        return f"<[{spans[0][0]}]>"

    def _body(self, tag: Tag, num_opened: int) -> str:
        schema = json.dumps(tag.schema | {"x-guidance": self.json_options})
        return " ".join(
            [*self._parts(tag.begin[num_opened:]), f"%json {schema}", *self._parts(tag.end)]
        )

    def _parts(self, text: str) -> list[str]:
        """Literals for plain text, ids for special tokens: 'a<s>b' -> ['"a"', '<[1]>', '"b"']"""
        parts, done = [], 0
        for token_id, start, end in [*self.tokenizer.special_spans(text), (None, len(text), 0)]:
            parts += [lark_text(text[done:start])] if start > done else []
            parts += [] if token_id is None else [f"<[{token_id}]>"]
            done = end
        return parts
