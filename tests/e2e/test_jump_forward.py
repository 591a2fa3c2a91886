"""Tokens that a grammar forces are appended without steps, and the output is what steps give."""

from __future__ import annotations

import json

import pytest

from jserve.llm import LLM
from jserve.sampling_params import SamplingParams
from jserve.structured import GrammarKind, StructuredOutput
from tests.e2e.real_engine import arranged, assert_balanced, prompt_of, value

SCHEMA = {
    "type": "object",
    "properties": {
        "a_long_name_that_is_forced": {"type": "boolean"},
        "another_name": {"enum": ["first value", "second value"]},
    },
    "required": ["a_long_name_that_is_forced", "another_name"],
    "additionalProperties": False,
}
FORMS = [
    StructuredOutput.of_json_schema(SCHEMA),
    StructuredOutput(GrammarKind.REGEX, "always the same beginning, then [ab]{2}, and an end"),
    StructuredOutput.of_choice(["yes, certainly", "no, never", "nobody knows"]),
]
PROMPTS = [prompt_of(10 + 9 * i, start=i % 2) for i in range(9)]


def run(engine, **fields):
    """Outputs of constrained and of free requests in one batch, and the steps that they took."""
    params = [
        SamplingParams(
            temperature=0.9,
            seed=i,
            max_tokens=96,
            structured=None if i % 4 == 3 else FORMS[i % 4],
            **fields,
        )
        for i in range(len(PROMPTS))
    ]
    outputs = LLM.from_engine(engine).generate(PROMPTS, params)
    assert_balanced(engine)
    return [
        (o.outputs[0].text, o.outputs[0].token_ids, o.outputs[0].finish_reason) for o in outputs
    ]


@pytest.fixture(scope="module")
def by_steps():
    return run(arranged("sixteen", jump_forward="off", overlap=False))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_pages", [None, 40, 13], ids=["roomy", "tight", "tighter"])
@pytest.mark.parametrize("prefill_chunk", [64, 5])
def test_forced_tokens_change_no_output(overlap, num_pages, prefill_chunk, by_steps):
    limits = {"prefill_chunk": prefill_chunk} | ({"num_pages": num_pages} if num_pages else {})
    engine = arranged("sixteen", overlap=overlap, **limits)
    assert run(engine) == by_steps
    assert value(engine, "forced_tokens_total") > 50
    if num_pages == 13:
        assert engine.scheduler.num_preemptions


def test_forced_tokens_take_fewer_steps_and_are_counted_as_output():
    engines, texts = [], []
    for jump_forward in ("off", "always"):
        engines.append(arranged("sixteen", jump_forward=jump_forward))
        params = SamplingParams(temperature=0, max_tokens=96, structured=FORMS[0])
        [output] = LLM.from_engine(engines[-1]).generate([PROMPTS[0]], params)
        texts.append(output.outputs[0].text)
        assert value(engines[-1], "output_tokens_total") == output.usage.completion_tokens
    assert texts[0] == texts[1]
    assert set(json.loads(texts[0])) == set(SCHEMA["properties"])
    assert value(engines[0], "forced_tokens_total") == 0
    steps = [value(engine, "step_seconds_count") for engine in engines]
    assert steps[1] < steps[0] / 2


def test_penalties_see_forced_tokens(by_steps):
    fields = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3}
    expected = run(arranged("sixteen", jump_forward="off"), **fields)
    assert run(arranged("sixteen"), **fields) == expected


def test_log_probabilities_keep_every_token_in_a_step():
    engine = arranged("sixteen")
    params = SamplingParams(temperature=0, max_tokens=96, structured=FORMS[0], logprobs=1)
    [output] = LLM.from_engine(engine).generate([PROMPTS[0]], params)
    assert len(output.outputs[0].logprobs) == len(output.outputs[0].token_ids)
    assert value(engine, "forced_tokens_total") == 0


@pytest.mark.parametrize("max_tokens", range(1, 40, 3))
def test_max_tokens_cuts_a_forced_text(max_tokens):
    engine = arranged("sixteen")
    params = SamplingParams(temperature=0, max_tokens=max_tokens, structured=FORMS[1])
    [output] = LLM.from_engine(engine).generate([PROMPTS[1]], params)
    assert len(output.outputs[0].token_ids) == max_tokens
    assert output.outputs[0].finish_reason == "length"
    assert "always the same beginning, then "[:max_tokens].startswith(output.outputs[0].text[:32])


def test_a_stop_string_inside_a_forced_text_ends_it_there():
    engine = arranged("sixteen")
    params = SamplingParams(temperature=0, max_tokens=90, structured=FORMS[1], stop=("same begin",))
    [output] = LLM.from_engine(engine).generate([PROMPTS[2]], params)
    found = output.outputs[0]
    assert (found.text, found.finish_reason, found.stop_reason) == (
        *("always the ", "stop"),
        "same begin",
    )
    assert bytes(found.token_ids).decode() == "always the same begin"
    assert output.usage.completion_tokens == len(found.token_ids)
    assert_balanced(engine)
