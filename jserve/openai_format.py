"""Reads OpenAI request bodies into the engine's messages. Knows field names and shapes: no
transport, no files, no engine. The answers' bodies are in openai_response.py.

Source: the OpenAI API reference, /v1/chat/completions and /v1/completions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from numbers import Integral
from typing import Any

from jserve.errors import InvalidRequest
from jserve.messages import GenerateRequest
from jserve.openai_structured import take_structured
from jserve.sampling_params import SamplingParams


class Endpoint(StrEnum):
    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


# Fields that we do not offer but whose one neutral value asks for nothing.
NEUTRAL: dict[str, Any] = {"stream": False, "parallel_tool_calls": True}
# Same name and meaning in SamplingParams. Those of the last two lines are not OpenAI's but common
# extensions, as is best_of in a chat.
SAMPLING_FIELDS = (
    *("temperature", "top_p", "seed", "max_tokens", "stop", "n", "best_of"),
    *("presence_penalty", "frequency_penalty"),
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos"),
    *("bad_words", "allowed_token_ids", "skip_special_tokens", "include_stop_str"),
)
# Fields of GenerateRequest and their types.
REQUEST_FIELDS: dict[str, Any] = {
    "model": str,
    "priority": int,
    "request_class": str,
    "tenant": str,
    "timeout_s": (int, float),
    "queue_timeout_s": (int, float),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAICall:
    """A body, read: what it asks of the engine, and what it wants to be shown.

    Attributes:
      echo: the texts begin with the prompt's, and log-probabilities with those of its tokens.
      return_token_ids: the ids of prompt and output come too.
    """

    endpoint: Endpoint
    request: GenerateRequest
    echo: bool = False
    return_token_ids: bool = False


def parse_body(
    endpoint: Endpoint, body: Mapping[str, Any], *, return_token_ids: bool = False
) -> OpenAICall:
    """Reads a request body; a field of null counts as absent.

    Raises InvalidRequest for a missing, unknown or unsupported field, by its name. Without
    max_tokens a completion has 16 tokens and a chat answer has no limit but the model's, as at
    OpenAI. `return_token_ids` is the default of the body's field of that name, an extension.
    """
    if not isinstance(body, Mapping):
        raise InvalidRequest(f"body is {_kind(body)}; give an object")
    fields = {name: value for name, value in body.items() if value is not None}
    for name, neutral in NEUTRAL.items():
        if (value := fields.pop(name, neutral)) is not neutral:
            raise InvalidRequest(f"{name}={value!r} is not supported; leave it out")
    chat = endpoint == Endpoint.CHAT
    inputs = _take_chat(fields) if chat else _take_prompt(fields)
    sampling = {name: fields.pop(name) for name in SAMPLING_FIELDS if name in fields}
    sampling["logit_bias"] = _take_logit_bias(fields)
    sampling["structured"] = take_structured(fields)
    sampling["logprobs"] = _take_logprobs(fields, chat)
    sampling["prompt_logprobs"] = fields.pop("prompt_logprobs", None)
    echo = False if chat else _take_bool(fields, "echo", False)
    if echo and sampling["logprobs"] is not None:
        if sampling["prompt_logprobs"] is not None:
            raise InvalidRequest(
                "echo with logprobs gives those of the prompt, too: leave out prompt_logprobs"
            )
        sampling["prompt_logprobs"] = sampling["logprobs"]
    if chat:
        newer = fields.pop("max_completion_tokens", None)
        if newer is not None and sampling.setdefault("max_tokens", newer) != newer:
            raise InvalidRequest("max_tokens and max_completion_tokens differ; give one of them")
        sampling.setdefault("max_tokens", None)
    return_token_ids = _take_bool(fields, "return_token_ids", return_token_ids)
    request = {name: _typed(name, fields.pop(name)) for name in REQUEST_FIELDS if name in fields}
    if fields:
        names = ", ".join(sorted(map(repr, fields)))
        raise InvalidRequest(f"body has unknown or unsupported fields: {names}")
    return OpenAICall(
        endpoint=endpoint,
        request=GenerateRequest(**inputs, **request, sampling=SamplingParams(**sampling)),
        echo=echo,
        return_token_ids=return_token_ids,
    )


def _take_chat(fields: dict[str, Any]) -> dict[str, Any]:
    """The conversation and what else goes into its template; the engine checks their insides."""
    chat: dict[str, Any] = {"messages": _take_messages(fields)}
    if tools := fields.pop("tools", None):  # an empty list asks for nothing
        if not isinstance(tools, list):
            raise InvalidRequest("tools is not a list of functions")
        chat["tools"] = tools
    if (choice := fields.pop("tool_choice", None)) is not None:
        if not isinstance(choice, (str, Mapping)):
            raise InvalidRequest(f"tool_choice is {_kind(choice)}, not a word or an object")
        chat["tool_choice"] = choice
    goes_on = _take_bool(fields, "continue_final_message", False)
    begins = _take_bool(fields, "add_generation_prompt", not goes_on)
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
    if not all(isinstance(i, Integral) and not isinstance(i, bool) for i in prompt):
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
    if top is not None and not wanted:
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


def _take_bool(fields: dict[str, Any], name: str, default: bool) -> bool:
    value = fields.pop(name, default)
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name}={value!r} is not true or false")
    return value


def _typed(name: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, REQUEST_FIELDS[name]):
        raise InvalidRequest(f"{name}={value!r} has the wrong type")
    return value


def _kind(value: Any) -> str:
    return "null" if value is None else f"of type {type(value).__name__}"
