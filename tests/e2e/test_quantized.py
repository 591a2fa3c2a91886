"""Weights in int8 and KV pages of 8 bits, through the real paged step and the real engine.

Row of the public fault reports: O101 (quantised KV with the prefix cache and chunked prefill).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.build import build_engine
from jserve.checkpoint.mapping import load_params
from jserve.checkpoint.safetensors import open_safetensors
from jserve.engine.engine import Engine
from jserve.errors import ConfigError
from jserve.llm import engine_config
from jserve.models.families import model_config_from_hf
from jserve.models.head_layout import head_layout
from jserve.runner.kv_scales import HEADROOM, int8_scales
from pallas_kernels.ragged_paged_attention import reference
from tests.e2e.paged import MAX_MODEL_LEN, MAX_TOKENS, PagedModel
from tests.e2e.real_engine import (
    SETTINGS,
    generate,
    greedy,
    model,
    prompt_of,
    rearranged,
    tokens_of,
)
from tests.models.reference import reference_model, run_dense

KINDS = pytest.mark.parametrize("kind", ["int8", "fp8"])
SMALL_PAGE = 8
# mean, as a share of the logits' standard deviation; made of random numbers, the models are no
# better behaved than real ones
MOST_DRIFT = {"int8": 0.02, "fp8": 0.06}
PROMPTS = [prompt_of(length, length) for length in (5, 40, 17, 90)]
ANSWER = greedy(24, ignore_eos=True)


@cache
def paged(name: str, kind: str) -> PagedModel:
    source = reference_model(name)
    settings = dict(page_size=SMALL_PAGE, loop="switched", kv_cache_dtype=kind)
    return PagedModel(source.params(), source.config, **settings)


def assert_nearly_equal(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal but for the few numbers that float error carries over the edge between two integers,
    and what they do to the tokens after them."""
    off = np.abs(found - expected)
    assert np.median(off) < 1e-3
    assert off.mean() < 5e-3


@KINDS
@pytest.mark.parametrize("chunk", [1, 7, 16, MAX_TOKENS])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_O101_hits_and_misses_agree_whatever_the_chunks_and_stay_near_the_exact_logits(
    name, chunk, kind
):
    paged_model = paged(name, kind)
    scheduler = paged_model.scheduler(chunk)
    for sequence in reference_model(name).sequences:
        [whole] = paged_model.run(paged_model.scheduler(MAX_TOKENS), [sequence.ids], [1])
        [miss] = paged_model.run(scheduler, [sequence.ids], [1])
        [hit] = paged_model.run(scheduler, [sequence.ids], [1])
        cached = (len(sequence.ids) - 1) // SMALL_PAGE * SMALL_PAGE
        assert hit.num_cached_tokens == cached
        assert_nearly_equal(hit.logits[cached:], miss.logits[cached:])
        assert_nearly_equal(miss.logits, whole.logits)
        drift = np.abs(miss.logits - sequence.logits).mean() / sequence.logits.std()
        assert 1e-4 < drift < MOST_DRIFT[kind]


@pytest.mark.parametrize("name", ["llama_biases", "gemma3"])
def test_int8_scales_hold_the_largest_numbers_of_every_lane_with_room(name):
    source, paged_model = reference_model(name), paged(name, "int8")
    config, params, ids = source.config, source.params(), source.sequences[-1].ids
    scales = int8_scales(params, paged_model.options, head_layout(config), SMALL_PAGE, ids)
    [(_, kv)] = run_dense(params, config, [np.resize(ids, MAX_MODEL_LEN)])  # [L, n, 2K, H]
    largest = np.abs(kv).max(axis=1).reshape(len(kv), -1, 2, config.head_dim).swapaxes(1, 2)
    np.testing.assert_allclose(scales * 127, HEADROOM * largest, rtol=1e-4)


