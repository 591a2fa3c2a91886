"""The output file as a journal: append-only records, each naming the input line it answers. Knows
records and the disk: no engine, no requests.

Every record is handed to the operating system in one write, so that killing the process loses at
most a torn last record, which the next start cuts off. The disk is told to sync every few seconds
and at the end: a power cut can lose the records of that time, whose lines then run again.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from array import array
from pathlib import Path
from typing import Any

from jserve.errors import ConfigError

SYNC_INTERVAL_S = 5.0
_ID_PREFIX = "batch_req_"
_RECORD_START = b'{"line": '


class Journal:
    """Opens `path` for one writer and knows which lines it answers already.

    Memory: 8 bytes per line of the input.

    Raises ConfigError if the file is not empty and `resume` is false, if another process writes to
    it, or if it holds anything but a batch job's records; the file is untouched then.
    """

    def __init__(self, path: str | Path, *, resume: bool) -> None:
        self._path = Path(path)
        try:
            self._file = open(self._path, "a+b", buffering=0)  # noqa: SIM115 - by close()
        except OSError as error:
            raise ConfigError(f"--output={path}: {error.strerror}") from error
        self._digests = array("Q")  # [line], the digest of the answered input line; 0 if not done
        self.num_done = 0
        try:
            self._lock()
            if not resume and self._file.seek(0, os.SEEK_END):
                raise ConfigError(f"--output={path} exists; use --resume, or another name")
            self._file.truncate(self._scan())
        except BaseException:
            self._file.close()
            raise
        self._synced_at = time.monotonic()

    def is_done(self, number: int, digest: int) -> bool:
        """Whether line `number` has its record. Raises ConfigError if that answers other input."""
        if number >= len(self._digests) or not self._digests[number]:
            return False
        if self._digests[number] != digest:
            raise ConfigError(
                f"line {number} of the input is not the line that {self._path} answers; "
                "restore the input, or use another --output"
            )
        return True

    def append(self, number: int, digest: int, fields: dict[str, Any]) -> None:
        """Writes the one record of line `number`. Raises OSError if the disk does not take it."""
        record = {"line": number, "id": f"{_ID_PREFIX}{digest:016x}"} | fields
        # backslashreplace spells a lone surrogate exactly as JSON does.
        data = json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        self._mark(number, digest)
        while data:
            data = data[self._file.write(data) :]
        if time.monotonic() - self._synced_at >= SYNC_INTERVAL_S:
            self._sync()

    def close(self) -> None:
        self._sync()
        self._file.close()

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        self._synced_at = time.monotonic()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--output={self._path} is in use by another batch job") from None

    def _mark(self, number: int, digest: int) -> None:
        assert number >= len(self._digests) or not self._digests[number], f"{number=} done twice"
        self._digests.extend([0] * (number + 1 - len(self._digests)))
        self._digests[number] = digest
        self.num_done += 1

    def _scan(self) -> int:
        """Marks every whole record's line; returns where the last whole record ends."""
        end = 0
        self._file.seek(0)
        with open(os.dup(self._file.fileno()), "rb") as reader:
            for record_number, raw in enumerate(reader, start=1):
                if not raw.endswith(b"\n"):
                    # Only our own torn record may be cut: this could be somebody's notes.
                    if not end and raw[: len(_RECORD_START)] != _RECORD_START[: len(raw)]:
                        raise self._foreign(record_number)
                    break
                try:
                    record = json.loads(raw)
                    number, digest = record["line"], int(record["id"].removeprefix(_ID_PREFIX), 16)
                    if number < 1 or not 0 < digest < 2**64 or self._is_marked(number):
                        raise ValueError
                except (ValueError, KeyError, TypeError, AttributeError):
                    raise self._foreign(record_number) from None
                self._mark(number, digest)
                end += len(raw)
        return end

    def _is_marked(self, number: int) -> bool:
        return number < len(self._digests) and self._digests[number] != 0

    def _foreign(self, record_number: int) -> ConfigError:
        return ConfigError(
            f"--output={self._path}: line {record_number} is not a record of a batch job (or "
            "answers a line twice); use another --output"
        )
