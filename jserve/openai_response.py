"""Shapes finished outputs as OpenAI response bodies. Knows field names and shapes: no transport, no
files, no engine.

Sources: the OpenAI API reference, /v1/chat/completions and /v1/completions; `stop_reason`,
`reasoning_content`, `token_ids` and `prompt_logprobs` are vLLM's extensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jserve.messages import GenerateRequest, TokenLogprobs
from jserve.offline import CompletionOutput, RequestOutput
from jserve.openai_format import Endpoint, OpenAICall
from jserve.text.detokenizer import Detokenizer
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
    body: dict[str, Any] = {
        "id": ("chatcmpl-" if chat else "cmpl-") + output.request_id,
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": model,
        "choices": [
            _chat_choice(call, completion, tokenizer, new_parser(call.request, prompt_ids))
            if chat
            else _text_choice(call, output, completion, tokenizer)
            for completion in output.outputs
        ],
        "usage": usage_body(output),
    }
    if output.prompt_logprobs is not None and not call.echo:
        body["prompt_logprobs"] = [
            None if p is None else _prompt_entry(p, tokenizer) for p in output.prompt_logprobs
        ]
    if call.return_token_ids:
        body["prompt_token_ids"] = prompt_ids
    return body


def usage_body(output: RequestOutput) -> dict[str, Any]:
    usage = output.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


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
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning := "".join(delta.reasoning for delta in deltas):
        message["reasoning_content"] = reasoning
    if calls:
        message |= {"content": content or None, "tool_calls": calls}
    choice = {
        "index": completion.index,
        "message": message,
        "logprobs": _chat_logprobs(completion, tokenizer),
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


def _text_choice(
    call: OpenAICall, output: RequestOutput, completion: CompletionOutput, tokenizer: Tokenizer
) -> dict[str, Any]:
    echoed = _prompt_text(call, output, tokenizer) if call.echo else ""
    logprobs = None
    if completion.logprobs is not None:
        parts = _columns(
            [p.token_id for p in completion.logprobs],
            completion.logprobs,
            _offsets(call, output, completion, tokenizer, len(echoed)),
            tokenizer,
        )
        if call.echo:
            ids = output.prompt_token_ids
            offsets = _prompt_offsets(call, output, echoed, tokenizer)
            prompt = _columns(ids, output.prompt_logprobs or (), offsets, tokenizer)
            parts = {name: prompt[name] + column for name, column in parts.items()}
        logprobs = parts
    return {
        "index": completion.index,
        "text": echoed + completion.text,
        "logprobs": logprobs,
        **_ending(call, completion),
    }


# ---- log-probabilities --------------------------------------------------------------------------


def _named(tokenizer: Tokenizer, token_id: int) -> str:
    """The token's text, or "bytes:\\xf0\\x9f" where it is a part of a character, as OpenAI has it,
    or "token_id:7" where it has none: two tokens must never have one name."""
    data = tokenizer.token_bytes(token_id)
    if not data:
        return f"token_id:{token_id}"
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _chat_logprobs(completion: CompletionOutput, tokenizer: Tokenizer) -> dict[str, Any] | None:
    if completion.logprobs is None:
        return None

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        return {"token": _named(tokenizer, token_id), "logprob": logprob, "bytes": list(data)}

    return {
        "content": [
            entry(p.token_id, p.logprob) | {"top_logprobs": [entry(*top) for top in p.top]}
            for p in completion.logprobs
        ]
    }


def _columns(
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    offsets: list[int],
    tokenizer: Tokenizer,
) -> dict[str, list[Any]]:
    """The log-probabilities of a completion, which come as columns."""

    def name(token_id: int) -> str:
        return _named(tokenizer, token_id)

    return {
        "tokens": [name(token_id) for token_id in token_ids],
        "token_logprobs": [p and p.logprob for p in logprobs],
        "top_logprobs": [p and {name(i): value for i, value in p.top} for p in logprobs],
        "text_offset": offsets,
    }


def _prompt_entry(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, Any]:
    """Those of one prompt token: the alternatives and itself, by id."""
    ranked = [(i, value, rank) for rank, (i, value) in enumerate(entry.top, 1)]
    return {
        str(i): {
            "logprob": value,
            "rank": rank,
            "decoded_token": _named(tokenizer, i),
        }
        for i, value, rank in [*ranked, (entry.token_id, entry.logprob, entry.rank)]
    }


# ---- where tokens are in the text ---------------------------------------------------------------


def _prompt_text(call: OpenAICall, output: RequestOutput, tokenizer: Tokenizer) -> str:
    if output.prompt is not None:
        return output.prompt
    skip = call.request.sampling.skip_special_tokens
    return tokenizer.decode(output.prompt_token_ids, skip_special_tokens=skip)


def _prompt_offsets(
    call: OpenAICall, output: RequestOutput, echoed: str, tokenizer: Tokenizer
) -> list[int]:
    # A text holds no BOS that the tokenizer has added, whatever the answer is to show.
    skip = output.prompt is not None or call.request.sampling.skip_special_tokens
    detokenizer = Detokenizer(tokenizer, (), skip_special_tokens=skip)
    return _starts(detokenizer, output.prompt_token_ids, echoed, tokenizer)


def _offsets(
    call: OpenAICall,
    output: RequestOutput,
    completion: CompletionOutput,
    tokenizer: Tokenizer,
    num_before: int,
) -> list[int]:
    skip = call.request.sampling.skip_special_tokens
    detokenizer = Detokenizer(tokenizer, output.prompt_token_ids, skip_special_tokens=skip)
    starts = _starts(detokenizer, completion.token_ids, completion.text, tokenizer)
    return [num_before + start for start in starts]


def _starts(
    detokenizer: Detokenizer, token_ids: Sequence[int], text: str, tokenizer: Tokenizer
) -> list[int]:
    """Where in `text` each token begins, in characters: 0 or more, at most its length. What is not
    shown takes no room; the parts of one character all begin where it does."""
    starts, end = [], 0
    for token_id in token_ids:
        starts.append(end)
        piece = detokenizer.add((token_id,))
        if not piece and token_id in tokenizer.special_token_ids:
            name = _named(tokenizer, token_id)
            piece = name if text.startswith(name, end) else ""  # where the caller has written it
        end = min(end + len(piece), len(text))
    return starts
