"""Tensor parallelism on four emulated CPU devices: same tokens as on one, really sharded.

Rows of public fault reports: O102 (heads that do not divide), O103 (batches that do not divide).
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.checkpoint.builders import LLAMA, random_tensors, write_folder
from tests.e2e.conftest import write_tokenizer
from tests.e2e.tensor_parallel_process import run_jobs
from tests.models.reference import embeddings_of_transformers, reference_model

pytestmark = pytest.mark.slow  # one process builds fifteen engines
DEVICES = 4
MAX_TOKENS = 8
SETTINGS = {
    "max_num_seqs": 3,  # rows that divide by no number of devices; two programs per engine
    "max_num_batched_tokens": 32,
    "prefill_chunk": 7,
    "page_size": 8,
    "kv_memory_bytes": 2**20,
    "enable_compilation_cache": False,
}
GREEDY = {"temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
SEEDED = {"temperature": 0.9, "top_p": 0.9, "seed": 11, "max_tokens": MAX_TOKENS}
EDITED = SEEDED | {
    "top_k": 40,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "logit_bias": {5: 2.0, 70: 2.0},
    "allowed_token_ids": list(range(3, 90)),  # ends inside one device's part of the vocabulary
}
# and how their heads are laid out over four devices
MODELS = {
    "llama": "each of 2 KV heads twice",
    "qwen3": "each of 2 KV heads twice, its group of 3 in halves with a head of zeros",
    "gemma3": "the one KV head four times",
    "nine_heads": "3 KV heads and one of zeros",
    "llama_in_int8": "each of 2 KV heads twice",
}
IN_INT8 = {"quantization": "w8a8", "kv_cache_dtype": "int8"}
OF_TRANSFORMERS = ("llama", "qwen3", "gemma3")
SIZES = (1, 2, 4)
BATCH_SIZES = (1, 3, 6)
POOLINGS = ("last", "mean")
NINE_HEADS = LLAMA | {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8}


def calls_for(name: str) -> list[dict]:
    """Batches of 1, 3 and 6 prompts of lengths around pages and chunks; the last once more with a
    seed, and once with all that is done to logits; and a prompt that transformers continued, where
    there is one."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 96, length).tolist() for length in (30, 1, 7, 8, 9, 16)]
    calls = [{"prompts": prompts[:size], "sampling": GREEDY} for size in BATCH_SIZES]
    calls += [{"prompts": prompts, "sampling": sampling} for sampling in (SEEDED, EDITED)]
    if name in OF_TRANSFORMERS:
        known = reference_model(name).sequences[1]
        calls.append({"prompts": [known.ids[: known.num_prompt].tolist()], "sampling": GREEDY})
    return calls


@pytest.fixture(scope="module")
def answers(servable, tmp_path_factory):
    """What every job gave, by (model, devices); and what was refused, by ("refused", devices)."""
    nine_heads = tmp_path_factory.mktemp("nine_heads")
    write_folder(nine_heads, NINE_HEADS, random_tensors(NINE_HEADS))
    write_tokenizer(nine_heads)
    jobs = {}
    for name in MODELS:
        folder = nine_heads if name == "nine_heads" else servable(name.removesuffix("_in_int8"))
        for size in SIZES:
            settings = {"model": str(folder), "tensor_parallel_size": size, **SETTINGS}
            settings |= IN_INT8 if name == "llama_in_int8" else {}
            jobs[name, size] = {"settings": settings, "calls": calls_for(name)}
            if name == "llama":
                prompts = [sequence.ids.tolist() for sequence in reference_model(name).sequences]
                jobs[name, size]["embed"] = dict.fromkeys(POOLINGS, prompts)
    any_settings = jobs["llama", 1]["settings"]
    for size in (3, 5):
        settings = any_settings | {"tensor_parallel_size": size}
        jobs["refused", size] = {"settings": settings, "calls": []}
    jobs["llama", 1]["settings"] = any_settings | {"emulated_cpu_devices": DEVICES}
    return dict(zip(jobs, run_jobs(list(jobs.values()), timeout_s=600), strict=True))


def tokens(answer: dict) -> list[list[list[int]]]:
    return [[output["token_ids"] for output in call] for call in answer["calls"]]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_several_devices_give_the_tokens_of_one(answers, name, size):
    assert tokens(answers[name, size]) == tokens(answers[name, 1])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_the_tokens_are_those_of_transformers(answers, name, size):
    known = reference_model(name).sequences[1]
    [found] = tokens(answers[name, size])[-1]
    assert found == known.ids[known.num_prompt :].tolist()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_embeddings_are_those_of_transformers(answers, pooling, size):
    found = answers["llama", size]["embeddings"][pooling]
    expected = embeddings_of_transformers("llama", pooling)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_batches_that_do_not_divide_by_the_devices_are_answered(answers, name, size):  # O103
    found = tokens(answers[name, size])[: len(BATCH_SIZES)]
    assert [len(batch) for batch in found] == list(BATCH_SIZES)
    assert all(len(ids) == MAX_TOKENS for batch in found for ids in batch)
    first = [batch[0] for batch in found]
    assert first == [first[0]] * len(BATCH_SIZES)


def test_a_size_that_does_not_fit_is_refused_with_those_that_do(answers):  # O102
    assert answers["refused", 3]["error"] == (
        "tensor_parallel_size=3 does not fit 4 query heads and MLP width 64; use one of 1, 2, 4"
    )


def test_more_devices_than_there_are_is_refused_with_the_remedy(answers):
    error = answers["refused", 5]["error"]
    assert "there are 4" in error
    assert "--emulated_cpu_devices=5" in error


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_pool_and_weights_are_split_over_the_devices(answers, name, size):
    """Each device holds its share along one axis, and all of the others."""
    shards = answers[name, size]["shards"]
    split_axis = {"kv_pool": 3, "qkv": 0, "o": 1, "gate_up": 1, "down": 1, "embed": 0}
    for array, axis in split_axis.items():
        whole, part = shards[array]["whole"], shards[array]["part"]
        assert shards[array]["devices"] == size, array
        assert part[axis] * size == whole[axis], array
        del whole[axis], part[axis]
        assert whole == part, array
