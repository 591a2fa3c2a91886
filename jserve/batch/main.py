"""The command `jserve-batch`: flags, signals, exit codes. Knows no lines and no records.

Exit codes: 0 every line is answered (bad ones with an error record), 1 the settings, the model or
the files are no good, or the engine failed, 130 interrupted; run again to go on where it stopped.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from absl import app, flags

from jserve.batch.job import BatchOptions, Order, run_batch
from jserve.batch.journal import Journal
from jserve.errors import ConfigError, JserveError
from jserve.flags import SECTIONS, config_from_flags, define_flags, list_in_help

STOP_NOTICE = b"\njserve-batch: stopping after this step; once more stops at once\n"
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


class StopFlag:
    """Set by the first SIGINT or SIGTERM; a second one interrupts at once."""

    def __init__(self) -> None:
        self.is_set = False

    def __call__(self) -> bool:
        return self.is_set

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True
        os.write(2, STOP_NOTICE)  # print may be what the signal has interrupted

    @contextmanager
    def installed(self) -> Iterator[StopFlag]:
        before = {n: signal.signal(n, self.on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}; all settings are --flags")
    try:
        return _run_from_flags()
    except (JserveError, OSError) as error:
        print(f"jserve-batch: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("jserve-batch: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _run_from_flags() -> int:
    values = flags.FLAGS
    config = config_from_flags()
    if not Path(values.input).is_file():
        raise ConfigError(f"--input={values.input} is not a file")
    Journal(values.output, resume=values.resume).close()  # say what is wrong before loading a model

    from jserve.build import build_engine  # jax comes in here

    engine = build_engine(config)
    options = BatchOptions(
        order=Order(values.order),
        resume=values.resume,
        # Enough to keep every row busy and prompts waiting, and no more to lose when stopped.
        max_in_flight=values.max_in_flight or 2 * config.scheduler.max_num_seqs,
        model_name=config.model.served_model_name or config.model.model,
        progress=values.progress,
    )
    try:
        with StopFlag().installed() as stop:
            summary = run_batch(engine, values.input, values.output, options, should_stop=stop)
    finally:
        engine.close()
    print(f"{summary} -> {values.output}")
    return EXIT_INTERRUPTED if summary.interrupted else 0


def run() -> NoReturn:
    """Console command `jserve-batch`."""
    define_flags([section for section in SECTIONS if section not in ("server", "security")])
    flags.DEFINE_string("input", None, "JSON lines to answer: OpenAI batch lines or short ones.")
    flags.DEFINE_string("output", None, "Where the answers go; also the journal to resume from.")
    flags.DEFINE_enum("order", Order.INPUT, list(Order), "Order of the answers.")
    flags.DEFINE_boolean("resume", True, "Go on where --output ends; else refuse one that exists.")
    flags.DEFINE_boolean("progress", True, "Show a progress bar on stderr.")
    help_text = "Requests in the engine at once; 0: twice --max_num_seqs."
    flags.DEFINE_integer("max_in_flight", 0, help_text, lower_bound=0)
    flags.mark_flags_as_required(["input", "output"])
    list_in_help()
    app.run(main)
