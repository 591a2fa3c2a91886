"""Checks the tools that a caller offers, and which of them the model has to use. Knows OpenAI's
fields: no templates, no formats of calls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jserve.errors import InvalidRequest
from jserve.text.chat_messages import too_deep

Tool = Mapping[str, Any]

MAX_TOOLS = 128  # as at OpenAI
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FIELDS: dict[str, Any] = {"name": str, "description": str, "parameters": Mapping, "strict": bool}


def checked_tools(tools: Any) -> list[Tool] | None:
    """The tools, or None where there are none. Raises InvalidRequest, naming tool and field."""
    if tools is None:
        return None
    if isinstance(tools, (str, bytes)) or not isinstance(tools, Sequence):
        raise InvalidRequest(f"tools is {type(tools).__name__}, not a list")
    if not 0 < len(tools) <= MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(tools)} entries; give 1 to {MAX_TOOLS}, or no tools")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        name = _checked_name(tool, f"tools[{index}]")
        if name in names:
            raise InvalidRequest(f"tools[{index}].function.name={name!r} is there twice")
        names.add(name)
    return list(tools)


def _checked_name(tool: Any, where: str) -> str:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise InvalidRequest(f'{where} is not a {{"type": "function", "function": {{...}}}}')
    function = tool.get("function")
    if not isinstance(function, Mapping) or set(tool) != {"type", "function"}:
        raise InvalidRequest(f"{where} has other members than type and an object function")
    for field, value in function.items():
        if field not in _FIELDS:
            raise InvalidRequest(f"{where}.function.{field} is not supported; leave it out")
        if value is not None and not isinstance(value, _FIELDS[field]):
            raise InvalidRequest(f"{where}.function.{field} has the wrong type")
    schema = function.get("parameters") or {}
    if schema.get("type", "object") != "object":
        raise InvalidRequest(f"{where}.function.parameters.type={schema['type']!r} is not object")
    if too_deep(schema):
        raise InvalidRequest(f"{where}.function.parameters nests too deeply")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{where}.function.name={name!r} is not 1 to 64 of letters, digits, '_', '-' and '.'"
        )
    return name


def forced_tools(tools: Sequence[Tool] | None, tool_choice: Any) -> list[Tool]:
    """Those of `tools` of which the model has to call one; none where it may answer otherwise.

    Args:
      tools: as `checked_tools` returns them.
      tool_choice: OpenAI's: None, "none", "auto", "required", or a function by name.

    Raises:
      InvalidRequest: the choice is malformed, or names what is not there.
    """
    if tool_choice in (None, "none", "auto"):
        return []
    if not tools:
        raise InvalidRequest(f"{tool_choice=} needs tools")
    if tool_choice == "required":
        return list(tools)
    function = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if name is None or tool_choice.get("type", "function") != "function":
        raise InvalidRequest(
            f'{tool_choice=} is not "none", "auto", "required" or '
            '{"type": "function", "function": {"name": ...}}'
        )
    chosen = [tool for tool in tools if tool["function"]["name"] == name]
    if not chosen:
        raise InvalidRequest(f"tool_choice names the function {name!r}, which is not in tools")
    return chosen
