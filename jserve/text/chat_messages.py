"""Checks chat messages and brings them into the form that chat templates expect. Knows OpenAI's
fields: no templates, no tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jserve.errors import InvalidRequest

Message = Mapping[str, Any]

MAX_DEPTH = 64  # of values in tool calls, tools and the like
_TEXTS = ("name", "tool_call_id", "reasoning_content")


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """Copies of the messages, each with a role and a text.

    Fields of null, and empty lists of tool calls, count as absent: clients send answers back with
    them. A call's arguments are OpenAI's JSON text here and an object in the copies, as templates
    expect; text that is no JSON object stays as it is.

    Raises:
      InvalidRequest: naming the message and the field.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequest('messages is not a list of at least one {"role": ..., "content": ...}')
    return [_checked_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _checked_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest(f'{where} is not a {{"role": ..., "content": ...}} with a role')
    copy: dict[str, Any] = {
        "role": message["role"],
        "content": _text_content(message.get("content"), where),
    }
    for name, value in message.items():
        if value is None or name in copy:
            continue
        if name == "tool_calls":
            if calls := _tool_calls(value, where):
                copy[name] = calls
        elif name not in _TEXTS:
            raise InvalidRequest(
                f"{where}.{name} is not supported; use role, content, tool_calls, "
                f"{', '.join(_TEXTS)}"
            )
        elif not isinstance(value, str):
            raise InvalidRequest(f"{where}.{name} is {type(value).__name__}, not a text")
        else:
            copy[name] = value
    return copy


def _text_content(content: Any, where: str) -> str | None:
    """Message content as one text; parts of type "text" are joined by newlines."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise InvalidRequest(f"{where}.content is {type(content).__name__}, not a text")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequest(f'{where}.content has a part of type {kind!r}; use "text" only')
        texts.append(part["text"])
    return "\n".join(texts)


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, (list, tuple)):
        raise InvalidRequest(f"{where}.tool_calls is {type(calls).__name__}, not a list")
    checked = []
    for index, call in enumerate(calls):
        at = f"{where}.tool_calls[{index}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequest(
                f'{at} is not a {{"id": ..., "type": "function", "function": '
                '{"name": ..., "arguments": ...}}'
            )
        if call.get("type", "function") != "function":
            raise InvalidRequest(f'{at}.type={call["type"]!r} is not supported; use "function"')
        if not isinstance(call.get("id"), str | None):
            raise InvalidRequest(f"{at}.id is {type(call['id']).__name__}, not a text")
        arguments = _arguments(function.get("arguments"), at)
        checked.append({**call, "function": {**function, "arguments": arguments}})
    return checked


def _arguments(arguments: Any, where: str) -> Any:
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return arguments  # a model's own slip, which a client may well send back
        return value if isinstance(value, dict) and not too_deep(value) else arguments
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping) or too_deep(arguments):
        raise InvalidRequest(f"{where}.function.arguments is neither JSON text nor an object")
    return arguments


def too_deep(value: Any) -> bool:
    """Whether a value nests deeper than templates and their filters can be trusted with."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for item in level
            for child in (
                item.values() if isinstance(item, Mapping) else item if _is_list(item) else ()
            )
        ]
        if not level:
            return False
    return True


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))
