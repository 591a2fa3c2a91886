"""Runs a batch file through an engine: reads ahead just enough, answers every line once. Knows the
order of work: no JSON, no flags, no signals."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from jserve.batch.journal import Journal
from jserve.batch.lines import (
    InputLine,
    decode_line,
    digest64,
    parse_task,
    read_lines,
    take_custom_id,
)
from jserve.batch.progress import BatchProgress
from jserve.errors import (
    ConfigError,
    EngineDead,
    InvalidRequest,
    JserveError,
    Overloaded,
    wire_code,
)
from jserve.offline import Mailbox, RequestDriver, RequestOutput
from jserve.openai_format import OpenAICall
from jserve.openai_response import response_body


class Order(StrEnum):
    """How the output's records are ordered."""

    INPUT = "input"  # as the lines; answers wait in memory for slower ones before them
    FINISHED = "finished"  # each as soon as it is there


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    order: Order = Order.INPUT
    resume: bool = True  # else refuse an output that exists
    max_in_flight: int = 64  # requests in the engine, waiting ones included
    model_name: str = ""  # the `model` of response bodies
    progress: bool = False


@dataclass(slots=True, kw_only=True)
class BatchSummary:
    """What one run did. Lines answered by an earlier run count as skipped."""

    num_ok: int = 0
    num_errors: int = 0
    num_skipped: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    duration_s: float = 0.0
    interrupted: bool = False

    def __str__(self) -> str:
        rate = self.output_tokens / self.duration_s if self.duration_s else 0.0
        return (
            f"{'interrupted' if self.interrupted else 'done'}: {self.num_ok} ok, "
            f"{self.num_errors} errors, {self.num_skipped} done before; "
            f"{self.prompt_tokens} prompt tokens, {self.output_tokens} output tokens in "
            f"{self.duration_s:.1f} s ({rate:.1f} output tokens/s)"
        )


@dataclass(frozen=True, slots=True)
class _Entry:
    """One line on its way from the input to the output."""

    line: InputLine
    custom_id: str | None
    call: OpenAICall


