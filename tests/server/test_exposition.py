"""The port for metrics alone, as scrapers read it."""

from __future__ import annotations

import urllib.request

import pytest

from jserve.engine.metrics import EngineMetrics
from jserve.engine.vllm_metrics import VllmMetrics
from jserve.server.exposition import serve_metrics

PROMETHEUS_3 = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8,text/plain;q=0.5"


@pytest.fixture
def registry():
    registry = EngineMetrics().registry
    registry.register(VllmMetrics(registry, "tiny", {"block_size": 16, "num_gpu_blocks": 9}))
    return registry


@pytest.mark.parametrize("accept", [PROMETHEUS_3, "text/plain", ""])
def test_the_colons_of_vllms_names_stay_whatever_the_scraper_prefers(
    registry, accept, unused_tcp_port
):
    stop = serve_metrics("127.0.0.1", unused_tcp_port, registry)
    url = f"http://127.0.0.1:{unused_tcp_port}/metrics"
    with urllib.request.urlopen(urllib.request.Request(url, headers={"accept": accept})) as answer:
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = answer.read().decode().splitlines()
    stop()
    assert 'vllm:num_requests_waiting{engine="0",model_name="tiny"} 0.0' in lines
    assert "jserve_requests_waiting 0.0" in lines


def test_the_port_is_free_again_when_stopped_and_refused_while_in_use(registry, unused_tcp_port):
    stop = serve_metrics("127.0.0.1", unused_tcp_port, registry)
    with pytest.raises(OSError, match="in use"):
        serve_metrics("127.0.0.1", unused_tcp_port, registry)
    stop()
    serve_metrics("127.0.0.1", unused_tcp_port, registry)()
