"""Reads OpenAI request bodies into the engine's messages. Knows field names and shapes: no
transport, no files, no engine. The answers' bodies are in openai_response.py.

Source: the OpenAI API reference, /v1/chat/completions and /v1/completions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from jserve.errors import InvalidRequest
from jserve.messages import GenerateRequest
from jserve.openai_fields import ALIASES, LABELS, NEUTRAL, REQUEST, SAMPLING, TEXT
from jserve.openai_structured import take_structured
from jserve.sampling_params import SamplingParams


class Endpoint(StrEnum):
    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


# Types of the fields of GenerateRequest.
_REQUEST_TYPES: dict[str, Any] = {
    "priority": int,
    "timeout_s": (int, float),
    "queue_timeout_s": (int, float),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAICall:
    """A body, read: what it asks of the engine, and what it wants to be shown.

    Attributes:
      echo: the texts begin with the prompt's, and log-probabilities with those of its tokens.
      is_echo_alone: nothing is wanted but that. The engine generates at least one token, which is
        then left out.
      return_token_ids: the ids of prompt and output come too.
      parallel_tool_calls: else the answer shows its first call only.
    """

    endpoint: Endpoint
    request: GenerateRequest
    echo: bool = False
    is_echo_alone: bool = False
    return_token_ids: bool = False
    parallel_tool_calls: bool = True


def parse_body(
    endpoint: Endpoint, body: Mapping[str, Any], *, return_token_ids: bool = False
) -> OpenAICall:
    """Reads a request body; a field of null counts as absent.

    Raises InvalidRequest for a missing, unknown or unsupported field, by its name. Labels, which
    change no answer, are checked and dropped. Without max_tokens a completion has 16 tokens and a
    chat answer has no limit but the model's, as at OpenAI. `return_token_ids` is the default of the
    body's field of that name, an extension.
    """
    fields = given_fields(body)
    chat = endpoint == Endpoint.CHAT
    inputs = read_chat_input(fields) if chat else _take_prompt(fields)
    sampling = {name: fields.pop(name) for name in SAMPLING if name in fields}
    sampling["logit_bias"] = _take_logit_bias(fields)
    sampling["structured"] = take_structured(fields)
    sampling["logprobs"] = _take_logprobs(fields, chat)
    sampling["prompt_logprobs"] = fields.pop("prompt_logprobs", None)
    echo = False if chat else take_bool(fields, "echo", False)
    if echo and sampling["logprobs"] is not None:
        if sampling["prompt_logprobs"] is not None:
            raise InvalidRequest(
                "echo with logprobs gives those of the prompt, too: leave out prompt_logprobs"
            )
        sampling["prompt_logprobs"] = sampling["logprobs"]
    is_echo_alone = echo and repr(sampling.get("max_tokens")) == "0"  # neither false nor 0.0
    if is_echo_alone:
        sampling["max_tokens"] = 1
    if chat:
        sampling.setdefault("max_tokens", None)
    parallel_tool_calls = not chat or take_bool(fields, "parallel_tool_calls", True)
    return_token_ids = take_bool(fields, "return_token_ids", return_token_ids)
    request = take_request_fields(fields)
    refuse_rest(fields)
    return OpenAICall(
        endpoint=endpoint,
        request=GenerateRequest(**inputs, **request, sampling=SamplingParams(**sampling)),
        echo=echo,
        is_echo_alone=is_echo_alone,
        return_token_ids=return_token_ids,
        parallel_tool_calls=parallel_tool_calls,
    )


def given_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of any endpoint's body that ask for something, under their own names.
    Raises InvalidRequest."""
    if not isinstance(body, Mapping):
        raise InvalidRequest(f"body is {_kind(body)}; give an object")
    fields = {name: value for name, value in body.items() if value is not None}
    _drop_what_asks_for_nothing(fields)
    _rename_aliases(fields)
    return fields


