"""VllmEngine's messages as jserve's requests, and updates as its answers: no server."""

from __future__ import annotations

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from jserve.errors import InvalidRequest
from jserve.messages import RequestUpdate, TokenLogprobs, Usage
from jserve.sampling_params import SamplingParams
from jserve.server.vllm_wire import (
    ALL_TOKENS,
    chunk_to_vllm,
    complete_to_vllm,
    request_from_vllm,
    sampling_from_vllm,
)
from jserve.structured import GrammarKind, StructuredOutput


def asking(**fields) -> pb.GenerateRequest:
    return pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[1, 2]), **fields)


def test_scalars_that_arrive_as_zero_mean_the_default():
    got = sampling_from_vllm(pb.SamplingParams())
    assert got == SamplingParams(max_tokens=None, skip_special_tokens=False)
    assert (got.temperature, got.top_p, got.repetition_penalty, got.n) == (1.0, 1.0, 1.0, 1)


def test_a_zero_with_presence_means_zero():
    assert sampling_from_vllm(pb.SamplingParams(temperature=0, seed=0)).temperature == 0
    assert sampling_from_vllm(pb.SamplingParams(seed=0)).seed == 0
    with pytest.raises(InvalidRequest, match="max_tokens=0"):
        sampling_from_vllm(pb.SamplingParams(max_tokens=0))


def test_every_field_of_sampling_arrives():
    given = pb.SamplingParams(
        **{"temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "n": 3, "seed": -4},
        **{"frequency_penalty": 0.5, "presence_penalty": -0.5, "repetition_penalty": 1.5},
        **{"max_tokens": 9, "min_tokens": 2, "logprobs": 4, "prompt_logprobs": 0},
        **{"stop": ["a", "b"], "stop_token_ids": [5], "logit_bias": {6: -1.5}},
        **{"skip_special_tokens": True, "include_stop_str_in_output": True},
        regex="x+",
    )
    assert request_from_vllm(asking(sampling_params=given)).sampling == SamplingParams(
        **{"temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "n": 3, "seed": -4},
        **{"frequency_penalty": 0.5, "presence_penalty": -0.5, "repetition_penalty": 1.5},
        **{"max_tokens": 9, "min_tokens": 2, "logprobs": 4, "prompt_logprobs": 0},
        **{"stop": ("a", "b"), "stop_token_ids": (5,), "logit_bias": {6: -1.5}},
        **{"skip_special_tokens": True, "include_stop_str": True},
        structured=StructuredOutput(GrammarKind.REGEX, "x+"),
    )
    assert sampling_from_vllm(pb.SamplingParams(ignore_eos=True)).ignore_eos


def test_a_top_k_of_minus_one_in_32_bits_keeps_all():
    assert sampling_from_vllm(pb.SamplingParams(top_k=ALL_TOKENS)).top_k == 0
    with pytest.raises(InvalidRequest, match="top_k"):
        sampling_from_vllm(pb.SamplingParams(top_k=ALL_TOKENS - 1))


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ({"json_schema": "{}"}, StructuredOutput(GrammarKind.JSON_SCHEMA, "{}")),
        ({"regex": "a"}, StructuredOutput(GrammarKind.REGEX, "a")),
        ({"grammar": 'start: "a"'}, StructuredOutput(GrammarKind.LARK, 'start: "a"')),
        ({"structural_tag": "{}"}, StructuredOutput(GrammarKind.STRUCTURAL_TAG, "{}")),
        ({"json_object": True}, StructuredOutput(GrammarKind.JSON_OBJECT)),
        ({"json_object": False}, None),
        ({"choice": {"choices": ["a", "b"]}}, StructuredOutput.of_choice(["a", "b"])),
    ],
)
def test_each_kind_of_constraint_is_its_grammar(fields, want):
    assert sampling_from_vllm(pb.SamplingParams(**fields)).structured == want


@pytest.mark.parametrize(
    "fields",
    [
        {"mm_inputs": {}},
        {"extra_mm_inputs": [{}]},
        {"media_refs": {}},
        {"kv_transfer_params": {}},
        {"kv_transfer_params_json": "{}"},
        {"data_parallel_rank": 1},
        {"sampling_params": {"truncate_prompt_tokens": 5}},
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields):
    (name,) = fields.get("sampling_params", fields)
    with pytest.raises(InvalidRequest, match=name):
        request_from_vllm(asking(**fields))


def test_undefined_fields_are_refused_by_number():
    data = asking().SerializeToString() + b"\x98\x06\x01"  # field 99, a varint
    with pytest.raises(InvalidRequest, match="99"):
        request_from_vllm(pb.GenerateRequest.FromString(data))


def test_text_and_ids_are_prompts_and_nothing_is_none():
    assert request_from_vllm(asking(request_id="me")).request_id == "me"
    assert request_from_vllm(asking()).prompt_token_ids == [1, 2]
    assert request_from_vllm(asking()).request_id is None
    assert request_from_vllm(pb.GenerateRequest(text="hi")).prompt == "hi"
    with pytest.raises(InvalidRequest, match="no input"):
        request_from_vllm(pb.GenerateRequest())


TOP = TokenLogprobs(7, -0.5, ((8, -0.25), (7, -0.5)), 2)
LAST = RequestUpdate(
    request_id="r",
    index=1,
    token_ids=(7, 9),
    logprobs=(TOP, TokenLogprobs(9, -1.0, ((9, -1.0), (7, -2.0)), 1)),
    prompt_token_ids=(1, 2),
    prompt_logprobs=(None, TokenLogprobs(2, -3.0, (), 5)),
    finish_reason="stop",
    stop_reason=9,
    usage=Usage(2, 12, 1),
)


def test_a_chunk_counts_its_own_tokens_and_complete_all():
    chunk, complete = chunk_to_vllm(LAST, 2).chunk, complete_to_vllm(LAST, 2).complete
    assert (chunk.index, list(chunk.token_ids), chunk.completion_tokens) == (1, [7, 9], 2)
    assert (chunk.prompt_tokens, chunk.cached_tokens) == (2, 1)
    assert (complete.index, list(complete.output_ids), complete.completion_tokens) == (
        1,
        [7, 9],
        12,
    )
    assert (complete.prompt_tokens, complete.cached_tokens) == (2, 1)
    assert (complete.finish_reason, complete.matched_token_id) == ("stop", 9)


def test_log_probabilities_are_columns_and_the_first_prompt_token_has_none():
    for message in (chunk_to_vllm(LAST, 2).chunk, complete_to_vllm(LAST, 2).complete):
        out, into = message.output_logprobs, message.input_logprobs
        assert (list(out.token_ids), list(out.token_logprobs)) == ([7, 9], [-0.5, -1.0])
        assert [list(t.token_ids) for t in out.top_logprobs] == [[8, 7], [9, 7]]
        assert [list(t.values) for t in out.top_logprobs] == [[-0.25, -0.5], [-1.0, -2.0]]
        assert list(into.token_ids) == [1, 2]
        assert [e.HasField("value") for e in into.token_logprobs] == [False, True]
        assert into.token_logprobs[1].value == -3.0
        assert not into.top_logprobs


def test_a_stop_string_is_matched_as_text_and_logprobs_not_asked_for_are_absent():
    plain = RequestUpdate(request_id="r", finish_reason="stop", stop_reason="END")
    complete = complete_to_vllm(plain, 2).complete
    assert complete.WhichOneof("matched_stop") == "matched_stop_str"
    assert complete.matched_stop_str == "END"
    assert not complete.HasField("output_logprobs")
    assert not complete.HasField("input_logprobs")
