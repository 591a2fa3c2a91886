"""jserve serves large language models with JAX. `import jserve` loads no jax; using `LLM` does."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jserve.llm import LLM
    from jserve.offline import CompletionOutput, RequestOutput
    from jserve.sampling_params import SamplingParams

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]

_HOMES = {
    "LLM": "jserve.llm",
    "CompletionOutput": "jserve.offline",
    "RequestOutput": "jserve.offline",
    "SamplingParams": "jserve.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jserve' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
