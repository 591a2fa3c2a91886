"""Sixteen requests of which no two use the same settings, in one batch: each gets what it gets
alone, whatever its row, its neighbours, and the engine's troubles."""

from __future__ import annotations

import json
import random
from typing import Any, NamedTuple

import pytest

from jserve.llm import LLM
from jserve.runner.compile import on_each_compilation
from jserve.sampling_params import SamplingParams
from jserve.structured import GrammarKind, StructuredOutput
from tests.e2e.real_engine import arranged, assert_balanced, generate, prompt_of, value

LENGTH = 24
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "b": {"enum": ["x", "yy"]},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "seed": 42},
    "top_k": {"temperature": 1.3, "top_k": 7, "seed": 1},
    "top_p": {"temperature": 1.1, "top_p": 0.7, "seed": 2},
    "min_p": {"temperature": 1.5, "min_p": 0.05, "seed": 3},
    "presence": {"presence_penalty": 1.7},
    "frequency": {"frequency_penalty": 0.9, "temperature": 0.7, "seed": 4},
    "repetition": {"repetition_penalty": 1.6},
    "bias": {"logit_bias": {65: 4.0, 66: 5.0, 200: -100.0}, "temperature": 1.0, "seed": 5},
    "allowed": {"allowed_token_ids": tuple(range(97, 123)), "temperature": 1.0, "seed": 6},
    "bad words": {"bad_words": ("e", (97, 98), (120,)), "allowed_token_ids": (97, 98, 101, 120)},
    "min_tokens": {"min_tokens": 15, "logit_bias": {256: 6.0, 257: 6.0}, "stop": ("q",)},
    "schema": {"structured": StructuredOutput.of_json_schema(SCHEMA), "temperature": 1, "seed": 7},
    "regex": {"structured": StructuredOutput(GrammarKind.REGEX, "[a-f]{3}-[0-9]{2,9}(xy)?")},
    "choices": {"n": 2, "temperature": 0.9, "seed": 8, "logprobs": 3},
    "logprobs": {"logprobs": 5, "prompt_logprobs": 2, "repetition_penalty": 1.2},
}


class Case(NamedTuple):
    name: str
    prompt: list[int]
    params: SamplingParams


CASES = [
    # Those of one group share their first pages, so that some are found in the prefix cache.
    Case(
        name,
        prompt_of(20, start=i % 4) + prompt_of(5 + i, start=i),
        SamplingParams(**{"temperature": 0, "max_tokens": LENGTH} | settings),
    )
    for i, (name, settings) in enumerate(SETTINGS.items())
]


def answer_of(output) -> tuple:
    """All that a client sees, and log-probabilities apart, which may differ in their last bits."""
    return [(o.text, o.token_ids, o.finish_reason, o.stop_reason) for o in output.outputs]


def logprobs_of(output) -> list[float]:
    entries = [e for o in output.outputs for e in o.logprobs or ()]
    entries += [e for e in output.prompt_logprobs or () if e is not None]
    return [p for e in entries for p in (e.logprob, *(logprob for _, logprob in e.top))]


@pytest.fixture(scope="module")
def solo():
    """What each gets alone, with no step in flight and nothing cached."""
    answers = {}
    for case in CASES:
        engine = arranged("sixteen", overlap=False, enable_prefix_cache=False)
        [answers[case.name]] = generate(engine, [case.prompt], case.params)
    return answers


def check(outputs, cases, solo) -> None:
    for case, output in zip(cases, outputs, strict=True):
        expected = solo[case.name]
        assert answer_of(output) == answer_of(expected), case.name
        assert logprobs_of(output) == pytest.approx(logprobs_of(expected), abs=1e-4), case.name


def test_each_setting_has_an_effect_of_its_own(solo):
    """A setting that is accepted and ignored would make its row like another one's (O32)."""
    same = {"temperature": 0, "max_tokens": LENGTH}
    for case in CASES[1:]:
        engine = arranged("sixteen", overlap=False, enable_prefix_cache=False)
        [plain] = generate(engine, [case.prompt], SamplingParams(**same))
        differs = answer_of(plain) != answer_of(solo[case.name])
        assert differs or case.name == "logprobs", case.name
    found = json.loads(solo["schema"].outputs[0].text)
    assert set(found) == {"a", "b"}
    assert len(solo["min_tokens"].outputs[0].token_ids) >= 15
    assert set(solo["bad words"].outputs[0].text) <= set("ab")
    assert "ab" not in solo["bad words"].outputs[0].text
    assert len(solo["logprobs"].prompt_logprobs) == len(CASES[-1].prompt)
    one, two = solo["choices"].outputs
    assert one.token_ids != two.token_ids


@pytest.mark.parametrize("overlap", [True, False])
def test_every_row_equals_its_solo_run_at_every_place(overlap, solo):
    engine = arranged("sixteen", overlap=overlap)
    llm = LLM.from_engine(engine)
    orders = [CASES[i:] + CASES[:i] for i in range(len(CASES))]
    orders += [order[::-1] for order in orders[::4]]
    rng = random.Random(3)
    for cases in orders:
        if rng.random() < 0.5:  # with and without cached prefixes
            engine.reset_prefix_cache()
        outputs = llm.generate([c.prompt for c in cases], [c.params for c in cases])
        check(outputs, cases, solo)
    assert_balanced(engine)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_pages", [14, 19])
def test_every_row_equals_its_solo_run_though_pages_run_out(overlap, num_pages, solo):
    engine = arranged("sixteen", overlap=overlap, num_pages=num_pages)
    llm = LLM.from_engine(engine)
    rng = random.Random(num_pages)
    for _ in range(6):
        cases = rng.sample(CASES, len(CASES))
        outputs = llm.generate([c.prompt for c in cases], [c.params for c in cases])
        check(outputs, cases, solo)
    assert engine.scheduler.num_preemptions
    assert_balanced(engine)


PLACES = (
    "before the step",
    "before its tokens are chosen",
    "after its tokens are chosen",
    "where its results are read",
)


class FailingRunner:
    """A real runner whose device fails every `STEPS`th time at one of the places where it can."""

    STEPS = 25  # more than a trial of all requests takes

    def __init__(self, runner: Any, where: str) -> None:
        self._runner, self._where = runner, where
        self._num_times = 0

    def _maybe_fail(self, where: str) -> None:
        self._num_times += where == self._where
        if where == self._where and self._num_times % self.STEPS == 0:
            raise RuntimeError(f"the device fails {where}")

    def dispatch(self, batch: Any) -> Any:
        self._maybe_fail(PLACES[0])
        handle = self._runner.dispatch(batch)
        self._maybe_fail(PLACES[1])
        result = handle.result

        def failing_result() -> Any:
            self._maybe_fail(PLACES[3])
            return result()

        handle.result = failing_result
        return handle

    def choose(self, handle: Any, allowed: Any = None) -> None:
        self._runner.choose(handle, allowed)
        self._maybe_fail(PLACES[2])

    def reset(self) -> None:
        self._runner.reset()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("where", PLACES)
def test_every_row_equals_its_solo_run_though_the_device_fails(overlap, where, solo):
    engine = arranged("sixteen", overlap=overlap)
    engine._runner = FailingRunner(engine._runner, where)
    llm, compilations = LLM.from_engine(engine), list[int]()
    on_each_compilation(lambda: compilations.append(1))
    for _ in range(2):
        outputs = llm.generate([c.prompt for c in CASES], [c.params for c in CASES])
        check(outputs, CASES, solo)
    assert value(engine, "step_failures_total") >= 2
    assert not compilations
    assert_balanced(engine)
