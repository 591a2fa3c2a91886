"""Compiles grammars in a process of its own first, which ends where one takes too long or overflows
the stack. Knows llguidance: no models, no requests, and of a vocabulary its special tokens only.

What a grammar costs cannot be told beforehand (16 intersected patterns of ten characters take
minutes), and a thread that compiles cannot be stopped. This file is also that process's program.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

# A chain of definitions recurses once per link: 128 KiB of them need up to 64 MiB of stack.
COMPILE_STACK_BYTES = 2**28
LIMITS = LLParserLimits(
    max_lexer_states=50_000,  # 1 to 2 kB each, kept as long as the grammar
    max_items_in_row=1000,  # an ambiguous grammar: 40 ms for one mask, growing with the square
    step_lexer_fuel=200_000,  # 14 ms for one mask
    step_max_items=50_000,  # 3 ms for one mask
    verbose_errors=False,
)
START_S = 20.0  # 0.3 s, and more where all cores are busy
MARGIN_S = 2.0  # between a process's own alarm and its end by the parent
READY = b"ready\n"


class GrammarTrials:
    """Processes that try grammars, as many as try at once. Safe to share among threads.

    One is started for the first grammar, which takes 0.3 s and 33 MiB, and after one has ended.

    Args:
      vocab_size, eos_token_ids: as the compiler's.
      special_tokens: the bytes of each special token, which a grammar may name.
    """

    def __init__(
        self, vocab_size: int, special_tokens: Mapping[int, bytes], eos_token_ids: Sequence[int]
    ) -> None:
        texts = {id: text.decode("latin-1") for id, text in special_tokens.items()}
        self._vocabulary = _line([vocab_size, texts, list(eos_token_ids)])
        self._idle: list[subprocess.Popen[bytes]] = []
        weakref.finalize(self, _stop, self._idle)

    def passes(self, source: str, timeout_s: float) -> bool:
        """Whether a grammar is compiled, or found bad, within the time and without a crash.

        Raises:
          OSError: no process could be started; says why, and what to look at.
        """
        job = _line([timeout_s, source])
        while (child := self._taken()) is not None:
            with contextlib.suppress(BrokenPipeError):  # it ended while idle
                return self._answers(child, job, timeout_s)
        return self._answers(_started(self._vocabulary), job, timeout_s)

    def _taken(self) -> subprocess.Popen[bytes] | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _answers(self, child: subprocess.Popen[bytes], job: bytes, timeout_s: float) -> bool:
        answer = b""
        try:
            answer = _ask(child, job, timeout_s + MARGIN_S)
        finally:
            if answer:
                self._idle.append(child)
            else:
                _stop([child])
        return bool(answer)


def _started(vocabulary: bytes) -> subprocess.Popen[bytes]:
    """A process that is ready for grammars. Raises OSError."""
    child = subprocess.Popen(
        [sys.executable, "-P", str(Path(__file__).resolve())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is the parent's to handle
    )
    answer = b""
    with contextlib.suppress(BrokenPipeError):
        answer = _ask(child, vocabulary, START_S)
    if answer == READY:
        return child
    child.kill()  # its status stays its own where it has ended
    words = child.communicate()[1].decode(errors="replace").strip().splitlines()
    raise OSError(
        f"{sys.executable} with exit status {child.returncode} was not ready to try grammars in "
        f"{START_S:g} s ({words[-1] if words else 'it wrote no error'}); see that it is a Python "
        f"that can import llguidance, and that there is memory for {COMPILE_STACK_BYTES >> 20} MiB"
    )


def _line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _ask(child: subprocess.Popen[bytes], line: bytes, timeout_s: float) -> bytes:
    """The process's answer; none where it ended, as it does where it takes too long.

    Raises:
      BrokenPipeError: it had ended before.
    """
    assert child.stdin is not None, "it is a pipe"
    assert child.stdout is not None, "it is a pipe"
    overdue = threading.Timer(timeout_s, child.kill)  # its own alarm may be dead, or it be stopped
    overdue.start()
    try:
        child.stdin.write(line)
        child.stdin.flush()
        return child.stdout.readline()
    finally:
        overdue.cancel()


def _stop(children: list[subprocess.Popen[bytes]]) -> None:
    for child in children:
        child.kill()
        child.communicate()
    children.clear()


class _SpecialTokens:
    """A vocabulary of special tokens; all others are empty, for compiling asks for none."""

    bos_token_id = None

    def __init__(self, size: int, texts: Mapping[str, str], eos_token_ids: Sequence[int]) -> None:
        self.eos_token_id = eos_token_ids[0]
        self.special_token_ids = [int(id) for id in texts]
        self.tokens = [texts.get(str(id), "").encode("latin-1") for id in range(size)]

    def __call__(self, text: str) -> list[int]:
        return []


def _run() -> None:
    """Answers each grammar on standard input with a line; the alarm ends the process."""
    size, texts, eos_token_ids = json.loads(sys.stdin.buffer.readline())
    words = TokenizerWrapper(_SpecialTokens(size, texts, eos_token_ids))
    vocabulary = LLTokenizer(words, eos_token=eos_token_ids)
    sys.stdout.buffer.write(READY)
    sys.stdout.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # nobody reads of panics
    for job in sys.stdin.buffer:
        timeout_s, source = json.loads(job)
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        with contextlib.suppress(BaseException):  # Rust's panics, too; the parent tells of them
            LLMatcher(vocabulary, source, log_level=0, limits=LIMITS)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.write("\n")
        sys.stdout.flush()


if __name__ == "__main__":
    # Either is inherited, and the alarm would end nothing.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    threading.stack_size(COMPILE_STACK_BYTES)
    threading.Thread(target=_run).start()
