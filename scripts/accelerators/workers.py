"""Runs cases in child processes, a few at a time, and kills those that take too long. Knows names
and what comes back, nothing of compilers."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import IO

from accelerators.cases import Case, Found

START_S = 60  # what a child may take to import jax and find its compilers


def serve(cases: Mapping[str, Case], names: IO[str], answers: IO[str]) -> None:
    """The child: runs each case named on a line of `names`, answers with a line of JSON."""
    for line in names:
        begin = time.perf_counter()
        try:
            found = cases[line.strip()].run()
        except Exception as error:
            text = " ".join(str(error).split())
            found = Found(problems=[f"{type(error).__name__}: {text[:300]}"])
        found.figures.setdefault("seconds", round(time.perf_counter() - begin, 1))
        print(json.dumps([found.figures, found.problems]), file=answers, flush=True)


def run_all(
    cases: list[Case], command: list[str], num_children: int, done: Callable[[Case, Found], None]
) -> None:
    """Gives every case to one of `num_children` processes started by `command`, and `done` what
    each found."""
    waiting: queue.SimpleQueue[Case] = queue.SimpleQueue()
    for case in cases:
        waiting.put(case)
    threads = [
        threading.Thread(target=_feed, args=(waiting, command, done), daemon=True)
        for _ in range(num_children)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _feed(waiting, command: list[str], done) -> None:
    child = None
    while True:
        try:
            case = waiting.get_nowait()
        except queue.Empty:
            break
        starts = child is None or child.poll() is not None
        if starts:
            child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        limit_s = case.limit_s + START_S * starts
        alarm = threading.Timer(limit_s, child.kill)
        alarm.start()
        answer = ""
        try:
            print(case.name, file=child.stdin, flush=True)
            answer = child.stdout.readline()
        except BrokenPipeError:
            pass
        timed_out = not alarm.is_alive()
        alarm.cancel()
        if answer:
            done(case, Found(*json.loads(answer)))
        else:
            status = child.wait()
            what = f"was killed after {limit_s:.0f} s" if timed_out else f"died with {status}"
            done(case, Found(problems=[f"its process {what}"]))
    if child is not None:
        child.kill()
        child.wait()


def answers_apart_from_output() -> IO[str]:
    """Returns this process's stdout for answers alone: what anything else prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return answers
