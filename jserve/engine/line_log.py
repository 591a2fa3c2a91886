"""A file of lines that never holds up serving. Knows a path and text: not what the lines say."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from typing import IO

from jserve.errors import ConfigError

log = logging.getLogger(__name__)

FLUSH_S = 1.0  # how old a line may become before it is in the file
MAX_PENDING = 100_000  # lines that wait for a disk that hangs; more are dropped


class LineLog:
    """Writes lines from a thread of its own; `add` costs an append.

    A disk that fails, full for instance, is reported once and ends the log, not the engine.

    Raises:
      ConfigError: the file cannot be opened.
    """

    def __init__(self, flag: str, path: str, mode: str, flush_s: float = FLUSH_S) -> None:
        try:
            # Closed by the thread, or here if there is none.
            self._file: IO[str] = open(path, mode, encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise ConfigError(
                f"--{flag}={path} cannot be written ({error.strerror}); give another path"
            ) from error
        self._path = path
        self._flush_s = flush_s
        self._pending: deque[str] = deque(maxlen=MAX_PENDING)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"jserve-{flag}", daemon=True)
        self._thread.start()

    def add(self, line: str) -> None:
        """Queues a line, without its end."""
        self._pending.append(line)

    def close(self) -> None:
        """Writes what is queued and closes the file; a second call does nothing."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            closing = False
            while not closing:
                closing = self._closing.wait(self._flush_s)
                lines = [self._pending.popleft() for _ in range(len(self._pending))]
                self._file.writelines(f"{line}\n" for line in lines)
                self._file.flush()
        except OSError as error:
            log.error("%s: no more is written: %s", self._path, error)
            self._pending = deque(maxlen=0)
        finally:
            with contextlib.suppress(OSError):
                self._file.close()
