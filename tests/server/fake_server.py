"""The real server's main over the fake engine, as a process of its own. Loading ends with a line
on standard input: "go" serves, anything else fails to build."""

from __future__ import annotations

import sys

from absl import app, flags

from jserve.config import EngineConfig
from jserve.errors import CheckpointError
from jserve.flags import define_flags
from jserve.server.main import main
from tests.server.fake_engine import FakeEngine

INTERVAL_S = flags.DEFINE_float("interval_s", 0.01, "Seconds per token.")


def build(config: EngineConfig) -> FakeEngine:
    if sys.stdin.readline().strip() != "go":
        raise CheckpointError("model.gguf: the file is damaged")
    return FakeEngine(interval_s=INTERVAL_S.value)


if __name__ == "__main__":
    define_flags()
    flags.FLAGS.set_default("verbosity", 0)
    app.run(lambda argv: main(argv, build))
