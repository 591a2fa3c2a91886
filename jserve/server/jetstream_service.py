"""JetStream's Orchestrator, for clients made for it. Knows its messages and calls."""

from __future__ import annotations

from collections.abc import AsyncIterator

from jserve.errors import InvalidRequest
from jserve.messages import GenerateRequest
from jserve.sampling_params import SamplingParams
from jserve.server.front import Front
from jserve.server.identity import call_of
from jserve.server.proto import jetstream_pb2 as pb
from jserve.server.rpc import Context, read_message, with_call_deadline
from jserve.server.wire import refuse_unknown_fields

ORCHESTRATOR = pb.DESCRIPTOR.services_by_name["Orchestrator"]
JETSTREAM_SERVICE = ORCHESTRATOR.full_name

_Sample = pb.DecodeResponse.StreamContent.Sample


class JetstreamService:
    """jetstream_proto.Orchestrator over the engine behind `front`."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def Decode(
        self, message: pb.DecodeRequest, context: Context
    ) -> AsyncIterator[pb.DecodeResponse]:
        """One message per update: of its choice the new text and tokens, of others nothing."""
        request = await read_message(message, request_from_jetstream)
        request = with_call_deadline(request, context)
        call = call_of(context, self._front.gate, f"{JETSTREAM_SERVICE}/Decode")
        async with await self._front.submit(request, call) as answer:
            async for update in answer:
                samples = [_Sample() for _ in range(request.sampling.n)]
                samples[update.index] = _Sample(text=update.text, token_ids=update.token_ids)
                content = pb.DecodeResponse.StreamContent(samples=samples)
                yield pb.DecodeResponse(stream_content=content)

    async def HealthCheck(
        self, message: pb.HealthCheckRequest, context: Context
    ) -> pb.HealthCheckResponse:
        return pb.HealthCheckResponse(is_live=self._front.is_ready)


def request_from_jetstream(message: pb.DecodeRequest) -> GenerateRequest:
    """Returns the engine's form of a request. The protocol has no settings of sampling: a single
    sample is greedy, and of several each is drawn, as equal ones would be of no use.

    Raises:
      InvalidRequest: no content, an undefined field, or a value out of its range.
    """
    refuse_unknown_fields(message)
    kind = message.WhichOneof("content")
    if kind is None:
        raise InvalidRequest("the request has no content; give text_content or token_content")
    is_text = kind == "text_content"
    return GenerateRequest(
        prompt=message.text_content.text if is_text else None,
        prompt_token_ids=None if is_text else list(message.token_content.token_ids),
        sampling=SamplingParams(
            temperature=1.0 if message.num_samples > 1 else 0.0,
            n=message.num_samples or 1,
            max_tokens=message.max_tokens or None,
        ),
    )
