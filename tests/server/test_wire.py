"""Messages survive the way over the wire; what the server cannot honour is refused by name."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from jserve.errors import InvalidRequest
from jserve.messages import GenerateRequest, RequestUpdate, Timings, TokenLogprobs, Usage, joined
from jserve.sampling_params import SamplingParams
from jserve.server.proto import generate_pb2 as pb
from jserve.server.wire import (
    answer_from_proto,
    answer_to_proto,
    update_from_proto,
    update_to_proto,
)
from jserve.server.wire import request_from_proto as read
from jserve.server.wire import request_to_proto as write
from jserve.structured import StructuredOutput

EVERY_SAMPLING_FIELD = SamplingParams(
    temperature=0.5,
    top_k=7,
    top_p=0.9,
    min_p=0.1,
    seed=-5,
    max_tokens=99,
    stop=("a", "é"),
    stop_token_ids=(3, 4),
    ignore_eos=True,
    logprobs=2,
    skip_special_tokens=False,
    include_stop_str=True,
    presence_penalty=-0.5,
    frequency_penalty=0.25,
    repetition_penalty=1.5,
    logit_bias={7: -100, 0: 0.5},
    allowed_token_ids=(0, 7),
    bad_words=("é", (1, 2)),
    min_tokens=3,
    n=2,
    best_of=4,
    prompt_logprobs=1,
)
TOOL = {"type": "function", "function": {"name": "é", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "é", "arguments": '{"a": 1}'}}
REQUESTS = [
    GenerateRequest(prompt="hi", sampling=EVERY_SAMPLING_FIELD),
    GenerateRequest(prompt="", sampling=SamplingParams(max_tokens=None)),
    GenerateRequest(prompt_token_ids=[1, 2, 2**40, -1], request_id="r", model="m", timeout_s=1.5),
    GenerateRequest(prompt_token_ids=[], priority=-3, tenant="t", request_class="c"),
    GenerateRequest(prompt="x", queue_timeout_s=0.5),
    GenerateRequest(messages=[{"role": "system", "content": "x"}, {"role": "user", "content": ""}]),
    GenerateRequest(messages=[]),
    GenerateRequest(
        prompt="x", sampling=SamplingParams(structured=StructuredOutput("regex", "a+"))
    ),
    GenerateRequest(prompt="x", sampling=SamplingParams(logprobs=0, prompt_logprobs=0, seed=0)),
    GenerateRequest(
        messages=[
            {"role": "user", "content": "hi", "name": "ann"},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "?"},
            {"role": "tool", "content": "22", "tool_call_id": "1"},
        ],
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "é"}},
        template_args={"enable_thinking": False},
    ),
    GenerateRequest(
        messages=[{"role": "assistant", "content": "I"}],
        tools=[],
        tool_choice="none",
        continue_final_message=True,
        add_generation_prompt=False,
    ),
]
FINAL = RequestUpdate(
    request_id="r",
    text="é",
    token_ids=(1, 2),
    logprobs=(TokenLogprobs(1, -0.5, ((1, -0.5), (4, -2.0)), 1), TokenLogprobs(2, -0.25, (), 9)),
    prompt_token_ids=(5, 6),
    prompt_logprobs=(None, TokenLogprobs(6, -1.5, (), 3)),
    finish_reason="stop",
    stop_reason="END",
    usage=Usage(2, 2, 0),
    timings=Timings(queue_s=0.0, ttft_s=0.25, e2e_s=0.5, itl_s=None),
)


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_request_arrives_as_it_was_sent(request_):
    data = write(request_).SerializeToString()
    assert read(pb.GenerateRequest.FromString(data)) == request_


def test_every_sampling_field_has_a_proto_field_of_its_name():
    assert set(SamplingParams.__dataclass_fields__) == set(
        pb.SamplingParams.DESCRIPTOR.fields_by_name
    )


def test_sampling_fields_that_are_not_given_take_the_documented_defaults():
    assert read(pb.GenerateRequest(prompt="x")).sampling == SamplingParams(max_tokens=None)


def test_an_explicit_zero_is_not_taken_for_a_missing_field():
    message = pb.GenerateRequest(
        prompt="x", sampling=pb.SamplingParams(temperature=0, seed=0, logprobs=0)
    )
    sampling = read(message).sampling
    assert (sampling.temperature, sampling.seed, sampling.logprobs) == (0, 0, 0)


@pytest.mark.parametrize(
    "update",
    [
        FINAL,
        RequestUpdate(request_id="r", stop_reason=0, finish_reason="stop", usage=Usage(0, 0, 0)),
        RequestUpdate(request_id="r", text="only text"),
        RequestUpdate(request_id="r", index=2, finish_reason="length", num_live_choices=3),
        RequestUpdate(request_id="r", prompt_logprobs=(None,)),
    ],
)
def test_an_update_arrives_as_it_was_sent(update):
    data = update_to_proto(update, return_prompt_token_ids=True).SerializeToString()
    assert update_from_proto(pb.GenerateResponse.FromString(data)) == update


def test_prompt_ids_are_sent_only_when_asked_for():
    assert not update_to_proto(FINAL).prompt_token_ids


def test_joined_updates_hold_all_output_and_the_ending():
    first = RequestUpdate(request_id="r", text="a", token_ids=(7,), prompt_token_ids=(5, 6))
    (whole,) = joined([first, FINAL])
    assert (whole.text, whole.token_ids, whole.prompt_token_ids) == ("aé", (7, 1, 2), (5, 6))
    assert (whole.finish_reason, whole.usage) == ("stop", FINAL.usage)


def test_o31_joined_updates_of_several_choices_are_sorted_by_their_index():
    ending = {"finish_reason": "stop", "usage": Usage(2, 1, 0)}
    updates = [
        RequestUpdate(request_id="r", index=1, text="x", num_live_choices=0),
        RequestUpdate(request_id="r", index=0, text="a", prompt_token_ids=(5, 6)),
        RequestUpdate(request_id="r", index=1, text="y", num_live_choices=1, **ending),
        RequestUpdate(request_id="r", index=0, text="b", **ending),
    ]
    assert [(c.index, c.text) for c in joined(updates)] == [(0, "ab"), (1, "xy")]


def test_o31_a_unary_answer_of_several_choices_arrives_as_it_was_sent():
    choices = [FINAL, *(replace(FINAL, index=i, prompt_token_ids=()) for i in (1, 2))]
    choices[1:] = [replace(choice, prompt_logprobs=()) for choice in choices[1:]]
    data = answer_to_proto(choices, return_prompt_token_ids=True).SerializeToString()
    message = pb.GenerateResponse.FromString(data)
    assert answer_from_proto(message) == choices
    assert (message.usage.prompt_tokens, message.usage.completion_tokens) == (2, 6)


def test_an_answer_of_one_choice_is_an_update_as_older_clients_know_it():
    assert answer_to_proto([FINAL]) == update_to_proto(FINAL)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "timeout_s"])
def test_o28_floats_that_are_not_finite_are_refused_by_name(name, value):
    message = pb.GenerateRequest(prompt="x")
    setattr(message if name == "timeout_s" else message.sampling, name, value)
    with pytest.raises(InvalidRequest, match=name):
        read(message)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2**32 + 5),  # a 32-bit field would have made 5 of it
        ("top_k", -2),
        ("top_k", 2**32 + 1),
        ("logprobs", 21),
        ("logprobs", -1),
        ("temperature", -0.1),
        ("top_p", 0.0),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [2**32]),
        ("presence_penalty", 2.5),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("logit_bias", [pb.LogitBias(token_id=-1, bias=1)]),
        ("logit_bias", [pb.LogitBias(token_id=1, bias=1e9)]),
        ("logit_bias", [pb.LogitBias(token_id=1), pb.LogitBias(token_id=1)]),
        ("allowed_token_ids", pb.TokenIds()),
        ("bad_words", [pb.BadWord()]),
        ("bad_words", [pb.BadWord(token_ids=pb.TokenIds(ids=[-1]))]),
        ("min_tokens", -1),
        ("n", 0),
        ("best_of", 0),
        ("prompt_logprobs", 21),
        ("structured", pb.StructuredOutput(kind="poem")),
    ],
)
def test_sampling_values_out_of_range_are_refused_by_name(name, value):
    message = pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(**{name: value}))
    with pytest.raises(InvalidRequest, match=name):
        read(message)


@pytest.mark.parametrize("name", ["timeout_s", "queue_timeout_s"])
@pytest.mark.parametrize("value", [0.0, -1.0])
def test_a_time_limit_that_is_not_positive_is_refused(name, value):
    with pytest.raises(InvalidRequest, match=f"^{name}"):
        read(pb.GenerateRequest(prompt="x", **{name: value}))


def test_no_field_of_the_message_claims_an_identity():
    fields = set(pb.GenerateRequest.DESCRIPTOR.fields_by_name)
    ours = set(GenerateRequest.__dataclass_fields__)
    chat = set(pb.ChatMessages.DESCRIPTOR.fields_by_name)
    assert ours - fields - chat == {"prompt_token_ids", "identity", "pooling"}  # `token_ids`
    assert read(write(GenerateRequest(prompt="x", identity="alice"))).identity == ""


def test_a_request_without_input_is_refused():
    with pytest.raises(InvalidRequest, match="no input"):
        read(pb.GenerateRequest())


# Field 11 of the request and 24 of the sampling parameters are reserved; field 1 of the sampling
# parameters is a double, here sent as a string; of the chat message, field 7.
@pytest.mark.parametrize(
    ("data", "where"),
    [
        (b"\x0a\x01x" + b"\x5a\x01a", "GenerateRequest has field number 11"),
        (b"\x0a\x01x" + b"\x22\x03\xc0\x01\x01", "SamplingParams has field number 24"),
        (b"\x0a\x01x" + b"\x22\x03\x0a\x01a", "SamplingParams has field number 1,"),
        (b"\x1a\x05\x0a\x03\x3a\x01a", "ChatMessage has field number 7"),
    ],
)
def test_fields_that_are_not_defined_or_of_the_wrong_type_are_refused_by_number(data, where):
    with pytest.raises(InvalidRequest, match=where):
        read(pb.GenerateRequest.FromString(data))


@pytest.mark.parametrize(
    "request_",
    [
        GenerateRequest(prompt_token_ids=[2**70]),
        GenerateRequest(prompt_token_ids=[1.5]),
        GenerateRequest(prompt=17),
        GenerateRequest(messages=[{"role": "user", "content": ["parts"]}]),
        GenerateRequest(messages=[{"role": "user", "text": "x"}]),
        GenerateRequest(messages=[{"role": "assistant", "tool_calls": [math.nan]}]),
        GenerateRequest(messages=[], tools=[{"name": {1, 2}}]),
        GenerateRequest(messages=[], template_args={"x": "\ud800"}),
        GenerateRequest(prompt="x", sampling=SamplingParams(seed=2**64 - 1)),
        GenerateRequest(prompt="\ud800"),
    ],
)
def test_what_no_proto_field_can_hold_is_refused_before_it_is_sent(request_):
    with pytest.raises(InvalidRequest, match="cannot be sent"):
        write(request_)


@pytest.mark.parametrize("name", ["tools", "tool_choice", "template_args"])
@pytest.mark.parametrize("text", ["{", "[" * 100_000, "nonsense"])
def test_json_text_that_is_none_is_refused_by_the_name_of_its_field(name, text):
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="x")])
    setattr(chat, name, "{" + text if name == "tool_choice" else text)
    with pytest.raises(InvalidRequest, match=f"^{name} is not JSON"):
        read(pb.GenerateRequest(chat=chat))
