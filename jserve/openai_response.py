"""Shapes finished outputs as OpenAI response bodies. Knows field names and shapes: no transport, no
files, no engine.

Sources: the OpenAI API reference, /v1/chat/completions and /v1/completions; `stop_reason`,
`reasoning_content`, `token_ids` and `prompt_logprobs` are vLLM's extensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from jserve.messages import GenerateRequest, TokenLogprobs, Usage
from jserve.offline import CompletionOutput, RequestOutput
from jserve.openai_format import Endpoint, OpenAICall
from jserve.openai_logprobs import TextOffsets, chat_logprobs, columns, prompt_logprobs
from jserve.text.tokenizer import Tokenizer
from jserve.text.tool_calls import OutputDelta, OutputParser

NewParser = Callable[[GenerateRequest, Sequence[int]], OutputParser]  # of a request and its prompt


def response_body(
    call: OpenAICall,
    output: RequestOutput,
    *,
    model: str,
    created: int,
    tokenizer: Tokenizer,
    new_parser: NewParser,
) -> dict[str, Any]:
    """Returns the body of a (non-streaming) response to `call`.

    Args:
      created: seconds since 1970.
      new_parser: begins to split one choice of a chat's answer into what it holds.
    """
    chat = call.endpoint == Endpoint.CHAT
    prompt_ids = output.prompt_token_ids
    return {
        **body_head(call, output.request_id, model, created),
        "choices": [
            _chat_choice(call, completion, tokenizer, new_parser(call.request, prompt_ids))
            for completion in output.outputs
        ]
        if chat
        else _text_choices(call, output, tokenizer),
        "usage": usage_body(call, output.usage),
        **_about_prompt(call, output, tokenizer),
    }


def response_of_prompts(
    call: OpenAICall,
    outputs: Sequence[RequestOutput],
    *,
    request_id: str,
    model: str,
    created: int,
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """Returns the body of a response to a completion of several prompts: choice i of prompt j, of n
    choices each, has index j * n + i, and what the body tells of the prompt of a single one. Usage
    is the sum of theirs."""
    total = Usage.total(output.usage for output in outputs)
    choices: list[dict[str, Any]] = []
    for output in outputs:
        about = _about_prompt(call, output, tokenizer)
        for choice in _text_choices(call, output, tokenizer):
            choices.append({**choice, "index": len(choices), **about})
    head = body_head(call, request_id, model, created)
    return {**head, "choices": choices, "usage": usage_body(call, total)}


def body_head(
    call: OpenAICall, request_id: str, model: str, created: int, *, is_chunk: bool = False
) -> dict[str, Any]:
    """Returns the fields that say what a body, or the chunk of a stream, is about."""
    chat = call.endpoint == Endpoint.CHAT
    return {
        "id": ("chatcmpl-" if chat else "cmpl-") + request_id,
        "object": "chat.completion" + ".chunk" * is_chunk if chat else "text_completion",
        "created": created,
        "model": model,
    }


def usage_body(call: OpenAICall, usage: Usage) -> dict[str, Any]:
    num_output = 0 if call.is_echo_alone else usage.completion_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": num_output,
        "total_tokens": usage.prompt_tokens + num_output,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _about_prompt(call: OpenAICall, output: RequestOutput, tokenizer: Tokenizer) -> dict[str, Any]:
    told: dict[str, Any] = {}
    if output.prompt_logprobs is not None and not call.echo:
        told["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs, tokenizer)
    if call.return_token_ids:
        told["prompt_token_ids"] = output.prompt_token_ids
    return told


def _ending(call: OpenAICall, completion: CompletionOutput) -> dict[str, Any]:
    ending: dict[str, Any] = {
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    return ending | ({"token_ids": completion.token_ids} if call.return_token_ids else {})


def _chat_choice(
    call: OpenAICall, completion: CompletionOutput, tokenizer: Tokenizer, parser: OutputParser
) -> dict[str, Any]:
    deltas = (parser.feed(completion.text), parser.finish())
    content = "".join(delta.content for delta in deltas)
    calls = _tool_calls(deltas)
    if not call.parallel_tool_calls:
        calls = calls[:1]
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning := "".join(delta.reasoning for delta in deltas):
        message["reasoning_content"] = reasoning
    if calls:
        message |= {"content": content or None, "tool_calls": calls}
    logprobs = completion.logprobs
    choice = {
        "index": completion.index,
        "message": message,
        "logprobs": None if logprobs is None else chat_logprobs(logprobs, tokenizer),
        **_ending(call, completion),
    }
    if parser.has_calls and completion.finish_reason == "stop":
        choice["finish_reason"] = "tool_calls"
    return choice


def _tool_calls(deltas: Iterable[OutputDelta]) -> list[dict[str, Any]]:
    """The calls, pieces joined."""
    calls: dict[int, dict[str, Any]] = {}
    for piece in (piece for delta in deltas for piece in delta.tool_calls):
        if piece.name is not None:
            function = {"name": piece.name, "arguments": ""}
            calls[piece.index] = {"id": piece.id, "type": "function", "function": function}
        calls[piece.index]["function"]["arguments"] += piece.arguments
    return list(calls.values())


def _text_choices(
    call: OpenAICall, output: RequestOutput, tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    ids, echoed, prompt = output.prompt_token_ids, "", None
    if call.echo:  # once for all choices: a long prompt's takes its time
        echoed = prompt_text(call, output.prompt, ids, tokenizer)
    if call.echo and output.prompt_logprobs is not None:
        about = (output.prompt, ids, output.prompt_logprobs)
        prompt = echoed_columns(call, *about, echoed, tokenizer)
    return [
        _text_choice(call, ids, completion, echoed, prompt, tokenizer)
        for completion in output.outputs
    ]


def _text_choice(
    call: OpenAICall,
    prompt_ids: Sequence[int],
    completion: CompletionOutput,
    echoed: str,
    prompt_columns: dict[str, list[Any]] | None,
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    if call.is_echo_alone:
        completion = replace(
            completion,
            text="",
            token_ids=[],
            logprobs=None if completion.logprobs is None else [],
            finish_reason="length",
            stop_reason=None,
        )
    parts = None
    if completion.logprobs is not None:
        skip = call.request.sampling.skip_special_tokens
        offsets = TextOffsets(tokenizer, prompt_ids, skip_special_tokens=skip, start=len(echoed))
        starts = offsets.take(completion.token_ids, completion.text, is_last=True)
        of_output = [p.token_id for p in completion.logprobs]
        parts = columns(of_output, completion.logprobs, starts, tokenizer)
        if prompt_columns is not None:
            parts = {name: prompt_columns[name] + column for name, column in parts.items()}
    return {
        "index": completion.index,
        "text": echoed + completion.text,
        "logprobs": parts,
        **_ending(call, completion),
    }


def prompt_text(
    call: OpenAICall, prompt: str | None, token_ids: Sequence[int], tokenizer: Tokenizer
) -> str:
    """Returns the prompt as an echo shows it; `prompt` is None where it was given as ids."""
    if prompt is not None:
        return prompt
    skip = call.request.sampling.skip_special_tokens
    return tokenizer.decode(token_ids, skip_special_tokens=skip)


def echoed_columns(
    call: OpenAICall,
    prompt: str | None,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    echoed: str,
    tokenizer: Tokenizer,
) -> dict[str, list[Any]]:
    """Returns the log-probabilities of an echoed prompt's tokens."""
    # A text holds no BOS that the tokenizer has added, whatever the answer is to show.
    skip = prompt is not None or call.request.sampling.skip_special_tokens
    offsets = TextOffsets(tokenizer, (), skip_special_tokens=skip)
    starts = offsets.take(token_ids, echoed, is_last=True)
    return columns(token_ids, logprobs, starts, tokenizer)
