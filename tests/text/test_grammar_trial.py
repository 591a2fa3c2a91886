"""The processes that try grammars: they start or it is told why not, they end whatever happens, and
nothing of them stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jserve.errors import RequestFailed
from jserve.structured import GrammarKind, StructuredOutput
from jserve.text import grammar_trial
from jserve.text.grammar import GrammarCompiler
from jserve.text.grammar_trial import GrammarTrials

QUICK = json.dumps({"grammars": [{"json_schema": {"type": "null"}}]})
DOUBLING = {"type": "string", "allOf": [{"pattern": f"(a|b)*a(a|b){{{i}}}$"} for i in range(20)]}
SLOW = json.dumps({"grammars": [{"json_schema": DOUBLING}]})  # minutes
LONG = "x" * 100_000  # more than a pipe holds
WAIT_S = 10.0


@pytest.fixture
def trials() -> GrammarTrials:
    return GrammarTrials(300, {}, [0])


@pytest.fixture
def started(monkeypatch) -> list[subprocess.Popen[bytes]]:
    """The processes that were started; the fifth is one too many."""
    start, children = subprocess.Popen, []

    def popen(*args, **kwargs):
        assert len(children) < 4, "processes are started without end"
        children.append(start(*args, **kwargs))
        return children[-1]

    monkeypatch.setattr(grammar_trial.subprocess, "Popen", popen)
    return children


def is_reaped(child: subprocess.Popen[bytes]) -> bool:
    try:
        os.waitpid(child.pid, os.WNOHANG)
    except ChildProcessError:
        return True
    return False


@pytest.mark.parametrize("source", [QUICK, LONG], ids=["short", "longer than a pipe holds"])
@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("exit 1", "exit status 1 .*wrote no error.*see that"),
        ("echo 'no module' >&2; exit 3", "exit status 3 .*no module"),
        ("echo; read line; read line", "exit status -9 "),
        ("exec sleep 1000", r"exit status -9 .*in 0\.5 s"),
    ],
    ids=["ends", "tells why", "says something else", "hangs"],
)
def test_a_process_that_does_not_start_is_an_error_that_says_why(
    trials, started, monkeypatch, tmp_path, source, program, told
):
    shell = tmp_path / "python"
    shell.write_text(f"#!/bin/sh\n{program}\n")
    shell.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(shell))
    monkeypatch.setattr(grammar_trial, "START_S", 0.5 if "sleep" in program else WAIT_S)
    with pytest.raises(OSError, match=told):
        trials.passes(source, 1.5)
    assert [is_reaped(child) for child in started] == [True]


def test_where_no_process_starts_the_request_fails_and_the_next_is_served(
    byte_level, monkeypatch, caplog
):
    compiler = GrammarCompiler(byte_level, byte_level.vocab_size, byte_level.eos_token_ids)
    spec = StructuredOutput(GrammarKind.REGEX, "a+")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")
        for _ in range(3):  # one more than compile at once
            with pytest.raises(RequestFailed, match="the log says why"):
                compiler.compile(spec)
    assert caplog.text.count("/bin/false with exit status 1") == 3
    compiler.compile(spec)


def test_an_idle_process_that_has_ended_is_replaced(trials, started):
    assert trials.passes(QUICK, WAIT_S)
    started[0].kill()
    assert started[0].wait() == -signal.SIGKILL
    assert trials.passes(QUICK, WAIT_S)
    assert len(started) == 2


@pytest.mark.parametrize("is_blocked", [True, False], ids=["blocked", "ignored"])
def test_the_alarm_ends_a_process_whose_parent_wants_no_alarms(
    trials, started, monkeypatch, is_blocked
):
    monkeypatch.setattr(grammar_trial, "MARGIN_S", WAIT_S)  # the parent's own end comes later
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM] if is_blocked else [])
    handler = signal.signal(signal.SIGALRM, signal.SIG_DFL if is_blocked else signal.SIG_IGN)
    try:
        assert not trials.passes(SLOW, 0.3)
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert [child.returncode for child in started] == [-signal.SIGALRM]
    assert is_reaped(started[0])


@pytest.mark.parametrize("source", [QUICK, LONG], ids=["reads", "does not even read"])
def test_a_process_that_no_alarm_reaches_is_ended_by_its_parent(
    trials, started, monkeypatch, source
):
    assert trials.passes(QUICK, WAIT_S)
    monkeypatch.setattr(grammar_trial, "MARGIN_S", 0.1)
    os.kill(started[0].pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        try:
            pool.submit(trials.passes, source, 0.1).result(WAIT_S)
        finally:
            started[0].kill()
    assert is_reaped(started[0])


def test_threads_have_a_process_each_and_share_those_that_are_idle(trials, started):
    jobs = [QUICK, SLOW, QUICK, QUICK] * 4
    with ThreadPoolExecutor(2) as pool:
        passed = pool.map(lambda job: trials.passes(job, WAIT_S if job == QUICK else 0.1), jobs[:9])
        assert list(passed) == [job == QUICK for job in jobs[:9]]
    assert sum(child.returncode is None for child in started) <= 2


SCRIPT = """
import signal, sys
from jserve.text.grammar_trial import GrammarTrials
trials = GrammarTrials(300, {}, [0])
assert trials.passes(sys.argv[1], 10)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print(trials._idle[0].pid, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["exit", "kill"])
def test_idle_processes_end_with_their_parent(number):
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, QUICK],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        pid = int(parent.stdout.readline())
        os.kill(pid, 0)  # it is there
        parent.send_signal(number)
        assert parent.wait(WAIT_S) == (0 if number == signal.SIGTERM else -number)
    give_up = time.monotonic() + WAIT_S
    while is_running(pid):
        assert time.monotonic() < give_up


def is_running(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()  # one that init has yet to reap
    except (FileNotFoundError, ProcessLookupError):
        return False
