#!/usr/bin/env python
"""Compiles kernels and whole steps for TPUs and GPUs with their own compilers; needs no device.

    scripts/check_accelerators.py --quick
    scripts/check_accelerators.py --only='kernel/v6e/.*decode' --json=found.json
    scripts/check_accelerators.py --write_docs

Prints a table per kind of check and ends with 1 if a bound is broken. Needs the environment that
scripts/lib.sh makes, .venv-accelerators. docs/accelerators.md says what is proven by this.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from pathlib import Path

from absl import app, flags
from accelerators.targets import prepare_process

prepare_process()

from accelerators.cases import Case, Found  # noqa: E402
from accelerators.kernels import kernel_cases  # noqa: E402
from accelerators.negatives import negative_cases  # noqa: E402
from accelerators.primitives import primitive_cases  # noqa: E402
from accelerators.report import document, summary, tables  # noqa: E402
from accelerators.steps import step_cases  # noqa: E402
from accelerators.workers import answers_apart_from_output, run_all, serve  # noqa: E402

_QUICK = flags.DEFINE_bool("quick", False, "a subset, for every change: about 5 minutes")
_ONLY = flags.DEFINE_string("only", "", "run the cases whose name this regular expression finds")
_LIST = flags.DEFINE_bool("list", False, "print the names of the cases and run none")
_JSON = flags.DEFINE_string("json", "", "file for all that was found")
_WRITE_DOCS = flags.DEFINE_bool("write_docs", False, "put the tables into docs/accelerators.md")
_CHILDREN = flags.DEFINE_integer("children", 2, "processes at a time", lower_bound=1)
_SERVE = flags.DEFINE_bool("serve", False, "be a child that runs the cases named on stdin")

DOCUMENT = Path(__file__).parents[1] / "docs" / "accelerators.md"


def main(argv: list[str]) -> int:
    if argv[1:]:
        raise app.UsageError(f"{argv[1:]} are no flags")
    if _WRITE_DOCS.value and (_QUICK.value or _ONLY.value):
        raise app.UsageError("--write_docs is for the tables of all cases: leave out the subset")
    cases = [*negative_cases(), *step_cases(), *kernel_cases(), *primitive_cases()]
    if _SERVE.value:
        serve({case.name: case for case in cases}, sys.stdin, answers_apart_from_output())
        return 0
    wanted = [
        case
        for case in cases
        if (case.quick or not _QUICK.value) and re.search(_ONLY.value, case.name)
    ]
    if _LIST.value or not wanted:
        print("\n".join(case.name for case in wanted) or f"no case is like {_ONLY.value!r}")
        return 0 if wanted else 1
    begin = time.perf_counter()
    found: dict[str, Found] = {}
    lock = threading.Lock()

    def done(case: Case, result: Found) -> None:
        with lock:
            found[case.name] = result
            plain = {name: vars(one) for name, one in found.items()}
            if _JSON.value:  # each time: a long run may be stopped
                Path(_JSON.value).write_text(json.dumps(plain, indent=1) + "\n")
        if result.problems or sys.stderr.isatty():
            verdict = "; ".join(result.problems) or "fine"
            print(f"[{len(found)}/{len(wanted)}] {case.name}: {verdict}", file=sys.stderr)

    run_all(wanted, [sys.executable, __file__, "--serve"], _CHILDREN.value, done)
    ordered = {case.name: found[case.name] for case in wanted}
    print(tables(ordered))
    print(summary(ordered, time.perf_counter() - begin))
    if _WRITE_DOCS.value:
        DOCUMENT.write_text(document(DOCUMENT.read_text(), ordered))
    return 1 if any(result.problems for result in ordered.values()) else 0


if __name__ == "__main__":
    app.run(main)
