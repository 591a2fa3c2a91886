"""Turns jserve's messages into proto messages and back. The one place that knows both; no calls."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from jserve.errors import InvalidRequest
from jserve.json_pieces import INLINE_BYTES, loads_in_pieces
from jserve.messages import GenerateRequest, RequestUpdate, Timings, TokenLogprobs, Usage
from jserve.server.proto import generate_pb2 as pb
from jserve.server.wire_sampling import sampling_from_proto, sampling_to_proto

_TURN_TEXTS = ("name", "tool_call_id", "reasoning_content")


def request_from_proto(message: pb.GenerateRequest) -> GenerateRequest:
    """Returns the engine's form of a request.

    Raises:
      InvalidRequest: no input, an undefined field (also one of the wrong wire type, which protobuf
        keeps as an unknown field), or a value out of its range.
    """
    refuse_unknown_fields(message)
    kind = message.WhichOneof("input")
    if kind is None:
        raise InvalidRequest("the request has no input; give one of prompt, token_ids or chat")
    return GenerateRequest(
        prompt=message.prompt if kind == "prompt" else None,
        prompt_token_ids=list(message.token_ids.ids) if kind == "token_ids" else None,
        **(_chat_from_proto(message.chat) if kind == "chat" else {}),
        sampling=sampling_from_proto(message.sampling),
        request_id=message.request_id or None,
        model=message.model,
        priority=message.priority,
        request_class=message.request_class,
        tenant=message.tenant,
        timeout_s=_seconds(message, "timeout_s"),
        queue_timeout_s=_seconds(message, "queue_timeout_s"),
    )


def _chat_from_proto(chat: pb.ChatMessages) -> dict[str, Any]:
    tools = _from_json("tools", chat.tools)
    choice = chat.tool_choice or "auto"
    return {
        "messages": [_turn_from_proto(turn) for turn in chat.messages],
        "tools": tools,
        "tool_choice": _from_json("tool_choice", choice) if choice.startswith("{") else choice,
        "template_args": _from_json("template_args", chat.template_args),
        "continue_final_message": chat.continue_final_message,
        "add_generation_prompt": not chat.HasField("add_generation_prompt")
        or chat.add_generation_prompt,
    }


def _turn_from_proto(turn: pb.ChatMessage) -> dict[str, Any]:
    calls = _from_json("tool_calls", turn.tool_calls)
    fields: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if calls is not None:
        fields |= {"content": turn.content or None, "tool_calls": calls}
    return fields | {name: text for name in _TURN_TEXTS if (text := getattr(turn, name))}


def _from_json(name: str, text: str) -> Any:
    loads = json.loads if len(text) <= INLINE_BYTES else loads_in_pieces
    try:
        return loads(text) if text else None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} is not JSON: {error}") from error


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _seconds(message: pb.GenerateRequest, name: str) -> float | None:
    value: float | None = getattr(message, name) if message.HasField(name) else None
    if value is not None and not 0 < value < math.inf:  # false for NaN too
        raise InvalidRequest(f"{name}={value} is not a finite number of seconds above 0")
    return value


def request_to_proto(
    request: GenerateRequest, *, return_prompt_token_ids: bool = False
) -> pb.GenerateRequest:
    """Returns the message for a request, with every sampling field written out.

    Raises:
      InvalidRequest: a value that no proto field can hold, such as an id of more than 64 bits; a
        pooling, as the answer has no field for an embedding.
    """
    if request.pooling:
        raise InvalidRequest("GenerateService has no embeddings; use /v1/embeddings over HTTP")
    try:
        message = pb.GenerateRequest(
            sampling=sampling_to_proto(request.sampling),
            model=request.model,
            request_id=request.request_id or "",
            priority=request.priority,
            request_class=request.request_class,
            tenant=request.tenant,
            timeout_s=request.timeout_s,
            queue_timeout_s=request.queue_timeout_s,
            return_prompt_token_ids=return_prompt_token_ids,
        )
        if request.prompt is not None:
            message.prompt = request.prompt
        elif request.prompt_token_ids is not None:
            message.token_ids.ids.extend(request.prompt_token_ids)
            message.token_ids.SetInParent()  # an empty list is an input too: the server judges
        elif request.messages is not None:
            message.chat.SetInParent()
            _write_chat(message.chat, request, request.messages)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"the request cannot be sent: {error}") from error
    return message


def _write_chat(
    chat: pb.ChatMessages, request: GenerateRequest, messages: Sequence[Mapping[str, Any]]
) -> None:
    for turn in messages:
        fields = {name: value for name, value in turn.items() if value is not None}
        if "tool_calls" in fields:
            fields["tool_calls"] = _to_json(fields["tool_calls"])
        chat.messages.add(**fields)
    if request.tools is not None:
        chat.tools = _to_json(request.tools)
    choice = request.tool_choice
    chat.tool_choice = choice if isinstance(choice, str) else _to_json(choice)
    if request.template_args is not None:
        chat.template_args = _to_json(request.template_args)
    chat.continue_final_message = request.continue_final_message
    chat.add_generation_prompt = request.add_generation_prompt


def update_to_proto(
    update: RequestUpdate, *, return_prompt_token_ids: bool = False
) -> pb.GenerateResponse:
    """Returns the message for one update; errors are statuses, so never part of it."""
    message = pb.GenerateResponse(
        request_id=update.request_id,
        text=update.text,
        token_ids=update.token_ids,
        finish_reason=update.finish_reason or "",
        index=update.index,
        num_live_choices=update.num_live_choices,
        logprobs=map(_logprobs_to_proto, update.logprobs),
    )
    if update.prompt_logprobs:
        known = [entry for entry in update.prompt_logprobs if entry is not None]
        message.prompt_logprobs.tokens.extend(map(_logprobs_to_proto, known))
        message.prompt_logprobs.SetInParent()  # of a prompt of one token: nothing
    if return_prompt_token_ids:
        message.prompt_token_ids.extend(update.prompt_token_ids)
    if isinstance(update.stop_reason, str):
        message.stop_string = update.stop_reason
    elif update.stop_reason is not None:
        message.stop_token_id = update.stop_reason
    if (usage := update.usage) is not None:
        message.usage.prompt_tokens = usage.prompt_tokens
        message.usage.completion_tokens = usage.completion_tokens
        message.usage.cached_tokens = usage.cached_tokens
        message.usage.SetInParent()
    if (timings := update.timings) is not None:
        message.timings.queue_s = timings.queue_s
        message.timings.e2e_s = timings.e2e_s
        if timings.ttft_s is not None:
            message.timings.ttft_s = timings.ttft_s
        if timings.itl_s is not None:
            message.timings.itl_s = timings.itl_s
    return message


def update_from_proto(message: pb.GenerateResponse) -> RequestUpdate:
    """Returns the update that `update_to_proto` was given, log-probabilities in float32."""
    usage, timings = message.usage, message.timings
    stop = message.WhichOneof("stop_reason")
    return RequestUpdate(
        request_id=message.request_id,
        text=message.text,
        token_ids=tuple(message.token_ids),
        index=message.index,
        num_live_choices=message.num_live_choices,
        logprobs=tuple(map(_logprobs_from_proto, message.logprobs)),
        prompt_token_ids=tuple(message.prompt_token_ids),
        prompt_logprobs=(None, *map(_logprobs_from_proto, message.prompt_logprobs.tokens))
        if message.HasField("prompt_logprobs")
        else (),
        finish_reason=message.finish_reason or None,
        stop_reason=getattr(message, stop) if stop else None,
        usage=Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
        if message.HasField("usage")
        else None,
        timings=Timings(
            queue_s=timings.queue_s,
            ttft_s=timings.ttft_s if timings.HasField("ttft_s") else None,
            e2e_s=timings.e2e_s,
            itl_s=timings.itl_s if timings.HasField("itl_s") else None,
        )
        if message.HasField("timings")
        else None,
    )


def answer_to_proto(
    choices: Sequence[RequestUpdate], *, return_prompt_token_ids: bool = False
) -> pb.GenerateResponse:
    """Returns the unary answer that holds the whole `choices`, at least one, in order of index."""
    first = choices[0]
    if len(choices) == 1:
        return update_to_proto(first, return_prompt_token_ids=return_prompt_token_ids)
    shared = RequestUpdate(
        request_id=first.request_id,
        prompt_token_ids=first.prompt_token_ids,
        prompt_logprobs=first.prompt_logprobs,
        usage=Usage.of_choices(c.usage for c in choices if c.usage is not None),
    )
    answer = update_to_proto(shared, return_prompt_token_ids=return_prompt_token_ids)
    own = (replace(choice, prompt_token_ids=(), prompt_logprobs=()) for choice in choices)
    answer.choices.extend(map(update_to_proto, own))
    return answer


def answer_from_proto(message: pb.GenerateResponse) -> list[RequestUpdate]:
    """Returns the choices that `answer_to_proto` was given."""
    whole = update_from_proto(message)
    if not message.choices:
        return [whole]
    first, *others = map(update_from_proto, message.choices)
    shared = {name: getattr(whole, name) for name in ("prompt_token_ids", "prompt_logprobs")}
    return [replace(first, **shared), *others]


def _logprobs_to_proto(entry: TokenLogprobs) -> pb.TokenLogprobs:
    top = [pb.TokenLogprob(token_id=i, logprob=p) for i, p in entry.top]
    return pb.TokenLogprobs(
        token_id=entry.token_id, logprob=entry.logprob, top=top, rank=entry.rank
    )


def _logprobs_from_proto(entry: pb.TokenLogprobs) -> TokenLogprobs:
    top = tuple((t.token_id, t.logprob) for t in entry.top)
    return TokenLogprobs(entry.token_id, entry.logprob, top, entry.rank)


def refuse_unknown_fields(message: Message) -> None:
    """Raises InvalidRequest for a field that is not defined, with its number."""
    for unknown in UnknownFieldSet(message):
        raise InvalidRequest(
            f"{message.DESCRIPTOR.name} has field number {unknown.field_number}, which this server "
            "does not support with that type"
        )
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            for part in _messages_in(field, value):
                refuse_unknown_fields(part)


def _messages_in(field: FieldDescriptor, value: Any) -> Iterable[Message]:
    if not field.is_repeated:
        return (value,)
    if not field.message_type.GetOptions().map_entry:
        return value
    holds_messages = field.message_type.fields_by_name["value"].type == field.TYPE_MESSAGE
    return value.values() if holds_messages else ()
