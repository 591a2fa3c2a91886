"""Two real models against transformers: prompt ids, 64 greedy tokens, and log-probabilities, in
every arrangement of the engine. The goldens are tests/data/golden.

Where transformers' best two logits are closer than CLEAR_GAP either may win, and comparing stops:
a warning says where.
"""

from __future__ import annotations

import json
import warnings
from collections import deque
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from jserve.build import build_engine
from jserve.llm import LLM, engine_config
from jserve.messages import GenerateRequest
from jserve.offline import CompletionOutput, RequestDriver
from jserve.sampling_params import SamplingParams
from tests.conftest import DATA, golden
from tests.e2e.real_engine import rearranged
from tests.e2e.tensor_parallel_process import run_jobs

NUM_TOKENS = 64
NUM_WITH_LOGPROBS = 8
LOGPROB_TOLERANCE = 2e-3
CLEAR_GAP = 1e-3
PAGE_SIZE = 16
LONG = 1000  # tokens: --quick leaves such prompts out
SAMPLING = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 5}
SETTINGS = {
    "max_model_len": 2048,
    "max_num_seqs": 12,
    "max_num_batched_tokens": 512,
    "prefill_chunk": 512,
    "page_size": PAGE_SIZE,
    "kv_memory_bytes": 256 * 2**20,
    "dtype": "float32",
}


class Real(NamedTuple):
    """A real model: its engine, compiled once, and its golden cases."""

    engine: Any
    file: Path
    cases: list[dict]

    def arranged(self, chunk: int, **changes) -> LLM:
        limits = {"prefill_chunk": chunk, "max_num_batched_tokens": chunk}
        return LLM.from_engine(rearranged(self.engine, **limits, **changes))


@cache
def _engine(file: Path):
    return build_engine(engine_config(model=file, **SETTINGS))


@pytest.fixture(params=["smollm2", pytest.param("gemma3", marks=pytest.mark.gemma)])
def real(request: pytest.FixtureRequest) -> Real:
    return _real(request, request.param)


@pytest.fixture
def smollm2(request: pytest.FixtureRequest) -> Real:
    """For arrangements in which families do not differ: Gemma 3 takes three times as long."""
    return _real(request, "smollm2")


def _real(request: pytest.FixtureRequest, kind: str) -> Real:
    file = request.getfixturevalue(f"{kind}_gguf")
    name = {"smollm2": "smollm2_135m", "gemma3": "gemma3_270m"}[kind]
    return Real(_engine(file), file, golden(name))


def clear_length(case: dict) -> int:
    """How many tokens of a case are certain; warns where that is not all of them."""
    for position, gap in enumerate(case["top1_top2_gap"][:NUM_TOKENS]):
        if gap < CLEAR_GAP:
            warnings.warn(
                f"{case['name']}: compared up to token {position}, where the gap is {gap}",
                stacklevel=2,
            )
            return position
    return NUM_TOKENS


def check(case: dict, token_ids: Sequence[int], top: Sequence[Sequence[tuple[int, float]]]):
    """Compares one answer with its golden case; `top` is per token the best (id, logprob)."""
    certain = clear_length(case)
    assert token_ids[:certain] == case["output_ids"][:certain], case["name"]
    assert len(token_ids) == NUM_TOKENS
    # the token at a near tie is uncertain, the distribution it comes from is not
    for position in range(min(certain + 1, NUM_WITH_LOGPROBS)):
        found = dict(top[position])
        for token_id, logprob in case["top5_first8"][position]:
            place = f"{case['name']}, token {position}, id {token_id}"
            if token_id in found:
                assert abs(found[token_id] - logprob) < LOGPROB_TOLERANCE, place
            else:  # of two that tie for the fifth place
                assert abs(min(found.values()) - logprob) < LOGPROB_TOLERANCE, place


def check_completion(case: dict, completion: CompletionOutput) -> None:
    check(case, completion.token_ids, [entry.top for entry in completion.logprobs or ()])
    assert completion.finish_reason == "length"


def check_together(llm: LLM, cases: list[dict]) -> list[int]:
    """Runs cases at once; returns how many tokens of each were found in the prefix cache."""
    outputs = llm.generate([case["prompt_ids"] for case in cases], SamplingParams(**SAMPLING))
    for case, output in zip(cases, outputs, strict=True):
        check_completion(case, output.outputs[0])
    return [output.num_cached_tokens for output in outputs]


def check_alone(llm: LLM, cases: list[dict]) -> list[int]:
    return [cached for case in cases for cached in check_together(llm, [case])]


def check_cold_and_warm(real: Real, chunk: int) -> None:
    llm = real.arranged(chunk)
    check_together(llm, real.cases)
    assert check_together(llm, real.cases) == [whole_pages_before_last(c) for c in real.cases]


def pages_for(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_SIZE)


def whole_pages_before_last(case: dict) -> int:
    """The tokens of a prompt that a warm prefix cache gives: full pages, never the last token."""
    return (len(case["prompt_ids"]) - 1) // PAGE_SIZE * PAGE_SIZE