@cache
def built(quantization: str, kind: str) -> Engine:
    quantized = dict(quantization=quantization, kv_cache_dtype=kind, swap_space_bytes=2**20)
    return build_engine(engine_config(model=str(model("random").folder), **SETTINGS | quantized))


def answers(quantization: str, kind: str, **limits) -> list[list[int]]:
    engine = rearranged(built(quantization, kind), **limits)
    return tokens_of(generate(engine, PROMPTS, ANSWER))


@KINDS
def test_O101_the_engine_gives_the_same_tokens_chunked_cached_swapped_and_recomputed(kind):
    engine = rearranged(built("none", kind))
    cold, warm = (generate(engine, PROMPTS, ANSWER) for _ in range(2))
    assert [output.num_cached_tokens for output in cold] == [0] * len(PROMPTS)
    assert [output.num_cached_tokens for output in warm] == [0, 32, 16, 80]
    assert tokens_of(warm) == tokens_of(cold)
    assert answers("none", kind, prefill_chunk=8) == tokens_of(cold)
    for swap_page_s in (-1.0, 1e9):  # cheaper than recomputing, and never worth it
        engine = rearranged(built("none", kind), num_pages=9, enable_prefix_cache=False)
        engine.scheduler.preemption.swap_page_s = swap_page_s
        assert tokens_of(generate(engine, PROMPTS, ANSWER)) == tokens_of(cold)
        assert engine.scheduler.num_preemptions > 0


@KINDS
def test_a_page_of_8_bits_takes_a_quarter_of_one_in_float32(kind):
    plain, quantized = built("none", "auto"), built("none", kind)
    pool, small = plain._runner.state.kv_pool, quantized._runner.state.kv_pool
    assert small.dtype.itemsize == 1
    assert 4 * small.nbytes // small.shape[1] == pool.nbytes // pool.shape[1]
    assert quantized.scheduler.config.num_host_pages == 4 * plain.scheduler.config.num_host_pages


def test_pages_that_a_backend_cannot_read_are_refused_at_start_up_by_name(monkeypatch):
    def why_unsupported(shape, device_kind):
        assert shape.q_dtype == "float32"
        return f"reads no {shape.kv_dtype} pages; use --kv_cache_dtype=auto"

    monkeypatch.setattr(reference, "why_unsupported", why_unsupported)
    for kind, name in {"int8": "int8", "fp8": "float8_e4m3fn"}.items():
        settings = SETTINGS | {"model": str(model("random").folder), "kv_cache_dtype": kind}
        with pytest.raises(ConfigError, match=f"reads no {name} pages"):
            build_engine(engine_config(**settings))


@pytest.mark.parametrize("kind", ["auto", "int8"])
def test_an_engine_in_int8_gives_the_tokens_of_its_rounded_weights(kind):
    engine = built("w8a8", kind)
    checkpoint = open_safetensors(Path(model("random").folder))
    config = model_config_from_hf(checkpoint.config)
    params = load_params(checkpoint, config, head_layout(config), "float32", quantization="w8a8")
    [(all_logits, _)] = run_dense(params, config, [np.asarray(PROMPTS[1], np.int32)])
    first = answers("w8a8", kind)[1][0]
    assert all_logits[-1].max() - all_logits[-1][first] < (1e-3 if kind == "auto" else 0.05)
    held = engine._runner._params
    matrices = [held["embed"], *(held["layers"][0][n] for n in ("qkv", "o", "gate_up", "down"))]
    assert {matrix.values.dtype for matrix in matrices} == {jnp.dtype(jnp.int8)}
    plain = sum(leaf.nbytes for leaf in jax.tree.leaves(built("none", "auto")._runner._params))
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(held)) < 0.3 * plain


def test_an_engine_in_int8_answers_alike_whatever_shares_the_batch():
    together = answers("w8a8", "auto")
    engine = rearranged(built("w8a8", "auto"))
    alone = [tokens_of(generate(engine, [prompt], ANSWER))[0] for prompt in PROMPTS]
    assert together == alone
