"""Settings that contradict each other or make no sense are refused by name, before any work."""

from __future__ import annotations

import pytest

from jserve.config import (
    CacheSettings,
    EngineConfig,
    LogSettings,
    ModelSettings,
    SchedulerSettings,
    ServerSettings,
    parse_classes,
    parse_weights,
    scheduler_config,
)
from jserve.errors import ConfigError
from scheduler.config import RequestClass

BAD = [
    ("max_num_seqs", {"scheduler": SchedulerSettings(max_num_seqs=0)}),
    ("max_num_batched_tokens", {"scheduler": SchedulerSettings(max_num_batched_tokens=8)}),
    ("prefill_chunk", {"scheduler": SchedulerSettings(prefill_chunk=0)}),
    ("max_queued_requests", {"scheduler": SchedulerSettings(max_queued_requests=-5)}),
    ("tenant_weights", {"scheduler": SchedulerSettings(tenant_weights="gold:4,free")}),
    ("tenant_weights", {"scheduler": SchedulerSettings(tenant_weights="gold:-1")}),
    ("batching", {"scheduler": SchedulerSettings(batching="eager")}),
    ("long_prompt_share", {"scheduler": SchedulerSettings(long_prompt_share=0.0)}),
    ("long_prompt_share", {"scheduler": SchedulerSettings(long_prompt_share=1.5)}),
    ("max_long_prompts", {"scheduler": SchedulerSettings(max_long_prompts=0)}),
    ("min_prefill_tokens", {"scheduler": SchedulerSettings(min_prefill_tokens=0)}),
    ("itl_slo_ms", {"scheduler": SchedulerSettings(itl_slo_ms=float("inf"))}),
    ("queue_timeout_s", {"scheduler": SchedulerSettings(queue_timeout_s=-1.0)}),
    ("request_classes", {"scheduler": SchedulerSettings(request_classes="batch:colour=1")}),
    ("kv_watermark", {"cache": CacheSettings(kv_watermark=1.0)}),
    ("swap_space_bytes", {"cache": CacheSettings(swap_space_bytes=-1)}),
    ("request_log", {"log": LogSettings(request_log_prompts=True)}),
    ("kv_memory_bytes", {"cache": CacheSettings(kv_memory_bytes=-1)}),
    ("kv_memory_fraction", {"cache": CacheSettings(kv_memory_fraction=1.0)}),
    ("page_size", {"cache": CacheSettings(page_size=24)}),
    ("dtype", {"model": ModelSettings(dtype="float16")}),
    ("quantization", {"model": ModelSettings(quantization="int4")}),
    ("kv_cache_dtype", {"cache": CacheSettings(kv_cache_dtype="float8")}),
    ("port", {"server": ServerSettings(port=70_000)}),
    ("metrics_port", {"server": ServerSettings(metrics_port=-1)}),
    ("drain_timeout_s", {"server": ServerSettings(drain_timeout_s=float("nan"))}),
]


@pytest.mark.parametrize(("name", "sections"), BAD, ids=[name for name, _ in BAD])
def test_a_bad_setting_is_refused_by_name(name, sections):
    with pytest.raises(ConfigError, match=name):
        EngineConfig(**sections)


def test_the_defaults_are_good():
    EngineConfig()


def test_tenant_weights_are_read_as_names_and_numbers():
    assert parse_weights("gold:4,a:b:0.5") == {"gold": 4.0, "a:b": 0.5}
    assert parse_weights("") == {}


def test_request_classes_are_read_with_milliseconds_as_seconds_and_defaults_for_the_rest():
    text = "interactive:itl_slo_ms=50,ttft_slo_ms=500; batch:priority=-3,max_num_seqs=8;plain"
    assert parse_classes(text) == (
        RequestClass(name="interactive", itl_slo_s=0.05, ttft_slo_s=0.5),
        RequestClass(name="batch", priority=-3, max_num_seqs=8),
        RequestClass(name="plain"),
    )
    assert parse_classes("") == ()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("a;:priority=1", "':priority=1' has no name"),
        ("a:priority=1;a:priority=2", "'a:priority=2' has no name of its own"),
        ("a:priority", "'priority' of 'a:priority'"),
        ("a:max_num_seqs=1.5", "'max_num_seqs=1.5'"),
        ("a:max_num_seqs=-1", "'max_num_seqs=-1'"),
        ("a:itl_slo_ms=-1", "'itl_slo_ms=-1'"),
        ("a:itl_slo_ms=nan", "'itl_slo_ms=nan'"),
        ("a:ttft_slo_ms=inf", "'ttft_slo_ms=inf'"),
        (f"a:priority={10**400}", "'priority=1000"),
        ("a:tpot=5", "'tpot=5' of .* is none of priority, max_num_seqs, itl_slo_ms, ttft_slo_ms"),
    ],
)
def test_a_bad_entry_of_request_classes_is_named(text, named):
    with pytest.raises(ConfigError, match=f"request_classes: .*{named}"):
        parse_classes(text)


def test_an_unknown_policy_is_refused_with_those_that_there_are():
    with pytest.raises(ConfigError, match="policy='lifo'; use one of fcfs, priority"):
        EngineConfig(scheduler=SchedulerSettings(policy="lifo"))


def test_the_scheduler_gets_the_limits_that_the_flags_say():
    scheduler = SchedulerSettings(itl_slo_ms=40, batch_window_ms=20, tenant_weights="a:2")
    engine = EngineConfig(scheduler=scheduler, cache=CacheSettings(kv_watermark=0.25))
    config = scheduler_config(engine, page_size=16, num_pages=9, max_model_len=64)
    assert (config.itl_slo_s, config.batch_window_s) == pytest.approx((0.04, 0.02))
    assert config.tenant_weights == {"a": 2.0}
    assert (config.watermark, config.max_starvation_s) == (0.25, float("inf"))


@pytest.mark.parametrize("target", [{"itl_slo_ms": 50.0}, {"request_classes": "a:itl_slo_ms=50"}])
def test_prompts_first_and_a_target_between_tokens_are_refused_together(target):
    alone = EngineConfig(scheduler=SchedulerSettings(prefill_first=True))
    assert scheduler_config(alone, page_size=16, num_pages=9, max_model_len=64).prefill_first
    with pytest.raises(ConfigError, match="leave out one"):
        EngineConfig(scheduler=SchedulerSettings(prefill_first=True, **target))
