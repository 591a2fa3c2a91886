"""Turns messages of vllm.grpc.engine into jserve's requests, and updates into its answers. Knows
both forms; no calls.

The protocol's rules (smg-grpc-proto, vllm_engine.proto): scalars without presence that arrive as 0
mean the default; a chunk counts its own tokens alone; `complete` ends each choice. Not acted upon,
as the answer has no text and engines that lack the field do the same: `original_text`,
`spaces_between_special_tokens`, `grammar_from_first_token` (grammars always begin there).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from jserve.errors import InvalidRequest
from jserve.messages import GenerateRequest, RequestUpdate, TokenLogprobs
from jserve.sampling_params import SamplingParams
from jserve.server.wire import refuse_unknown_fields
from jserve.structured import GrammarKind, StructuredOutput

_UNSUPPORTED = (
    *("kv_transfer_params", "kv_transfer_params_json"),
    *("mm_inputs", "extra_mm_inputs", "media_refs"),
)
_PLAIN = ("min_p", "frequency_penalty", "presence_penalty", "min_tokens", "ignore_eos")
_OPTIONAL = ("temperature", "max_tokens", "logprobs", "prompt_logprobs", "seed")
_ZERO_IS_ONE = ("top_p", "repetition_penalty", "n")
ALL_TOKENS = 2**32 - 1  # -1 in 32 bits: how some routers write a top_k without limit


def request_from_vllm(message: pb.GenerateRequest) -> GenerateRequest:
    """Returns the engine's form of a request.

    Raises:
      InvalidRequest: no input, a field that is not supported here, or a value out of its range.
    """
    refuse_unknown_fields(message)
    given = {field.name for field, _ in message.ListFields()}
    for name in _UNSUPPORTED:
        if name in given:
            raise InvalidRequest(f"{name} is not supported by this server; leave it out")
    if message.data_parallel_rank:
        raise InvalidRequest(
            f"data_parallel_rank={message.data_parallel_rank} is not served here; use 0 or none"
        )
    kind = message.WhichOneof("input")
    if kind is None:
        raise InvalidRequest("the request has no input; give tokenized or text")
    return GenerateRequest(
        prompt=message.text if kind == "text" else None,
        prompt_token_ids=list(message.tokenized.input_ids) if kind == "tokenized" else None,
        sampling=sampling_from_vllm(message.sampling_params),
        request_id=message.request_id or None,
    )


def embed_request_from_vllm(message: pb.EmbedRequest) -> GenerateRequest:
    """Returns the request for the hidden state of the prompt's last token, which is what vLLM
    pools by default. Raises InvalidRequest for an undefined field."""
    refuse_unknown_fields(message)
    return GenerateRequest(
        prompt_token_ids=list(message.tokenized.input_ids),
        request_id=message.request_id or None,
        pooling="last",
    )


def sampling_from_vllm(message: pb.SamplingParams) -> SamplingParams:
    """Fields not given take vLLM's defaults, which are ours but for `max_tokens`: no limit of its
    own. Raises InvalidRequest as SamplingParams does, and for what is not supported."""
    if message.HasField("truncate_prompt_tokens"):
        raise InvalidRequest("truncate_prompt_tokens is not supported; send the prompt cut short")
    given: dict[str, Any] = {"max_tokens": None}
    given |= {name: getattr(message, name) for name in _PLAIN}
    given |= {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}
    given |= {name: value for name in _ZERO_IS_ONE if (value := getattr(message, name))}
    return SamplingParams(
        **given,
        top_k=0 if message.top_k == ALL_TOKENS else message.top_k,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=dict(message.logit_bias),
        skip_special_tokens=message.skip_special_tokens,
        include_stop_str=message.include_stop_str_in_output,
        structured=_structured(message),
    )


def _structured(message: pb.SamplingParams) -> StructuredOutput | None:
    kind = message.WhichOneof("constraint")
    if kind is None or (kind == "json_object" and not message.json_object):
        return None
    if kind == "json_object":
        return StructuredOutput(GrammarKind.JSON_OBJECT)
    if kind == "choice":
        return StructuredOutput.of_choice(message.choice.choices)
    return StructuredOutput(GrammarKind(kind), getattr(message, kind))


def chunk_to_vllm(update: RequestUpdate, num_prompt: int) -> pb.GenerateResponse:
    """Returns the message with an update's new tokens, of a prompt of `num_prompt` tokens."""
    chunk = pb.GenerateStreamChunk(
        token_ids=update.token_ids,
        prompt_tokens=num_prompt,
        completion_tokens=len(update.token_ids),
        output_logprobs=_output_logprobs(update.logprobs),
        input_logprobs=_input_logprobs(update),
        index=update.index,
    )
    if update.usage is not None:
        chunk.cached_tokens = update.usage.cached_tokens
    return pb.GenerateResponse(chunk=chunk)


def complete_to_vllm(choice: RequestUpdate, num_prompt: int) -> pb.GenerateResponse:
    """Returns the message that ends a choice, of which `choice` holds all there is."""
    complete = pb.GenerateComplete(
        output_ids=choice.token_ids,
        finish_reason=choice.finish_reason or "",
        prompt_tokens=num_prompt,
        completion_tokens=len(choice.token_ids),
        output_logprobs=_output_logprobs(choice.logprobs),
        input_logprobs=_input_logprobs(choice),
        index=choice.index,
    )
    if choice.usage is not None:
        complete.prompt_tokens = choice.usage.prompt_tokens
        complete.completion_tokens = choice.usage.completion_tokens
        complete.cached_tokens = choice.usage.cached_tokens
    if isinstance(choice.stop_reason, str):
        complete.matched_stop_str = choice.stop_reason
    elif choice.stop_reason is not None:
        complete.matched_token_id = choice.stop_reason
    return pb.GenerateResponse(complete=complete)


def embedding_to_vllm(update: RequestUpdate) -> pb.EmbedResponse:
    """Returns the answer with the embedding that `update` has."""
    values = () if update.embedding is None else update.embedding
    return pb.EmbedResponse(
        embedding=values,
        embedding_dim=len(values),
        prompt_tokens=update.usage.prompt_tokens if update.usage else 0,
    )


def _output_logprobs(entries: Sequence[TokenLogprobs]) -> pb.OutputLogProbs | None:
    if not entries:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[entry.logprob for entry in entries],
        token_ids=[entry.token_id for entry in entries],
        top_logprobs=[_top(entry) for entry in entries] if any(e.top for e in entries) else (),
    )


def _input_logprobs(update: RequestUpdate) -> pb.InputLogProbs | None:
    if not update.prompt_logprobs:
        return None
    entries = update.prompt_logprobs
    has_top = any(entry.top for entry in entries if entry)
    return pb.InputLogProbs(
        token_logprobs=[pb.InputTokenLogProb(value=e.logprob if e else None) for e in entries],
        token_ids=update.prompt_token_ids,
        top_logprobs=[_top(entry) for entry in entries] if has_top else (),
    )


def _top(entry: TokenLogprobs | None) -> pb.TopLogProbs:
    ids_and_values = entry.top if entry else ()
    return pb.TopLogProbs(
        values=[value for _, value in ids_and_values],
        token_ids=[token_id for token_id, _ in ids_and_values],
    )
