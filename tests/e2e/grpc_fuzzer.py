"""Random calls for a gRPC server: whatever its reflection tells of, in legal, odd and broken forms.
Knows descriptors and statuses: of what the calls mean, only an example of each that takes work.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import ParseDict
from google.protobuf.message import EncodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

AT_ONCE = 16  # calls
CALL_S = 2.0  # after which an answer is no longer waited for
QUIET_S = 30.0
MAX_DEPTH = 4
FEW_ANSWERS = 8  # that a call reads which may never end

# Its code is gRPC's own, which does not tell bytes that do not parse from its own faults.
FOREIGN = "grpc.reflection.v1alpha.ServerReflection"
DESIGNED = {
    *("OK", "LEFT", "CANCELLED", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED"),
    *("DEADLINE_EXCEEDED", "UNIMPLEMENTED", "PERMISSION_DENIED"),
}
PARSE_FAULT = "DecodeError"
# What gRPC's client calls the end of a call whose deadline passes while it writes its requests.
CLIENT_FAULT = "Internal error from Core"

_VLLM = {"tokenized": {"inputIds": [1, 2, 3]}, "samplingParams": {"temperature": 0, "maxTokens": 4}}
CANARY = {
    "tokenized": {"inputIds": [5, 6, 7]},
    "samplingParams": {"temperature": 0, "maxTokens": 8},
}
GENERATE = "vllm.grpc.engine.VllmEngine.Generate"
LOADS = "vllm.grpc.engine.VllmEngine.GetLoads"
EXAMPLES: dict[str, dict[str, Any]] = {
    "jserve.v1.GenerateService.Generate": {"prompt": "abc", "sampling": {"max_tokens": 4}},
    "jserve.v1.GenerateService.GenerateStream": {"prompt": "abc", "sampling": {"max_tokens": 4}},
    GENERATE: CANARY | {"stream": True},
    "vllm.grpc.engine.VllmEngine.Embed": {"tokenized": {"inputIds": [1, 2, 3]}},
    "vllm.grpc.engine.VllmEngine.Abort": {"requestIds": ["a", "b"]},
    "jetstream_proto.Orchestrator.Decode": {"maxTokens": 4, "textContent": {"text": "abc"}},
}

INTEGERS = (
    *(0, 1, 2, 3, 5, 16, 100, 255, 256, 383, 384, 1000, 4095, 4096, 65_536),
    *(-1, -2, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63), 2**64 - 1),
)
FLOATS = (
    *(0.0, -0.0, 1.0, 0.5, 0.999, -1.0, 2.0, 100.0, 1e-45, 1e-30, 3e38, -3e38),
    *(float("nan"), float("inf"), float("-inf")),
)
TEXTS = (
    *("", "a", "abc", " ", "\0", "\ufffd", "é😀", "x" * 5000, "a", "b", "user", "system"),
    *("{}", "[]", '{"type":"object"}', '{"type":"array","items":{"$ref":"#"}}', "{", "null", "NaN"),
    *(".*", "(a|b)+c{2,3}", "((((", "[", 'start: "a"', "start: /x+/ start", "<|im_end|>", "auto"),
    *("json_schema", "regex", "choice", "grammar", "structural_tag", "json_object"),
)


class Fuzzer:
    """Calls the server at `target`, at random but the same for the same `seed`.

    Attributes:
      outcomes: how many calls ended how, by method and status.
      surprises: what no server should do, in words.
    """

    def __init__(self, target: str, seed: int) -> None:
        self._target = target
        self._random = random.Random(seed)
        self._channel = grpc.aio.insecure_channel(target)
        self._methods: list[MethodDescriptor] = []
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.surprises: list[str] = []

    async def __aenter__(self) -> Fuzzer:
        self._methods = await asyncio.to_thread(_reflected_methods, self._target)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def run(self, num_calls: int) -> None:
        """Makes the calls, AT_ONCE at a time, and checks that the server is well after them."""
        first = await self.canary()
        left = iter(range(num_calls))
        weights = [3 if method.full_name in EXAMPLES else 1 for method in self._methods]

        async def work() -> None:
            for _ in left:
                (method,) = self._random.choices(self._methods, weights)
                await self._call(method)

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
        await self.check_well()
        if (now := await self.canary()) != first:
            self.surprises.append(f"the canary's answer was {first} and is {now}")

    async def canary(self) -> list[int]:
        """Returns what a fixed request gets: the same, as long as the server is well."""
        answers = await self._read(self._method(GENERATE), CANARY, QUIET_S)
        return list(answers[-1].complete.output_ids)

    async def check_well(self) -> None:
        """Waits until the server holds nothing, and asks for its health."""
        give_up = asyncio.get_running_loop().time() + QUIET_S
        while True:
            ((load,),) = [a.loads for a in await self._read(self._method(LOADS), {}, QUIET_S)]
            if not (load.num_total_reqs or load.num_used_tokens or load.token_usage):
                break
            if asyncio.get_running_loop().time() > give_up:
                self.surprises.append(f"{QUIET_S:g} s after the last call the server holds {load}")
                break
            await asyncio.sleep(0.05)
        stub = health_pb2_grpc.HealthStub(self._channel)
        health = await stub.Check(health_pb2.HealthCheckRequest(), timeout=QUIET_S)
        if health.status != health_pb2.HealthCheckResponse.SERVING:
            self.surprises.append(f"health is {health.status}")

    def _method(self, full_name: str) -> MethodDescriptor:
        return next(m for m in self._methods if m.full_name == full_name)

    async def _read(
        self, method: MethodDescriptor, example: Mapping[str, Any], timeout_s: float
    ) -> list[Message]:
        """Returns the answers to a call that must go well."""
        data = ParseDict(example, GetMessageClass(method.input_type)()).SerializeToString()
        answers = self._begin(method, data, timeout_s)
        return [answer async for answer in answers]

    def _begin(self, method: MethodDescriptor, data: bytes, timeout_s: float) -> Any:
        """A call, with its request as it will be on the wire; its answers are a stream. That is
        how unary ones look on the wire, too."""
        path = f"/{method.containing_service.full_name}/{method.name}"
        parse = GetMessageClass(method.output_type).FromString
        if method.client_streaming:
            call = self._channel.stream_stream(path, response_deserializer=parse)
            return call(iter([data]), timeout=timeout_s)
        return self._channel.unary_stream(path, response_deserializer=parse)(
            data, timeout=timeout_s
        )

    async def _call(self, method: MethodDescriptor) -> None:
        data = self.request_bytes(method)
        leaves_after = self._random.choice((0, 1, *[FEW_ANSWERS] * 6))
        call = self._begin(method, data, self._random.choice((0.01, 0.2, CALL_S, CALL_S)))
        try:
            num_read = 0
            if leaves_after:
                async for _ in call:
                    num_read += 1
                    if num_read >= leaves_after:
                        break
            else:
                await asyncio.sleep(0)
            call.cancel()
            name, details = "OK" if num_read else "LEFT", ""
        except grpc.aio.AioRpcError as error:
            name, details = error.code().name, error.details() or ""
        except asyncio.CancelledError:
            name, details = "CANCELLED", ""
        self.outcomes[method.full_name, name] += 1
        is_foreign = method.containing_service.full_name == FOREIGN and PARSE_FAULT in details
        if name not in DESIGNED and not is_foreign and details != CLIENT_FAULT:
            self.surprises.append(f"{method.full_name}: {name}: {details} for {data[:300].hex()}")

    def request_bytes(self, method: MethodDescriptor) -> bytes:
        """Returns a request: an example with some fields changed, one of random fields, or bytes
        that are broken somewhere."""
        rng = self._random
        message = GetMessageClass(method.input_type)()
        kind = rng.random()
        if kind < 0.6:
            ParseDict(EXAMPLES.get(method.full_name, {}), message)
        self._fill(message, 0.5 if kind > 0.6 else rng.choice((0.0, 0.02, 0.1)), 0)
        try:
            data = bytearray(message.SerializeToString())
        except (EncodeError, ValueError):
            data = bytearray()
        if kind > 0.8:
            for _ in range(rng.randint(1, 4)):
                self._break(data)
        if kind > 0.97:
            data = bytearray(rng.randbytes(rng.randint(0, 200)))
        return bytes(data)

    def _break(self, data: bytearray) -> None:
        rng = self._random
        at = rng.randint(0, len(data))
        match rng.randint(0, 3):
            case 0:  # a field of some number, of any wire type
                data[at:at] = bytes([rng.randrange(256)]) + rng.randbytes(rng.randint(0, 9))
            case 1:
                del data[at : at + rng.randint(1, 20)]
            case 2:
                data[at : at + 1] = rng.randbytes(1)
            case _:
                data += data[: rng.randint(0, 50)]

    def _fill(self, message: Message, share: float, depth: int) -> None:
        """Gives a share of the message's fields a value each, whatever they had."""
        for field in message.DESCRIPTOR.fields:
            if self._random.random() >= share or depth > MAX_DEPTH:
                continue
            try:
                self._set(message, field, share, depth)
            except (ValueError, TypeError):  # a value that the field cannot hold
                continue

    def _set(self, message: Message, field: FieldDescriptor, share: float, depth: int) -> None:
        value = getattr(message, field.name)
        is_message = field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE
        if is_message and field.message_type.GetOptions().map_entry:
            key, of = (field.message_type.fields_by_name[n] for n in ("key", "value"))
            for _ in range(self._random.choice((1, 3, 40))):
                if of.cpp_type != FieldDescriptor.CPPTYPE_MESSAGE:
                    value[self._scalar(key)] = self._scalar(of)
        elif field.is_repeated:
            for _ in range(self._random.choice((1, 2, 5, 200))):
                if is_message:
                    self._fill(value.add(), share, depth + 1)
                else:
                    value.append(self._scalar(field))
        elif is_message:
            value.SetInParent()
            self._fill(value, share, depth + 1)
        else:
            setattr(message, field.name, self._scalar(field))

    def _scalar(self, field: FieldDescriptor) -> Any:
        rng = self._random
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_BOOL:
                return rng.random() < 0.5
            case FieldDescriptor.CPPTYPE_STRING:
                text = rng.choice(TEXTS)
                return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
            case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
                return rng.choice(FLOATS)
            case FieldDescriptor.CPPTYPE_ENUM:
                return rng.choice(field.enum_type.values).number
            case _:
                return rng.choice(INTEGERS)


def _reflected_methods(target: str) -> list[MethodDescriptor]:
    """The methods of every service that the server's reflection lists."""
    with grpc.insecure_channel(target) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = DescriptorPool(database)
        return [
            method
            for name in database.get_services()
            for method in pool.FindServiceByName(name).methods
        ]