def run_batch(
    engine: Any,
    input_path: str | Path,
    output_path: str | Path,
    options: BatchOptions,
    should_stop: Callable[[], bool] = lambda: False,
) -> BatchSummary:
    """Answers every line of the input that the output does not answer yet.

    A bad line gets an error record. Memory is bounded by `max_in_flight` requests, 16 times as
    many waiting answers under Order.INPUT, and about 80 bytes per line to know the lines done and
    the custom_ids seen (64-bit digests, not the ids).

    Args:
      should_stop: asked between steps; once true, requests in flight are aborted, without records.

    Raises:
      ConfigError: the files are not fit for the job, or do not belong together.
      EngineDead, OSError: the engine or the disk failed. Records written so far stand: run again.
    """
    try:
        source = open(input_path, "rb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise ConfigError(f"--input={input_path}: {error.strerror}") from error
    with source:
        journal = Journal(output_path, resume=options.resume)
        total_bytes = Path(input_path).stat().st_size
        started = time.monotonic()
        with BatchProgress(total_bytes, options.progress) as progress:
            job = _Job(engine, read_lines(source), journal, progress, options, should_stop)
            try:
                job.run()
            finally:
                journal.close()
        job.summary.duration_s = time.monotonic() - started
        return job.summary


class _Job:
    def __init__(
        self,
        engine: Any,
        lines: Iterator[InputLine],
        journal: Journal,
        progress: BatchProgress,
        options: BatchOptions,
        should_stop: Callable[[], bool],
    ) -> None:
        self._tokenizer = engine.tokenizer
        self._new_parser = engine.processor.chat.parser
        self._driver = RequestDriver(engine)
        self._mailbox: Mailbox = deque()
        self._lines = lines
        self._journal = journal
        self._progress = progress
        self._options = options
        self._should_stop = should_stop
        self._custom_ids: set[int] = set()
        self._waiting: _Entry | None = None  # parsed, but the engine had no room
        self._num_in_flight = 0
        self._num_resumed = journal.num_done
        in_order = options.order == Order.INPUT
        self._max_open = options.max_in_flight * (16 if in_order else 1)
        self._open: dict[int, tuple[InputLine, dict[str, Any]] | None] = {}  # read, not written
        self.summary = BatchSummary()

    def run(self) -> None:
        try:
            more = True
            while more or self._num_in_flight:
                more = more and self._fill()
                if self._should_stop():
                    self.summary.interrupted = True
                    return
                if self._num_in_flight:
                    self._driver.step()
                while self._mailbox:
                    entry, result = self._mailbox.popleft()
                    self._num_in_flight -= 1
                    self._answer(entry, result)
            if self.summary.num_skipped < self._num_resumed:
                missing = self._num_resumed - self.summary.num_skipped
                raise ConfigError(f"the output answers {missing} lines beyond the input's end")
        finally:
            self._driver.abort(self._mailbox)

    def _fill(self) -> bool:
        """Gives the engine lines until it is full. Returns whether there may be more to give."""
        while self._has_room() and not self._should_stop():
            entry, self._waiting = self._waiting, None
            if entry is None:
                line = next(self._lines, None)
                if line is None:
                    return False
                entry = self._admit(line)
            if entry is not None and not self._submit(entry):
                self._waiting = entry
                break
        return True

    def _has_room(self) -> bool:
        return (
            self._num_in_flight < self._options.max_in_flight and len(self._open) < self._max_open
        )

    def _submit(self, entry: _Entry) -> bool:
        """Puts an entry into the engine's queue, or returns False where that has no room yet."""
        try:
            self._driver.add(entry.call.request, entry, self._mailbox)
        except Overloaded:
            if not self._driver.num_live:  # an empty engine has no room: give up, do not spin
                raise
            return False
        except InvalidRequest as error:
            self._refuse(entry.line, entry.custom_id, error)
            return True
        self._num_in_flight += 1
        return True

    def _admit(self, line: InputLine) -> _Entry | None:
        """Returns what a line asks of the engine; None if it was done before or is answered now."""
        done = self._journal.is_done(line.number, line.digest)
        custom_id: str | None = None
        try:
            fields = decode_line(line.raw)
            custom_id = take_custom_id(fields)
            self._claim(custom_id)  # lines done before claim theirs too
            call = None if done else parse_task(fields, custom_id)
            problem = None
        except InvalidRequest as error:
            call, problem = None, error
        if done:
            self.summary.num_skipped += 1
            self._progress.skip(line.num_bytes)
            return None
        self._open[line.number] = None
        if problem is not None:
            self._refuse(line, custom_id, problem)
        return None if call is None else _Entry(line, custom_id, call)

    def _claim(self, custom_id: str | None) -> None:
        if custom_id is None:
            return
        digest = digest64(custom_id.encode())
        if digest in self._custom_ids:
            raise InvalidRequest(
                f"custom_id={custom_id!r} was used by a line before; ids are unique"
            )
        self._custom_ids.add(digest)

    def _answer(self, entry: _Entry, result: RequestOutput | JserveError) -> None:
        if isinstance(result, EngineDead):
            raise result  # not the line's fault: it stays open for the next run
        if isinstance(result, JserveError):
            self._refuse(entry.line, entry.custom_id, result)
            return
        body = response_body(
            entry.call,
            result,
            model=self._options.model_name,
            created=int(time.time()),
            tokenizer=self._tokenizer,
            new_parser=self._new_parser,
        )
        response = {"status_code": 200, "request_id": f"req_{uuid.uuid4().hex}", "body": body}
        usage = result.usage
        self.summary.num_ok += 1
        self.summary.prompt_tokens += usage.prompt_tokens
        self.summary.output_tokens += usage.completion_tokens
        self._write(entry.line, entry.custom_id, response, None)
        self._progress.answered(entry.line.num_bytes, usage.completion_tokens, ok=True)

    def _refuse(self, line: InputLine, custom_id: str | None, error: JserveError) -> None:
        self.summary.num_errors += 1
        code = wire_code(error).grpc.lower()
        self._write(line, custom_id, None, {"code": code, "message": str(error)})
        self._progress.answered(line.num_bytes, 0, ok=False)

    def _write(
        self,
        line: InputLine,
        custom_id: str | None,
        response: dict[str, Any] | None,
        error: dict[str, Any] | None,
    ) -> None:
        """Writes the record now, or when the open lines before it have theirs."""
        fields = {"custom_id": custom_id, "response": response, "error": error}
        if self._options.order == Order.FINISHED:
            del self._open[line.number]
            self._journal.append(line.number, line.digest, fields)
            return
        self._open[line.number] = (line, fields)
        while self._open:
            number, ready = next(iter(self._open.items()))  # a dict keeps the order of lines
            if ready is None:
                break
            del self._open[number]
            self._journal.append(number, ready[0].digest, ready[1])
