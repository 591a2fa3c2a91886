"""What all gRPC services share: registration and calls by descriptor, and how calls fail. Knows
messages and statuses: no engine."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from jserve.errors import DeadlineExceeded, InvalidRequest
from jserve.json_pieces import INLINE_BYTES
from jserve.messages import GenerateRequest
from jserve.server.status import end_with_status

Context: TypeAlias = grpc.aio.ServicerContext
M = TypeVar("M", bound=Message)


def add_service(
    server: grpc.aio.Server, service: ServiceDescriptor, implementation: object
) -> None:
    """Registers the methods that `implementation` has by the service's names: coroutines, or
    asynchronous generators where the answer is a stream, unless they write it to the context. What
    they raise becomes a status.

    By the descriptor, as generated code cannot answer bytes that do not parse with
    INVALID_ARGUMENT.
    """
    handlers = {m.name: _handler(m, getattr(implementation, m.name)) for m in service.methods}
    generic = grpc.method_handlers_generic_handler(service.full_name, handlers)
    server.add_generic_rpc_handlers((generic,))


def _handler(method: MethodDescriptor, answer: Callable[..., Any]) -> grpc.RpcMethodHandler:
    parse = GetMessageClass(method.input_type).FromString

    def parsed(data: bytes) -> Message:
        try:
            return parse(data)
        except DecodeError as error:
            raise InvalidRequest(
                f"the request of {len(data)} bytes is no {method.input_type.full_name}"
            ) from error

    async def unary(data: bytes, context: Context) -> Message:
        try:
            return await answer(parsed(data), context)
        except Exception as error:
            await end_with_status(context, error)

    async def stream(data: bytes, context: Context) -> AsyncIterator[Message]:
        try:
            async with aclosing(answer(parsed(data), context)) as messages:
                async for message in messages:
                    yield message
        except Exception as error:
            await end_with_status(context, error)

    async def written(data: bytes, context: Context) -> None:
        try:
            await answer(parsed(data), context)
        except Exception as error:
            await end_with_status(context, error)

    serializer = GetMessageClass(method.output_type).SerializeToString
    if inspect.isasyncgenfunction(answer):
        return grpc.unary_stream_rpc_method_handler(stream, response_serializer=serializer)
    if method.server_streaming:
        return grpc.unary_stream_rpc_method_handler(written, response_serializer=serializer)
    return grpc.unary_unary_rpc_method_handler(unary, response_serializer=serializer)


def stub_of(channel: grpc.aio.Channel, service: ServiceDescriptor) -> SimpleNamespace:
    """Returns the calls of a service by name: each takes a message, timeout and metadata."""
    calls = {}
    for method in service.methods:
        call = channel.unary_stream if method.server_streaming else channel.unary_unary
        calls[method.name] = call(
            f"/{service.full_name}/{method.name}",
            request_serializer=GetMessageClass(method.input_type).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
    return SimpleNamespace(**calls)


async def read_message(message: M, read: Callable[[M], GenerateRequest]) -> GenerateRequest:
    """Returns what `read` makes of a message. Long ones are read in a thread, so that streams keep
    flowing."""
    if message.ByteSize() <= INLINE_BYTES:
        return read(message)
    return await asyncio.to_thread(read, message)


def with_call_deadline(request: GenerateRequest, context: Context) -> GenerateRequest:
    """Returns the request with the earlier one of its own time limit and the call's."""
    remaining = context.time_remaining()
    if remaining is None or (request.timeout_s is not None and request.timeout_s <= remaining):
        return request
    if remaining <= 0:
        raise DeadlineExceeded("the call's deadline passed before the request was read")
    return dataclasses.replace(request, timeout_s=remaining)
