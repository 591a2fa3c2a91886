"""Fault reports about sampling, on the real engine."""

from __future__ import annotations

import pytest

from jserve.llm import LLM
from jserve.messages import GenerateRequest
from jserve.sampling_params import SamplingParams
from tests.e2e.real_engine import arranged, assert_balanced, generate, prompt_of

MINE = SamplingParams(temperature=0.8, seed=42, max_tokens=24)
PROMPT = prompt_of(19)


def test_O24_a_seeded_request_is_the_same_in_any_company():
    runs = [generate(arranged(), [PROMPT], MINE)[0].outputs[0].token_ids for _ in range(4)]
    assert all(run == runs[0] for run in runs)
    for seeds in ((None, None, None), (1, 2, 3), (None, 7, None)):
        for place in range(4):
            others = [SamplingParams(temperature=1.2, seed=s, max_tokens=30) for s in seeds]
            params = [*others[:place], MINE, *others[place:]]
            prompts = [prompt_of(10 + 9 * i, start=i) for i in range(4)]
            prompts[place] = PROMPT
            engine = arranged(num_pages=9)  # some of them are preempted
            output = LLM.from_engine(engine).generate(prompts, params)[place]
            assert output.outputs[0].token_ids == runs[0]
            assert_balanced(engine)


def test_O24_a_seeded_request_is_the_same_whenever_others_arrive():
    [alone] = generate(arranged(), [PROMPT], MINE)
    engine = arranged()
    mine = engine.add(GenerateRequest(prompt_token_ids=PROMPT, sampling=MINE))
    found, turn = [], 0
    while engine.has_work:
        if turn in (2, 5, 6, 11):
            other = SamplingParams(temperature=1.0, max_tokens=9)
            engine.add(GenerateRequest(prompt_token_ids=prompt_of(33, turn), sampling=other))
        found += [i for u in engine.step() if u.request_id == mine for i in u.token_ids]
        turn += 1
    assert found == alone.outputs[0].token_ids


@pytest.mark.parametrize("overlap", [True, False])
def test_O25_O26_penalties_belong_to_their_row_and_survive_preemption(overlap):
    plain, penalised = (
        SamplingParams(temperature=0, max_tokens=40, repetition_penalty=p) for p in (1.0, 2.0)
    )
    prompts = [prompt_of(18), prompt_of(18, start=1)]
    solo = {
        params: [generate(arranged(), [p], params)[0].outputs[0].token_ids for p in prompts]
        for params in (plain, penalised)
    }
    assert solo[plain] != solo[penalised]
    for params in ([plain, penalised], [penalised, plain], [penalised, penalised]):
        engine = arranged(overlap=overlap, num_pages=7)
        outputs = LLM.from_engine(engine).generate(prompts, params)
        for i, output in enumerate(outputs):
            assert output.outputs[0].token_ids == solo[params[i]][i]
        assert engine.scheduler.num_preemptions
