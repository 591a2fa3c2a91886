"""What the composition root refuses before it compiles anything, and sets before jax starts."""

from __future__ import annotations

import os

import pytest

from jserve.build import build_engine
from jserve.errors import ConfigError
from jserve.llm import engine_config
from jserve.runner.platform import set_compiler_flags
from pallas_kernels.ragged_paged_attention import reference
from tests.e2e.real_engine import SETTINGS, model

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


def read_flags() -> list[str]:

    return os.environ["LIBTPU_INIT_ARGS"].split()