def test_prompt_ids_are_those_of_transformers(real):
    for case in real.cases:
        if case["messages"] and real.engine.processor.chat._template.source:
            message = GenerateRequest(messages=case["messages"])
        else:
            message = GenerateRequest(prompt=case["text"])
        prepared = real.engine.processor.prepare(message)
        assert prepared.request.prompt_token_ids == case["prompt_ids"], case["name"]


def test_short_prompts_together_cold_and_warm(real):
    """The one pass over a real model that --quick keeps."""
    cases = [case for case in real.cases if len(case["prompt_ids"]) < LONG]
    llm = real.arranged(64)
    assert check_together(llm, cases) == [0] * len(cases)
    assert check_together(llm, cases) == [whole_pages_before_last(case) for case in cases]


@pytest.mark.slow
def test_each_prompt_alone_in_small_chunks(smollm2):
    """Whole prompts, alone and from a warm cache, are in the test of the plain loop."""
    cached = check_alone(smollm2.arranged(16, enable_prefix_cache=False), smollm2.cases)
    assert cached == [0] * len(cached)


@pytest.mark.slow
def test_twelve_at_once_cold_and_warm(real):
    check_cold_and_warm(real, 64)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [16, 512])
def test_twelve_at_once_in_small_and_large_chunks(smollm2, chunk):
    check_cold_and_warm(smollm2, chunk)


@pytest.mark.slow
def test_twelve_at_once_without_overlap_and_each_alone_from_a_warm_cache(smollm2):
    llm, cases = smollm2.arranged(512, overlap=False), smollm2.cases
    check_together(llm, cases)
    assert check_alone(llm, cases) == [whole_pages_before_last(c) for c in cases]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overlap", "enable_prefix_cache"), [(True, True), (False, False)], ids=["both", "neither"]
)
def test_the_same_tokens_after_preemptions(real, overlap, enable_prefix_cache):
    """With and without overlap and prefix cache. The pool holds the prompts that start, not what
    they grow to; the longest prompt, as the least urgent request, has to make room for the rest."""
    num_prompt_pages = sum(pages_for(len(case["prompt_ids"])) for case in real.cases)
    llm = real.arranged(
        64,
        overlap=overlap,
        enable_prefix_cache=enable_prefix_cache,
        num_pages=num_prompt_pages + len(real.cases) + 2,
    )
    engine, mailbox = llm._engine, deque()
    driver = RequestDriver(engine)
    for index, case in enumerate(real.cases):
        message = GenerateRequest(
            prompt_token_ids=case["prompt_ids"],
            sampling=SamplingParams(**SAMPLING),
            request_id=case["name"],
            priority=int(len(case["prompt_ids"]) > LONG),
        )
        driver.add(message, index, mailbox)
    victims = set()
    while driver.num_live:
        driver.step()
        victims |= {r.request_id for r in engine.scheduler.waiting if r.num_preemptions}
    for index, output in mailbox:
        check_completion(real.cases[index], output.outputs[0])
    assert {case["name"] for case in real.cases if len(case["prompt_ids"]) > LONG} <= victims
    counted = engine.metrics.registry.get_sample_value("jserve_preemptions_total")
    assert counted == engine.scheduler.num_preemptions > 0
    engine.scheduler.check_integrity()


@pytest.mark.slow
def test_short_prompts_give_the_same_tokens_after_preempting_each_other(smollm2):
    cases = [case for case in smollm2.cases if len(case["prompt_ids"]) < LONG]
    llm = smollm2.arranged(64, enable_prefix_cache=False, num_pages=32)
    check_together(llm, cases)
    assert llm._engine.scheduler.num_preemptions > 0


@pytest.mark.slow
def test_two_devices_give_the_same_tokens(real):
    """SmolLM2's 3 KV heads become 4 with one of zeros, Gemma 3's one is copied. One device is
    what every other test here runs on."""
    parallel = {"tensor_parallel_size": 2, "emulated_cpu_devices": 2}
    settings = {"model": str(real.file), **SETTINGS, "max_num_batched_tokens": 64, **parallel}
    call = {"prompts": [case["prompt_ids"] for case in real.cases], "sampling": SAMPLING}
    [answer] = run_jobs([{"settings": settings, "calls": [call]}], timeout_s=900)
    [outputs] = answer["calls"]
    for case, output in zip(real.cases, outputs, strict=True):
        check(case, output["token_ids"], output["top"])
    pool = answer["shards"]["kv_pool"]
    assert pool["devices"] == 2
    assert pool["part"][3] == pool["whole"][3] // 2


@pytest.mark.parametrize("chunk", [16, 512])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_of_texts_are_those_of_transformers(smollm2, pooling, chunk):
    reference = json.loads((DATA / "embeddings" / "smollm2_135m.json").read_text())
    llm = smollm2.arranged(chunk)
    outputs = llm.embed(reference["texts"], pooling)
    assert [output.prompt_token_ids for output in outputs] == reference["token_ids"]
    found, expected = np.stack([output.embedding for output in outputs]), reference[pooling]
    first = np.array(expected["first_dimensions"])
    np.testing.assert_allclose(found[:, : first.shape[1]], first, rtol=0, atol=1e-5)
    np.testing.assert_allclose(found @ found.T, expected["cosines"], rtol=0, atol=1e-5)
