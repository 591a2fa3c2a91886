"""The batch command over the fake engine in a process of its own, to be killed or interrupted.

Loading the model and each step print a line, and then wait for a byte on stdin, so that the parent
decides how far the job gets; at the end of stdin it runs on freely.
"""

from __future__ import annotations

import sys
import types

from jserve.batch import run
from jserve.config import EngineConfig
from jserve.errors import CheckpointError
from tests.fake_engine import FakeEngine


def announce(event: str) -> None:
    print(event, flush=True)
    sys.stdin.buffer.read(1)


def build_engine(config: EngineConfig) -> FakeEngine:
    announce("load")
    if config.model.model == "damaged.gguf":
        raise CheckpointError("damaged.gguf: the file is damaged")
    return FakeEngine(before_step=lambda: announce("step"))


if __name__ == "__main__":
    # The one place the command gets its engine from; the real one would bring jax and a model.
    build = types.ModuleType("jserve.build")
    build.build_engine = build_engine  # type: ignore[attr-defined]
    sys.modules["jserve.build"] = build
    run()
