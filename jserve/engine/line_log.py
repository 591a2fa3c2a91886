"""A file of lines that never holds up serving. Knows a path and text: not what the lines say."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections import deque
from typing import IO

from jserve.errors import ConfigError

log = logging.getLogger(__name__)

FLUSH_S = 1.0  # how old a line may become before it is in the file
MAX_PENDING = 100_000  # lines that wait for a disk that hangs; more are dropped


class LineLog:
    """Writes lines from a thread of its own; `add` costs an append.

    A disk that fails, full for instance, is reported once and ends the log, not the engine. A file
    that is renamed or removed, as logrotate does, is opened anew before the next lines. The path
    "-" is standard output.

    Raises:
      ConfigError: the file cannot be opened.
    """

    def __init__(self, flag: str, path: str, mode: str, flush_s: float = FLUSH_S) -> None:
        try:
            # Closed by the thread, or here if there is none.
            self._file: IO[str] = sys.stdout if path == "-" else _opened(path, mode)
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
                if lines:
                    self._follow_path()
                self._file.writelines(f"{line}\n" for line in lines)
                self._file.flush()
        except OSError as error:
            log.error("%s: no more is written: %s", self._path, error)
            self._pending = deque(maxlen=0)
        finally:
            if self._file is not sys.stdout:
                with contextlib.suppress(OSError):
                    self._file.close()

    def _follow_path(self) -> None:
        """Opens the file anew if another one, or none, has its name now."""
        if self._file is sys.stdout:
            return
        try:
            at_path = os.stat(self._path)
        except FileNotFoundError:
            at_path = None
        if at_path is None or not os.path.samestat(at_path, os.fstat(self._file.fileno())):
            self._file.close()
            self._file = _opened(self._path, "a")


def _opened(path: str, mode: str) -> IO[str]:
    return open(path, mode, encoding="utf-8")
