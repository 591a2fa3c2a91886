"""Fault reports about structured output, on the real engine."""

from __future__ import annotations

import itertools
import json
import re
import time

import pytest

from jserve.errors import InvalidRequest
from jserve.llm import LLM
from jserve.messages import GenerateRequest
from jserve.sampling_params import SamplingParams
from jserve.structured import GrammarKind, StructuredOutput
from tests.e2e.real_engine import arranged, assert_balanced, prompt_of

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
JSON = StructuredOutput.of_json_schema(SCHEMA)
NEWLINE, SPACE = 10, 32


def deep_schema(depth: int) -> str:
    return '{"type":"array","items":' * depth + '{"type":"null"}' + "}" * depth


BAD = {
    "an open regex": StructuredOutput(GrammarKind.REGEX, "("),
    "an unknown type": StructuredOutput.of_json_schema('{"type":"foo"}'),
    "no JSON": StructuredOutput.of_json_schema("{"),
    "a bad grammar": StructuredOutput(GrammarKind.LARK, "start: undefined_rule"),
    "an unsupported keyword": StructuredOutput.of_json_schema(
        '{"type":"array","uniqueItems":true}'
    ),
    "a deep schema": StructuredOutput.of_json_schema(deep_schema(10_000)),
    "a deep regex": StructuredOutput(GrammarKind.REGEX, "(" * 5_000),
    "a repeated anchor": StructuredOutput(GrammarKind.REGEX, "^+a"),
    "a counted anchor": StructuredOutput(GrammarKind.REGEX, "^{2}x"),
}


def asking(prompt, **fields) -> GenerateRequest:
    sampling = SamplingParams(**{"temperature": 0, "max_tokens": 40} | fields)
    return GenerateRequest(prompt_token_ids=prompt, sampling=sampling)


def texts(engine, messages, later=()) -> list[str]:
    """The output of each message; those of `later` join after so many turns."""
    ids = [engine.add(m) for m in messages]
    found = dict.fromkeys(ids, "")
    waiting = dict(later)
    for turn in itertools.count():
        if turn in waiting:
            ids.append(engine.add(waiting.pop(turn)))
            found[ids[-1]] = ""
        if not engine.has_work and not waiting:
            break
        for update in engine.step():
            assert update.error is None
            found[update.request_id] += update.text
    return [found[request_id] for request_id in ids]


@pytest.mark.parametrize("form", BAD.values(), ids=BAD)
def test_O62_O65_a_bad_form_is_the_callers_error_and_hurts_nobody(form):
    free = asking(prompt_of(20))
    [expected] = texts(arranged("sixteen"), [free])
    engine = arranged("sixteen")
    running = engine.add(free)
    text = "".join(u.text for u in engine.step())
    begin = time.monotonic()
    with pytest.raises(InvalidRequest):
        engine.add(asking([1], structured=form))
    assert time.monotonic() - begin < 2
    while engine.has_work:
        text += "".join(u.text for u in engine.step() if u.request_id == running)
    assert text == expected
    [answer] = texts(engine, [asking(prompt_of(5), structured=JSON)])
    json.loads(answer)
    assert_balanced(engine)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_pages", [None, 8], ids=["roomy", "tight"])
def test_O63_masks_meet_their_rows_in_every_order(overlap, num_pages):
    kinds = [
        asking(prompt_of(17), structured=JSON, temperature=1.0, seed=1),
        asking(prompt_of(30, start=1), structured=JSON, temperature=1.0, seed=2),
        asking(prompt_of(21, start=2), max_tokens=30),
        asking(prompt_of(9, start=3), max_tokens=25, temperature=1.0, seed=3),
    ]
    solo = [texts(arranged("sixteen"), [message])[0] for message in kinds]
    assert all(set(json.loads(text)) == {"name", "ok"} for text in solo[:2])
    limits = {"num_pages": num_pages} if num_pages else {}
    engine = arranged("sixteen", overlap=overlap, **limits)
    for order in itertools.permutations(range(4)):
        first, last = order[:2], order[2:]  # two join while the others run
        later = {3 + 2 * i: kinds[k] for i, k in enumerate(last)}
        found = texts(engine, [kinds[k] for k in first], later)
        assert found == [solo[k] for k in order], order
    if num_pages:
        assert engine.scheduler.num_preemptions
    assert_balanced(engine)


@pytest.mark.parametrize(
    "form", [JSON, StructuredOutput(GrammarKind.JSON_OBJECT)], ids=["schema", "object"]
)
def test_O64_json_ends_though_the_model_likes_white_space(form):
    likes = {NEWLINE: 60.0, SPACE: 50.0, ord("}"): 40.0, ord('"'): 30.0}
    engine = arranged("sixteen")
    params = SamplingParams(temperature=0, max_tokens=200, structured=form, logit_bias=likes)
    [output] = LLM.from_engine(engine).generate([prompt_of(12)], params)
    choice = output.outputs[0]
    assert choice.finish_reason == "stop"
    assert isinstance(json.loads(choice.text), dict)
    assert not re.search(r"\s\s", re.sub(r'"[^"]*"', '""', choice.text))


@pytest.mark.parametrize("seed", range(5))
def test_O66_a_form_is_kept_by_a_model_that_knows_nothing(seed):
    engine = arranged("sixteen")
    params = SamplingParams(temperature=1.5, seed=seed, max_tokens=90, structured=JSON)
    [output] = LLM.from_engine(engine).generate([prompt_of(12, start=seed)], params)
    found = json.loads(output.outputs[0].text)
    assert set(found) == {"name", "ok"}
    assert isinstance(found["ok"], bool)
    assert len(found["name"]) <= 8


def test_settings_that_leave_no_token_end_the_request_with_an_error():
    engine = arranged("sixteen")
    message = asking(prompt_of(5), structured=JSON, allowed_token_ids=(97, 98))
    request_id = engine.add(message)
    other = engine.add(asking(prompt_of(8), max_tokens=5))
    ends = {}
    while engine.has_work:
        for update in engine.step():
            if update.is_last:
                ends[update.request_id] = (update.finish_reason, str(update.error))
    assert ends[request_id][0] == "error"
    assert "no token" in ends[request_id][1]
    assert ends[other][0] == "length"
    assert_balanced(engine)


@pytest.mark.parametrize("jump_forward", ["always", "off"])
def test_O16_a_minimum_that_the_form_cannot_reach_is_an_error(jump_forward):
    engine = arranged("sixteen", jump_forward=jump_forward)
    form = StructuredOutput.of_choice(["yes"])
    engine.add(asking(prompt_of(5), structured=form, min_tokens=10))
    ends = []
    while engine.has_work:
        ends += [u for u in engine.step() if u.is_last]
    assert [u.finish_reason for u in ends] == ["error"]
    assert "no token" in str(ends[0].error)
    [text] = texts(engine, [asking(prompt_of(5), structured=form, min_tokens=3)])
    assert text == "yes"
    assert_balanced(engine)
