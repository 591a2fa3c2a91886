"""Turns jserve's messages into proto messages and back. The one place that knows both; no calls."""

from __future__ import annotations

import math
from collections.abc import Iterable

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from jserve.errors import InvalidRequest
from jserve.messages import GenerateRequest, RequestUpdate, Timings, TokenLogprobs, Usage
from jserve.sampling_params import SamplingParams
from jserve.server.proto import generate_pb2 as pb

_OPTIONAL_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "max_tokens",
    "logprobs",
    "skip_special_tokens",
)
_PLAIN_SAMPLING = ("ignore_eos", "include_stop_str")
_REPEATED_SAMPLING = ("stop", "stop_token_ids")


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
        messages=[{"role": m.role, "content": m.content} for m in message.chat.messages]
        if kind == "chat"
        else None,
        sampling=_sampling_from_proto(message.sampling),
        request_id=message.request_id or None,
        model=message.model,
        priority=message.priority,
        request_class=message.request_class,
        tenant=message.tenant,
        timeout_s=_seconds(message, "timeout_s"),
        queue_timeout_s=_seconds(message, "queue_timeout_s"),
    )


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
      InvalidRequest: a value that no proto field can hold, such as an id of more than 64 bits.
    """
    sampling = request.sampling
    given = {name: getattr(sampling, name) for name in _OPTIONAL_SAMPLING + _PLAIN_SAMPLING}
    given |= {name: list(getattr(sampling, name)) for name in _REPEATED_SAMPLING}
    try:
        message = pb.GenerateRequest(
            sampling=pb.SamplingParams(**{k: v for k, v in given.items() if v is not None}),
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
            for turn in request.messages:
                message.chat.messages.add(**turn)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the request cannot be sent: {error}") from error
    return message


def update_to_proto(
    update: RequestUpdate, *, return_prompt_token_ids: bool = False
) -> pb.GenerateResponse:
    """Returns the message for one update; errors are statuses, so never part of it."""
    message = pb.GenerateResponse(
        request_id=update.request_id,
        text=update.text,
        token_ids=update.token_ids,
        finish_reason=update.finish_reason or "",
    )
    for entry in update.logprobs:
        message.logprobs.add(
            token_id=entry.token_id,
            logprob=entry.logprob,
            top=[pb.TokenLogprob(token_id=i, logprob=p) for i, p in entry.top],
        )
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
        logprobs=tuple(
            TokenLogprobs(e.token_id, e.logprob, tuple((t.token_id, t.logprob) for t in e.top))
            for e in message.logprobs
        ),
        prompt_token_ids=tuple(message.prompt_token_ids),
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


def joined(updates: Iterable[RequestUpdate]) -> RequestUpdate:
    """Returns one update that holds everything the non-empty `updates` of one request hold."""
    parts = list(updates)
    last = parts[-1]
    return RequestUpdate(
        request_id=last.request_id,
        text="".join(p.text for p in parts),
        token_ids=tuple(i for p in parts for i in p.token_ids),
        logprobs=tuple(e for p in parts for e in p.logprobs),
        prompt_token_ids=parts[0].prompt_token_ids,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        error=last.error,
        usage=last.usage,
        timings=last.timings,
    )


def _sampling_from_proto(message: pb.SamplingParams) -> SamplingParams:
    """Fields not given keep SamplingParams' default; of max_tokens that is None here: no limit of
    its own, as protobuf users read "not set"."""
    given = {name: getattr(message, name) for name in _OPTIONAL_SAMPLING if message.HasField(name)}
    given |= {name: getattr(message, name) for name in _PLAIN_SAMPLING}
    given |= {name: tuple(getattr(message, name)) for name in _REPEATED_SAMPLING}
    return SamplingParams(**{"max_tokens": None, **given})


def refuse_unknown_fields(message: Message) -> None:
    """Raises InvalidRequest for a field that is not defined, with its number."""
    for unknown in UnknownFieldSet(message):
        raise InvalidRequest(
            f"{message.DESCRIPTOR.name} has field number {unknown.field_number}, which this server "
            "does not support with that type"
        )
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            for part in value if field.is_repeated else (value,):
                refuse_unknown_fields(part)
