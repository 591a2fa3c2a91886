"""What the composition root refuses before it compiles anything, and sets before jax starts."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jserve import build
from jserve.build import build_engine
from jserve.config import EngineConfig, ModelSettings, ServerSettings, scheduler_config
from jserve.errors import ConfigError, InvalidRequest
from jserve.llm import LLM, engine_config
from jserve.messages import GenerateRequest
from jserve.runner.platform import compiler_options, set_compiler_flags
from pallas_kernels.ragged_paged_attention import reference
from scheduler.config import RequestClass
from tests.e2e.chain_model import write_random_model
from tests.e2e.real_engine import SETTINGS, model
from tests.engine.tiny import byte_tokenizer

LIBTPU_FLAG = "--xla_tpu_impure_enable_large_2nd_minor_layout"


def test_steps_that_the_attention_backend_cannot_do_are_refused_by_name(monkeypatch):
    seen = []

    def why_unsupported(shape, device_kind):
        seen.append((shape, device_kind))
        return "it is too wide; lower --max_num_batched_tokens" if shape.num_tokens > 32 else None

    monkeypatch.setattr(reference, "why_unsupported", why_unsupported)
    with pytest.raises(ConfigError) as caught:
        build_engine(engine_config(model=str(model("chain").folder), page_size=8, **SETTINGS))
    assert str(caught.value) == (
        "64 tokens in 4 rows: it is too wide; lower --max_num_batched_tokens"
    )
    shape, device_kind = seen[-1]
    assert (shape.num_tokens, shape.num_rows, shape.page_size) == (64, 4, 8)
    assert (shape.q_dtype, shape.kv_dtype, device_kind) == ("float32", "float32", "cpu")


def test_compiler_flags_are_added_once_and_never_override(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--other=1")
    set_compiler_flags()
    set_compiler_flags()
    with monkeypatch.context() as patch:
        patch.setenv("LIBTPU_INIT_ARGS", f"{LIBTPU_FLAG}=true")
        set_compiler_flags()
        assert read_flags() == [f"{LIBTPU_FLAG}=true"]
    assert read_flags() == ["--other=1", f"{LIBTPU_FLAG}=false"]


def test_only_a_gpu_is_told_not_to_compute_anew_and_xla_knows_the_option():
    assert compiler_options("cpu") == compiler_options("tpu") == {}
    told = compiler_options("gpu")
    assert "rematerialization" in told.values()
    assert jax.jit(lambda x: x + 1).lower(0).compile(told)(1) == 2


def read_flags() -> list[str]:

    return os.environ["LIBTPU_INIT_ARGS"].split()


def test_every_setting_of_the_scheduler_reaches_it_with_milliseconds_as_seconds(tmp_path):
    steps, requests = tmp_path / "steps.jsonl", tmp_path / "requests.jsonl"
    engine = build_engine(
        engine_config(
            model=str(model("chain").folder),
            request_classes="chat:itl_slo_ms=40;bulk:priority=7",
            batching="dynamic",
            batch_window_ms=20,
            long_prompt_tokens=40,
            max_long_prompts=2,
            long_prompt_share=0.25,
            itl_slo_ms=60,
            ttft_slo_ms=900,
            min_prefill_tokens=8,
            kv_watermark=0.1,
            max_queued_tokens=4000,
            queue_timeout_s=9,
            swap_space_bytes=2**20,
            step_log=str(steps),
            request_log=str(requests),
            **SETTINGS,
        )
    )
    limits = engine.scheduler.config
    assert limits.classes == (
        RequestClass(name="chat", itl_slo_s=0.04),
        RequestClass(name="bulk", priority=7),
    )
    assert (limits.batching, limits.batch_window_s) == ("dynamic", 0.02)
    assert (limits.long_prompt_tokens, limits.max_long_prompts) == (40, 2)
    assert (limits.long_prompt_share, limits.min_prefill_tokens) == (0.25, 8)
    assert (limits.itl_slo_s, limits.ttft_slo_s, limits.watermark) == (0.06, 0.9, 0.1)
    assert limits.max_queued_tokens == 4000
    pool = engine._runner.state.kv_pool
    assert limits.num_host_pages == 2**20 // (pool.nbytes // limits.num_pages) > 0
    engine.add(GenerateRequest(prompt_token_ids=[1], request_class="bulk"))
    [request] = engine.scheduler.waiting
    assert (request.priority, request.queue_deadline) == (7, request.arrival_time + 9)
    engine.close()
    assert json.loads(steps.read_text().splitlines()[0])["step_log"] == 1
    assert json.loads(requests.read_text())["finish_reason"] == "abort"


def test_limits_of_grammars_reach_their_compiler(monkeypatch):
    made = {}

    def compiler(*_, **limits):
        made.update(limits)
        return SimpleNamespace(is_known=None)

    monkeypatch.setattr(build, "GrammarCompiler", compiler)
    config = engine_config(max_grammar_bytes=9, grammar_timeout_s=0.5, grammar_cache_size=3)
    rules = SimpleNamespace(max_model_len=64, classes=(), max_num_seqs=4, page_size=16)
    checkpoint = SimpleNamespace(config={})
    model = SimpleNamespace(vocab_size=256, eos_token_ids=(), hidden_size=8)
    scheduler = SimpleNamespace(config=rules, why_too_large=None)
    build._input_processor(config, checkpoint, model, byte_tokenizer(), scheduler)
    assert made == {"max_bytes": 9, "timeout_s": 0.5, "cache_size": 3}


def test_a_swap_space_below_one_page_is_refused_with_what_a_page_needs():
    config = engine_config(model=str(model("chain").folder), swap_space_bytes=1, **SETTINGS)
    with pytest.raises(ConfigError, match=r"swap_space_bytes=1 holds no KV page; give \d+ or more"):
        build_engine(config)


def test_a_chat_template_of_the_operators_takes_the_place_of_the_models(tmp_path):
    own = "{% for m in messages %}{{ m.role }}>{{ m.content }}{% endfor %}"
    file = tmp_path / "own.jinja"
    file.write_text(own)
    folder = write_random_model(tmp_path / "model").folder
    (folder / "tokenizer_config.json").unlink()
    hi = [{"role": "user", "content": "hi"}]
    with pytest.raises(InvalidRequest, match="no chat template"):
        LLM(model=str(folder), **SETTINGS).chat(hi)
    with LLM(model=str(folder), chat_template=str(file), **SETTINGS) as llm:
        tokenizer = llm._engine.tokenizer
        assert tokenizer.settings()["chat_template"] == own  # as routers get it
        [output] = llm.chat(hi)
        assert output.prompt_token_ids == tokenizer.encode("user>hi")


def test_a_chat_template_that_is_missing_or_broken_is_refused_by_name(tmp_path):
    broken = tmp_path / "broken.jinja"
    broken.write_text("line one\n{% for %}")
    for path, why in ((broken, "broken at line 2"), (tmp_path / "none", "No such file")):
        config = engine_config(model=str(model("chain").folder), chat_template=str(path))
        with pytest.raises(ConfigError, match=rf"chat_template='{path}' is no good: .*{why}"):
            build_engine(config)


def test_a_log_that_cannot_be_written_is_refused_before_anything_is_loaded():
    with pytest.raises(ConfigError, match="--step_log=/nowhere/steps cannot be written"):
        build_engine(engine_config(model="/no model", step_log="/nowhere/steps"))


def test_a_folder_for_profiles_that_cannot_be_made_is_refused_before_anything_is_loaded():
    config = EngineConfig(
        model=ModelSettings(model="/no model"), server=ServerSettings(profile_dir="/dev/null/x")
    )
    with pytest.raises(ConfigError, match="--profile_dir=/dev/null/x cannot be made"):
        build.build_async_engine(config)


@pytest.mark.parametrize("wanted", [True, False])
def test_vllms_names_are_there_where_asked_for_with_the_pools_size(wanted):
    config = EngineConfig(
        model=ModelSettings(served_model_name="tiny"), server=ServerSettings(vllm_metrics=wanted)
    )
    sizes = {"page_size": 16, "num_pages": 11, "max_model_len": 64, "num_host_pages": 3}
    limits = scheduler_config(config, **sizes)
    registry = build._metrics(config, limits, jnp.dtype("bfloat16")).registry
    names = {metric.name: metric for metric in registry.collect()}
    assert ("vllm:num_requests_running" in names) == wanted
    if wanted:
        [sample] = names["vllm:cache_config_info"].samples
        expected = {"block_size": "16", "num_gpu_blocks": "10", "kv_cache_size_tokens": "160"}
        expected |= {"num_cpu_blocks": "3", "cache_dtype": "bfloat16"}
        assert sample.labels.items() >= expected.items()
        [running] = names["vllm:num_requests_running"].samples
        assert running.labels == {"model_name": "tiny", "engine": "0"}
