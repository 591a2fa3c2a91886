"""Translates OpenAI request and response bodies to and from the engine's messages. Knows field
names and shapes: no transport, no files, no engine.

Source: the OpenAI API reference, /v1/chat/completions and /v1/completions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from numbers import Integral
from typing import Any

from jserve.errors import InvalidRequest
from jserve.messages import GenerateRequest
from jserve.offline import CompletionOutput, RequestOutput
from jserve.sampling_params import SamplingParams

TokenBytes = Callable[[int], bytes]


class Endpoint(StrEnum):
    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


# Fields that we do not offer but whose one neutral value asks for nothing.
NEUTRAL: dict[str, Any] = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "stream": False,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "response_format": {"type": "text"},
}
# Same name and meaning in SamplingParams. The last six are not OpenAI's but common extensions.
SAMPLING_FIELDS = (
    *("temperature", "top_p", "seed", "max_tokens", "stop"),
    *("top_k", "min_p", "stop_token_ids", "ignore_eos", "skip_special_tokens", "include_stop_str"),
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


def parse_body(endpoint: Endpoint, body: Mapping[str, Any]) -> GenerateRequest:
    """Turns a request body into the engine's request; a field of null counts as absent.

    Raises InvalidRequest for a missing, unknown or unsupported field, by its name. Without
    max_tokens a completion has 16 tokens and a chat answer has no limit but the model's, as at
    OpenAI.
    """
    if not isinstance(body, Mapping):
        raise InvalidRequest(f"body is {_kind(body)}; give an object")
    fields = {name: value for name, value in body.items() if value is not None}
    for name, neutral in NEUTRAL.items():
        value = fields.pop(name, neutral)
        if value != neutral or isinstance(value, bool) != isinstance(neutral, bool):
            raise InvalidRequest(f"{name}={value!r} is not supported; leave it out")
    chat = endpoint == Endpoint.CHAT
    inputs = _take_messages(fields) if chat else _take_prompt(fields)
    sampling = {name: fields.pop(name) for name in SAMPLING_FIELDS if name in fields}
    sampling["logprobs"] = _take_logprobs(fields, chat)
    if chat:
        newer = fields.pop("max_completion_tokens", None)
        if newer is not None and sampling.setdefault("max_tokens", newer) != newer:
            raise InvalidRequest("max_tokens and max_completion_tokens differ; give one of them")
        sampling.setdefault("max_tokens", None)
    request = {name: _typed(name, fields.pop(name)) for name in REQUEST_FIELDS if name in fields}
    if fields:
        names = ", ".join(sorted(map(repr, fields)))
        raise InvalidRequest(f"body has unknown or unsupported fields: {names}")
    return GenerateRequest(**inputs, **request, sampling=SamplingParams(**sampling))


def _take_messages(fields: dict[str, Any]) -> dict[str, Any]:
    messages = fields.pop("messages", None)
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a non-empty list of {role, content} objects")
    if not all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in messages):
        raise InvalidRequest("each of messages must be an object with a role")
    return {"messages": messages}


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


def _typed(name: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, REQUEST_FIELDS[name]):
        raise InvalidRequest(f"{name}={value!r} has the wrong type")
    return value


def _kind(value: Any) -> str:
    return "null" if value is None else f"of type {type(value).__name__}"


def response_body(
    endpoint: Endpoint,
    output: RequestOutput,
    *,
    model: str,
    created: int,
    token_bytes: TokenBytes,
    with_token_ids: bool = False,
) -> dict[str, Any]:
    """Shapes a finished output as the body of a (non-streaming) OpenAI response.

    Args:
      created: seconds since the epoch.
      token_bytes: the bytes that a token id stands for, as the tokenizer has it.
      with_token_ids: add `token_ids` to the choice and `prompt_token_ids` to the body.
    """
    completion = output.outputs[0]
    chat = endpoint == Endpoint.CHAT
    choice: dict[str, Any] = {"index": completion.index}
    if chat:
        choice["message"] = {"role": "assistant", "content": completion.text}
        choice["logprobs"] = _chat_logprobs(completion, token_bytes)
    else:
        choice["text"] = completion.text
        choice["logprobs"] = _completion_logprobs(completion, token_bytes)
    choice["finish_reason"] = completion.finish_reason
    choice["stop_reason"] = completion.stop_reason
    body: dict[str, Any] = {
        "id": ("chatcmpl-" if chat else "cmpl-") + output.request_id,
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": model,
        "choices": [choice],
        "usage": usage_body(output),
    }
    if with_token_ids:
        choice["token_ids"] = completion.token_ids
        body["prompt_token_ids"] = output.prompt_token_ids
    return body


def usage_body(output: RequestOutput) -> dict[str, Any]:
    num_prompt, num_output = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
    }


def _named(data: bytes) -> str:
    """The token's text, or "bytes:\\xf0\\x9f" where it is a part of a character, as OpenAI has it:
    two tokens must never have one name."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _chat_logprobs(completion: CompletionOutput, token_bytes: TokenBytes) -> dict[str, Any] | None:
    if completion.logprobs is None:
        return None

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = token_bytes(token_id)
        return {"token": _named(data), "logprob": logprob, "bytes": list(data)}

    return {
        "content": [
            entry(p.token_id, p.logprob) | {"top_logprobs": [entry(*top) for top in p.top]}
            for p in completion.logprobs
        ]
    }


def _completion_logprobs(
    completion: CompletionOutput, token_bytes: TokenBytes
) -> dict[str, Any] | None:
    if completion.logprobs is None:
        return None

    def name(token_id: int) -> str:
        return _named(token_bytes(token_id))

    return {
        "tokens": [name(p.token_id) for p in completion.logprobs],
        "token_logprobs": [p.logprob for p in completion.logprobs],
        "top_logprobs": [{name(i): logprob for i, logprob in p.top} for p in completion.logprobs],
    }
