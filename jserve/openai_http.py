"""Reads what an HTTP body says beyond what a line of a batch can: streaming, and several prompts at
once. Knows field names and shapes: no transport, no engine.

Source: the OpenAI API reference; `continuous_usage_stats` is vLLM's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jserve.errors import InvalidRequest
from jserve.messages import GenerateRequest
from jserve.openai_fields import MAX_PROMPTS, STREAM
from jserve.openai_format import Endpoint, OpenAICall, parse_body

_STREAM_OPTIONS = tuple(STREAM["stream_options"]["properties"])


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpBody:
    """Attributes:
    call: what is asked, of the first prompt.
    requests: one for each prompt.
    include_usage: a stream ends with a chunk that has the whole usage.
    continuous_usage: each chunk has the usage so far, too.
    """

    call: OpenAICall
    requests: tuple[GenerateRequest, ...]
    is_stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False


def read_http_body(endpoint: Endpoint, body: Mapping[str, Any]) -> HttpBody:
    """Reads a body. Raises InvalidRequest as `parse_body` does."""
    fields = dict(body)
    is_stream = _switch("stream", fields.pop("stream", None))
    options = _stream_options(fields.pop("stream_options", None), is_stream)
    prompts = _prompts(fields.get("prompt")) if endpoint == Endpoint.COMPLETIONS else None
    if prompts:
        fields["prompt"] = prompts[0]
    call = parse_body(endpoint, fields)
    return HttpBody(
        call=call,
        requests=tuple(_with_prompt(call.request, prompt) for prompt in prompts)
        if prompts
        else (call.request,),
        is_stream=is_stream,
        include_usage=options["include_usage"],
        continuous_usage=options["continuous_usage_stats"],
    )


def _prompts(prompt: Any) -> list[str | list[int]] | None:
    """The prompts of a list of several, each checked; None where there is one prompt, or none."""
    if not isinstance(prompt, list) or not prompt or not isinstance(prompt[0], (str, list)):
        return None
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt has {len(prompt)} prompts; use at most {MAX_PROMPTS}")
    for index, one in enumerate(prompt):
        is_ids = isinstance(one, list) and bool(one) and all(type(i) is int for i in one)
        if not isinstance(one, str) and not is_ids:
            raise InvalidRequest(
                f"prompt[{index}] is neither a text nor a non-empty list of token ids"
            )
    return prompt


def _with_prompt(request: GenerateRequest, prompt: str | list[int]) -> GenerateRequest:
    if isinstance(prompt, str):
        return replace(request, prompt=prompt, prompt_token_ids=None)
    return replace(request, prompt=None, prompt_token_ids=prompt)


def _stream_options(options: Any, is_stream: bool) -> dict[str, bool]:
    if options is not None and not is_stream:
        raise InvalidRequest("stream_options needs stream=true")
    options = {} if options is None else options
    if not isinstance(options, Mapping):
        raise InvalidRequest("stream_options is not an object")
    given = {name: value for name, value in options.items() if value is not None}
    if unknown := given.keys() - set(_STREAM_OPTIONS):
        names = ", ".join(sorted(map(repr, unknown)))
        raise InvalidRequest(f"stream_options has unknown or unsupported fields: {names}")
    read = {name: _switch(f"stream_options.{name}", given.get(name)) for name in _STREAM_OPTIONS}
    if read["include_obfuscation"]:
        raise InvalidRequest("stream_options.include_obfuscation is not supported; leave it out")
    return read


def _switch(name: str, value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f"{name}={value!r:.80} is not true or false")
    return bool(value)
