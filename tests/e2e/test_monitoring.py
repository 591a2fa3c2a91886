"""configs/monitoring against a real Prometheus that scrapes a real server over a real engine."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from jserve.engine.vllm_metrics import VllmMetrics
from jserve.messages import GenerateRequest
from tests.e2e.real_engine import arranged, greedy, prompt_of, serving_real
from tests.server.conftest import TIMEOUT_S

CONFIGS = Path(__file__).parents[2] / "configs" / "monitoring"
DASHBOARD = json.loads((CONFIGS / "grafana_dashboard.json").read_text())
ALERTS = yaml.safe_load((CONFIGS / "alerts.yml").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
SCRAPE_S = 0.2
VLLM_QUERIES = (
    "vllm:num_requests_waiting",
    "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
    'vllm:cache_config_info{block_size="16"}',
    "histogram_quantile(0.9, rate(vllm:time_to_first_token_seconds_bucket[9s]))",
    "histogram_quantile(0.9, rate(vllm:inter_token_latency_seconds_bucket[9s]))",
    'sum by (finished_reason) (rate(vllm:request_success_total{model_name="tiny"}[9s]))',
)

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="needs Debian's package prometheus: apt-get install prometheus",
)


@needs_prometheus
@pytest.mark.parametrize(
    "check", ["check config prometheus.yml", "check rules alerts.yml", "test rules alerts_test.yml"]
)
def test_promtool_passes_the_example_the_rules_and_the_tests_of_the_rules(check):
    run = subprocess.run(
        ["promtool", *check.split()], cwd=CONFIGS, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_each_alert_has_a_test_and_is_explained():
    tests = yaml.safe_load((CONFIGS / "alerts_test.yml").read_text())["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    fired = {case["alertname"] for case in cases if case.get("exp_alerts")}
    quiet = {case["alertname"] for case in cases if not case.get("exp_alerts")}
    names = {rule["alert"] for rule in RULES if "alert" in rule}
    assert fired == quiet == names
    manual = (CONFIGS.parents[1] / "docs" / "monitoring.md").read_text()
    assert [name for name in names if f"`{name}`" not in manual] == []


def test_panels_have_names_of_their_own_and_do_not_overlap():
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for at in [panel["gridPos"]]
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in PANELS)


@asynccontextmanager
async def prometheus(folder: Path, target: str) -> AsyncIterator[aiohttp.ClientSession]:
    """Yields a client of a Prometheus that runs the example's configuration, only faster."""
    config = yaml.safe_load((CONFIGS / "prometheus.yml").read_text())
    interval = f"{SCRAPE_S * 1e3:.0f}ms"
    config["global"] = {"scrape_interval": interval, "evaluation_interval": interval}
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [target]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(CONFIGS / "alerts.yml", folder)
    with socket.create_server(("127.0.0.1", 0)) as drawn:
        address = f"127.0.0.1:{drawn.getsockname()[1]}"
    process = subprocess.Popen(
        ["prometheus", "--config.file=prometheus.yml", f"--web.listen-address={address}"],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=(folder / "log").open("w"),
    )
    try:
        async with aiohttp.ClientSession(f"http://{address}") as session:
            yield session
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)


async def query(session: aiohttp.ClientSession, expression: str) -> list[dict]:
    """The series of an expression. Fails where Prometheus does not understand it."""
    async with session.get("/api/v1/query", params={"query": expression}) as response:
        answer = await response.json()
    assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
    return answer["data"]["result"]


async def until_seen(session: aiohttp.ClientSession, expression: str) -> None:
    """Returns as soon as an expression has a series."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            try:
                if await query(session, expression):
                    return
            except (aiohttp.ClientError, AssertionError):  # it is still starting
                pass
            await asyncio.sleep(SCRAPE_S / 2)


def as_grafana_asks(expression: str) -> str:
    return expression.replace("$__rate_interval", "9s").replace("$instance", ".*")


async def load(served) -> None:
    """More than the pages hold, so that requests wait and are preempted, in rounds that never
    end."""
    for turn in itertools.count():
        requests = (
            GenerateRequest(
                prompt_token_ids=prompt_of(20 + i, turn + i),
                sampling=greedy(60),
            )
            for i in range(6)
        )
        await asyncio.gather(*(served.client.generate(request) for request in requests))


@needs_prometheus
@pytest.mark.slow
async def test_a_real_prometheus_finds_data_for_each_panel_and_evaluates_each_rule(tmp_path):
    engine = arranged(num_pages=1 + 12, ttft_slo_s=10.0, itl_slo_s=10.0)
    cache = {"block_size": 16, "num_gpu_blocks": 12}
    engine.metrics.registry.register(VllmMetrics(engine.metrics.registry, "tiny", cache))
    async with (
        serving_real(engine, http=True) as served,
        prometheus(tmp_path, served.http.removeprefix("http://")) as session,
    ):
        work = asyncio.create_task(load(served))
        await until_seen(session, "rate(jserve_requests_finished_total{reason='length'}[9s]) > 0")
        await until_seen(session, "rate(jserve_preemptions_by_cause_total[9s]) > 0")
        empty = [
            expression
            for expression in (*EXPRESSIONS, *VLLM_QUERIES)
            if not await query(session, as_grafana_asks(expression))
        ]
        assert empty == []
        assert await query(session, "jserve_ready == 1")
        for rule in RULES:
            await query(session, rule["expr"])
        await until_seen(session, "jserve:slo_missed:ratio_rate6h")
        async with session.get("/api/v1/rules") as response:
            groups = (await response.json())["data"]["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        assert len(rules) == len(RULES)
        assert {rule["health"] for rule in rules} == {"ok"}, rules
        async with session.get(f"{served.http}/metrics") as response:
            known = sample_names(await response.text())
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    asked = {name for text in (*EXPRESSIONS, *map(str, RULES)) for name in names_in(text)}
    assert asked - known == set()


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\bjserve_[a-z_0-9]+", expression))


def sample_names(scraped: str) -> set[str]:
    families = text_string_to_metric_families(scraped)
    return {sample.name for family in families for sample in family.samples}
