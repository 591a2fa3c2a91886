"""Settings that contradict each other or make no sense are refused by name, before any work."""

from __future__ import annotations

import pytest

from jserve.build import build_engine
from jserve.config import (
    CacheSettings,
    EngineConfig,
    ModelSettings,
    SchedulerSettings,
    ServerSettings,
    parse_weights,
)
from jserve.errors import ConfigError

BAD = [
    ("max_num_seqs", {"scheduler": SchedulerSettings(max_num_seqs=0)}),
    ("max_num_batched_tokens", {"scheduler": SchedulerSettings(max_num_batched_tokens=8)}),
    ("prefill_chunk", {"scheduler": SchedulerSettings(prefill_chunk=0)}),
    ("max_queued_requests", {"scheduler": SchedulerSettings(max_queued_requests=-5)}),
    ("tenant_weights", {"scheduler": SchedulerSettings(tenant_weights="gold:4,free")}),
    ("tenant_weights", {"scheduler": SchedulerSettings(tenant_weights="gold:-1")}),
    ("kv_memory_bytes", {"cache": CacheSettings(kv_memory_bytes=-1)}),
    ("kv_memory_fraction", {"cache": CacheSettings(kv_memory_fraction=1.0)}),
    ("page_size", {"cache": CacheSettings(page_size=24)}),
    ("dtype", {"model": ModelSettings(dtype="float16")}),
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


def test_an_unknown_policy_is_refused_before_anything_is_loaded():
    config = EngineConfig(
        model=ModelSettings(model="/nowhere"), scheduler=SchedulerSettings(policy="lifo")
    )
    with pytest.raises(ConfigError, match="policy='lifo'; use one of fcfs, priority"):
        build_engine(config)
