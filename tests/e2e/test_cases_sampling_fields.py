"""O32: a sampling field that is accepted has its effect, through every front end, on the real
engine. Each probe says what the field must change in an answer."""

from __future__ import annotations

from collections import deque

import pytest

from jserve.engine.engine import Engine
from jserve.messages import GenerateRequest
from jserve.offline import RequestDriver, RequestOutput
from jserve.openai_format import Endpoint
from jserve.openai_http import read_http_body
from jserve.sampling_params import SamplingParams
from jserve.server.proto import generate_pb2 as pb
from jserve.server.wire import request_from_proto, request_to_proto
from jserve.structured import GrammarKind, StructuredOutput
from tests.e2e.real_engine import END_OF_TURN, arranged

PROMPT = [5, 9, 2, 77, 31]
A, B = ord("A"), ord("B")  # where the chain model's walks to EOS and to END_OF_TURN begin


def offline(prompt: list[int], fields: dict) -> GenerateRequest:
    return GenerateRequest(prompt_token_ids=prompt, sampling=SamplingParams(**fields))


def grpc(prompt: list[int], fields: dict) -> GenerateRequest:
    data = request_to_proto(offline(prompt, fields)).SerializeToString()
    return request_from_proto(pb.GenerateRequest.FromString(data))


def http(prompt: list[int], fields: dict) -> GenerateRequest:
    body = {name: value for name, value in fields.items() if name != "structured"}
    if "logit_bias" in body:
        body["logit_bias"] = {str(i): bias for i, bias in body["logit_bias"].items()}
    if "structured" in fields:
        body[f"guided_{fields['structured'].kind}"] = fields["structured"].value
    [request] = read_http_body(Endpoint.COMPLETIONS, {"prompt": prompt} | body).requests
    return request


def answer(engine: Engine, request: GenerateRequest) -> RequestOutput:
    driver, mailbox = RequestDriver(engine), deque()
    driver.add(request, None, mailbox)
    while not mailbox:
        driver.step()
    output = mailbox.popleft().result
    assert isinstance(output, RequestOutput), output
    return output


def ids(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def text(output: RequestOutput) -> str:
    return output.outputs[0].text


GREEDY = {"temperature": 0.0, "max_tokens": 12}
HOT = {"temperature": 8.0, "seed": 3, "max_tokens": 12}
TWO = GREEDY | {"logit_bias": {10: 50.0, 11: 50.0}}  # which take turns
Z = GREEDY | {
    "logit_bias": {ord("z"): -18.0}
}  # which the chain model repeats, now by a narrow lead


def differs(plain: RequestOutput, changed: RequestOutput) -> bool:
    return ids(plain) != ids(changed)


def is_greedy(plain: RequestOutput, changed: RequestOutput) -> bool:
    return differs(plain, changed) and ids(changed) == ids(
        answer(arranged(), offline(PROMPT, GREEDY))
    )


# The field's value, what is asked beside it, and how the answer must differ from one without it.
PROBES = {
    "temperature": (8.0, GREEDY | {"seed": 3}, differs),
    "seed": (4, HOT, differs),
    "top_k": (1, HOT, is_greedy),
    "top_p": (1e-6, HOT, is_greedy),
    "min_p": (1.0, HOT, is_greedy),
    "repetition_penalty": (3.0, GREEDY, differs),
    "logit_bias": ({7: 100.0}, GREEDY, lambda _, changed: set(ids(changed)) == {7}),
    "allowed_token_ids": ((7,), GREEDY, lambda _, changed: set(ids(changed)) == {7}),
    "bad_words": (
        ((10,),),
        TWO,
        lambda plain, changed: 10 in ids(plain) and set(ids(changed)) == {11},
    ),
    "n": (3, HOT, lambda _, changed: len({tuple(c.token_ids) for c in changed.outputs}) == 3),
    "best_of": (3, HOT, lambda _, changed: changed.usage.completion_tokens == 36),
    "max_tokens": (3, {"temperature": 0.0}, lambda _, changed: len(ids(changed)) == 3),
    "logprobs": (
        2,
        GREEDY,
        lambda plain, changed: (
            plain.outputs[0].logprobs is None
            and [len(entry.top) for entry in changed.outputs[0].logprobs] == [2] * 12
        ),
    ),
    "prompt_logprobs": (
        1,
        GREEDY,
        lambda plain, changed: (
            plain.prompt_logprobs is None
            and [entry and entry.token_id for entry in changed.prompt_logprobs]
            == [None, *PROMPT[1:]]
        ),
    ),
}
# The same on the chain model, whose answer to A is "one", "two" and two EOS ids, and to B "red",
# "green", "blue", END_OF_TURN and "after"; to byte b it counts up from b + 1.
CHAIN_PROBES = {
    "presence_penalty": (2.0, [ord("z")], Z, differs),
    "frequency_penalty": (2.0, [ord("z")], Z, differs),
    "ignore_eos": (True, [A], GREEDY, lambda p, c: len(ids(p)) < len(ids(c)) == 12),
    "min_tokens": (5, [A], GREEDY, lambda p, c: len(ids(p)) < 5 <= len(ids(c))),
    "stop": ("blue", [B], GREEDY, lambda p, c: "blue" in text(p) and text(c) == "redgreen"),
    "include_stop_str": (
        True,
        [B],
        GREEDY | {"stop": "blue"},
        lambda p, c: (text(p), text(c)) == ("redgreen", "redgreenblue"),
    ),
    "structured": (
        StructuredOutput(GrammarKind.REGEX, "[0-9]{5}"),
        [ord("b")],
        GREEDY,
        lambda p, c: not text(p)[0].isdecimal() and len(text(c)) == 5 and text(c).isdecimal(),
    ),
    "stop_token_ids": (
        (ord("e"),),
        [ord("b")],
        GREEDY,
        lambda p, c: (len(ids(p)), ids(c)) == (12, [*b"cde"]),
    ),
    "skip_special_tokens": (
        False,
        [B],
        GREEDY,
        lambda p, c: END_OF_TURN not in text(p) and END_OF_TURN in text(c),
    ),
}


def test_o32_every_sampling_field_has_a_probe():
    assert set(PROBES) | set(CHAIN_PROBES) == set(SamplingParams.__dataclass_fields__)
    assert not set(PROBES) & set(CHAIN_PROBES)


@pytest.mark.parametrize("front_end", [offline, grpc, http])
@pytest.mark.parametrize("name", PROBES)
def test_o32_a_sampling_field_has_its_effect(front_end, name):
    value, beside, has_effect = PROBES[name]
    plain = answer(arranged(), front_end(PROMPT, beside))
    changed = answer(arranged(), front_end(PROMPT, beside | {name: value}))
    assert has_effect(plain, changed)


@pytest.mark.parametrize("front_end", [offline, grpc, http])
@pytest.mark.parametrize("name", CHAIN_PROBES)
def test_o32_a_field_of_endings_has_its_effect(front_end, name):
    value, prompt, beside, has_effect = CHAIN_PROBES[name]
    plain = answer(arranged("chain"), front_end(prompt, beside))
    changed = answer(arranged("chain"), front_end(prompt, beside | {name: value}))
    assert has_effect(plain, changed)