def take_request_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Removes from `fields`, and returns, those that GenerateRequest has too, whatever is asked.
    Raises InvalidRequest for one of another type."""
    return {name: _typed(name, fields.pop(name)) for name in REQUEST if name in fields}


def _drop_what_asks_for_nothing(fields: dict[str, Any]) -> None:
    for name, neutral in NEUTRAL.items():
        value = fields.pop(name, neutral[0])
        if not any(type(value) is type(nothing) and value == nothing for nothing in neutral):
            raise InvalidRequest(f"{name}={value!r:.80} is not supported; leave it out")
    for name, schema in LABELS.items():
        kind = str if schema is TEXT else dict
        if not isinstance(value := fields.pop(name, kind()), kind):
            raise InvalidRequest(f"{name} is {_kind(value)}, not {schema['type']}")


def _rename_aliases(fields: dict[str, Any]) -> None:
    for alias, name in ALIASES.items():
        if alias in fields and fields.setdefault(name, fields[alias]) != fields.pop(alias):
            raise InvalidRequest(f"{name} and {alias} differ; give one of them")


def read_chat_input(fields: dict[str, Any]) -> dict[str, Any]:
    """Removes from `fields` the conversation and what else goes into its template, and returns them
    as fields of GenerateRequest; the engine checks their insides. Raises InvalidRequest."""
    chat: dict[str, Any] = {"messages": _take_messages(fields)}
    if (tools := fields.pop("tools", [])) != []:  # an empty list asks for nothing
        if not isinstance(tools, list):
            raise InvalidRequest("tools is not a list of functions")
        for index, tool in enumerate(tools):
            if not isinstance(tool, Mapping) or not isinstance(tool.get("function"), Mapping):
                raise InvalidRequest(
                    f'tools[{index}] is not a {{"type": "function", "function": {{...}}}}'
                )
        chat["tools"] = tools
    if (choice := fields.pop("tool_choice", None)) is not None:
        if not isinstance(choice, (str, Mapping)):
            raise InvalidRequest(f"tool_choice is {_kind(choice)}, not a word or an object")
        chat["tool_choice"] = choice
    goes_on = take_bool(fields, "continue_final_message", False)
    begins = take_bool(fields, "add_generation_prompt", not goes_on)
    if goes_on and begins:
        raise InvalidRequest("add_generation_prompt contradicts continue_final_message")
    chat |= {"continue_final_message": goes_on, "add_generation_prompt": begins}
    if (arguments := fields.pop("chat_template_kwargs", None)) is not None:
        if not isinstance(arguments, Mapping):
            raise InvalidRequest(f"chat_template_kwargs is {_kind(arguments)}, not an object")
        chat["template_args"] = arguments
    return chat


def _take_messages(fields: dict[str, Any]) -> list[dict[str, Any]]:
    messages = fields.pop("messages", None)
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a non-empty list of {role, content} objects")
    if not all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in messages):
        raise InvalidRequest("each of messages must be an object with a role")
    # Clients send answers back as they came, with null for what was not there.
    return [
        {name: v for name, v in turn.items() if v is not None or name == "content"}
        for turn in messages
    ]


def _take_prompt(fields: dict[str, Any]) -> dict[str, Any]:
    prompt = fields.pop("prompt", None)
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if not isinstance(prompt, list) or not prompt:
        raise InvalidRequest("prompt must be a text or a non-empty list of token ids")
    if not all(type(i) is int for i in prompt):
        raise InvalidRequest("prompt is a list of something other than token ids; give one prompt")
    return {"prompt_token_ids": prompt}


def _take_logprobs(fields: dict[str, Any], chat: bool) -> int | None:
    """Chat has a switch and a count, completions a count only."""
    wanted = fields.pop("logprobs", None)
    if not chat:
        return wanted
    top = fields.pop("top_logprobs", None)
    if wanted is not None and not isinstance(wanted, bool):
        raise InvalidRequest(f"logprobs={wanted!r} is not true or false")
    if top is not None and not wanted and (type(top) is not int or top != 0):
        raise InvalidRequest("top_logprobs needs logprobs=true")
    if not wanted:
        return None
    return 0 if top is None else top


def _take_logit_bias(fields: dict[str, Any]) -> dict[int, Any]:
    """The keys of a JSON object are texts."""
    bias = fields.pop("logit_bias", {})
    if not isinstance(bias, Mapping):
        raise InvalidRequest(f"logit_bias is {_kind(bias)}, not an object of token ids and numbers")
    for key in bias:
        if not re.fullmatch("0|-?[1-9][0-9]{0,17}", str(key)):
            raise InvalidRequest(f'logit_bias has the key {key!r:.40}; use token ids, such as "42"')
    return {int(key): value for key, value in bias.items()}


def refuse_rest(fields: Mapping[str, Any]) -> None:
    """Raises InvalidRequest for what nobody has taken out."""
    if fields:
        names = ", ".join(sorted(map(repr, fields)))
        raise InvalidRequest(f"body has unknown or unsupported fields: {names:.400}")


def take_bool(fields: dict[str, Any], name: str, default: bool) -> bool:
    """Removes and returns a field. Raises InvalidRequest where it is no bool."""
    value = fields.pop(name, default)
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name}={value!r} is not true or false")
    return value


def _typed(name: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, _REQUEST_TYPES.get(name, str)):
        raise InvalidRequest(f"{name}={value!r:.80} has the wrong type")
    return value


def _kind(value: Any) -> str:
    return "null" if value is None else f"of type {type(value).__name__}"
