"""Runs a batch job over the fake engine in a process of its own, to be killed or interrupted.

Each step waits for a byte on stdin, so that the parent decides how far the job gets; at the end
of stdin the job runs on freely.
"""

from __future__ import annotations

import sys

from jserve.batch import BatchOptions, Order, run_batch
from jserve.batch.main import StopFlag
from tests.fake_engine import FakeEngine


def wait_for_leave() -> None:
    print("step", flush=True)
    sys.stdin.buffer.read(1)


if __name__ == "__main__":
    input_path, output_path, order = sys.argv[1:]
    with StopFlag().installed() as stop:
        engine = FakeEngine(before_step=wait_for_leave)
        options = BatchOptions(order=Order(order), max_in_flight=8)
        summary = run_batch(engine, input_path, output_path, options, should_stop=stop)
    sys.exit(130 if summary.interrupted else 0)
