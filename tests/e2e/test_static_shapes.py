"""Nothing is compiled after warm-up: random traffic over a tiny model, counted in two ways."""

from __future__ import annotations

import random
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jserve.build import build_engine
from jserve.llm import engine_config
from jserve.messages import GenerateRequest
from jserve.runner.compile import on_each_compilation
from jserve.sampling_params import SamplingParams
from jserve.structured import GrammarKind, StructuredOutput
from scheduler.bucket import Bucket, choose_bucket
from scheduler.packer import Packer
from tests.e2e.real_engine import generate, rearranged, tokens_of

NUM_REQUESTS = 120
VOCAB, MAX_MODEL_LEN = 128, 200
SETTINGS = {
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 64,
    "prefill_chunk": 24,
    "page_size": 8,
    "kv_memory_bytes": 2**20,
    "enable_compilation_cache": False,
}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def built(servable):
    engine = build_engine(engine_config(model=servable("llama"), **SETTINGS))
    yield engine
    engine.close()


@pytest.fixture
def compilations():
    """Counts every program that this process compiles from here on, as `.count`."""
    counter = SimpleNamespace(count=0)

    def add():
        counter.count += 1

    on_each_compilation(add)
    return counter


def compilations_after_warm_up(built) -> float:
    """The metric: this process's compilations since `built` was, whoever caused them."""
    return built.metrics.registry.get_sample_value("jserve_compilations_after_warmup_total")


def test_warm_up_itself_is_not_counted(built):
    assert compilations_after_warm_up(built) == 0


def random_request(rng: random.Random) -> GenerateRequest:
    constrained = rng.random() < 0.3
    num_prompt = rng.choice([1, 2, 7, 8, 9, 24, 25, rng.randint(1, 150)])
    common = {
        "prompt_token_ids": [rng.randrange(VOCAB) for _ in range(num_prompt)],
        "priority": rng.choice([0, 0, -1, 3]),
        "tenant": rng.choice(["", "", "a"]),
    }
    if rng.random() < 0.2:
        return GenerateRequest(pooling=rng.choice(["last", "mean"]), **common)
    sampling = SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.7, 2.0]),
        top_k=rng.choice([0, 0, 1, 5, VOCAB, 10**6]),
        top_p=rng.choice([1.0, 1.0, 0.9, 0.1]),
        min_p=rng.choice([0.0, 0.0, 0.2]),
        seed=rng.choice([None, rng.getrandbits(60)]),
        max_tokens=rng.randint(1, min(40, MAX_MODEL_LEN - num_prompt)),
        stop=rng.choice([(), (), ("a", "bc")]),
        stop_token_ids=rng.choice([(), (rng.randrange(VOCAB),)]),
        ignore_eos=not constrained and rng.random() < 0.8,
        logprobs=rng.choice([None, None, 0, 3, 20]),
        prompt_logprobs=rng.choice([None, None, None, 0, 2]),
        presence_penalty=rng.choice([0, 0, 1.0]),
        repetition_penalty=rng.choice([1, 1, 1.4]),
        logit_bias=rng.choice([(), (), {5: 3.0, 77: -100.0}]),
        allowed_token_ids=rng.choice([None, None, tuple(range(20, 90))]),
        bad_words=rng.choice([(), (), ((30,), (40, 41))]),
        n=rng.choice([1, 1, 1, 3]),
        structured=rng.choice([None, None, StructuredOutput(GrammarKind.REGEX, "[A-F]{4,30}")])
        if constrained
        else None,
    )
    return GenerateRequest(sampling=sampling, **common)


@pytest.mark.parametrize("seed", [1, 2])
def test_random_traffic_compiles_nothing(built, compilations, seed):
    rng = random.Random(seed)
    shapes = set()
    counted = compilations_after_warm_up(built)
    engine = rearranged(built, overlap=seed == 1, num_pages=31)  # few: some lose theirs
    dispatch = engine._runner.dispatch
    engine._runner = SimpleNamespace(
        dispatch=lambda batch: (shapes.add(batch.bucket), dispatch(batch))[1],
        choose=engine._runner.choose,
    )
    live, finished, aborted, to_add, num_embeddings = [], 0, 0, NUM_REQUESTS, 0
    while to_add or engine.has_work:
        for _ in range(min(to_add, rng.choice([0, 0, 0, 1, 2, 8]))):
            live.append(engine.add(random_request(rng)))
            to_add -= 1
        if live and rng.random() < 0.05:
            request_id = live.pop(rng.randrange(len(live)))
            engine.abort(request_id)
            aborted += 1
        for update in engine.step():
            assert update.error is None
            num_embeddings += update.embedding is not None
            if update.is_last:
                assert update.finish_reason in ("stop", "length")
                live.remove(update.request_id)
                finished += 1
    assert compilations.count == 0
    assert finished + aborted == NUM_REQUESTS
    assert aborted > 0
    assert num_embeddings > 5
    assert engine.scheduler.num_preemptions > 0
    assert len(shapes) >= len(built._packer.buckets) - 1, "the traffic leaves shapes out"
    engine.scheduler.check_integrity()
    assert compilations_after_warm_up(built) == counted


def test_a_compilation_after_warm_up_would_be_counted(built, compilations):
    counted = compilations_after_warm_up(built)
    jax.jit(lambda x: x * 3 + 7).lower(np.zeros(11, np.float32)).compile()
    assert compilations.count == 1
    assert compilations_after_warm_up(built) == counted + 1


def test_the_next_larger_bucket_is_taken_where_the_exact_one_is_absent(built):
    prompts = [np.arange(3, 3 + n).tolist() for n in (1, 9, 20)]
    expected = generate(rearranged(built), prompts, GREEDY)
    engine = rearranged(built)
    largest = [b for b in built._packer.buckets if b.num_rows == 6 and b.num_tokens in (6, 64)]
    assert [b.decode_only for b in largest] == [True, False]
    engine._packer = Packer(engine.scheduler.config, largest)
    assert tokens_of(generate(engine, prompts, GREEDY)) == tokens_of(expected)


def test_single_tokens_beyond_the_decode_buckets_run_in_a_mixed_one():
    buckets = [Bucket(4, 4, True), Bucket(16, 8, False), Bucket(64, 8, False)]
    assert choose_bucket(buckets, 4, 4) == buckets[0]
    assert choose_bucket(buckets, 5, 5) == buckets[1]
    assert choose_bucket(buckets, 5, 4) == buckets[1]
    assert choose_bucket(buckets, 17, 2) == buckets[2]
    with pytest.raises(AssertionError, match="no bucket holds"):
        choose_bucket(buckets, 65, 2)
