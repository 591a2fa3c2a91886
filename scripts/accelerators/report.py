"""Turns what was found into tables and the document. Knows names and numbers only."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

from accelerators.cases import Found
from accelerators.targets import TARGETS

_BEGIN, _END = "<!-- tables: begin -->", "<!-- tables: end -->"
_HEADINGS = {
    "refused": "What must be refused or found",
    "step": "Whole steps",
    "kernel": "Attention kernels, in a loop over 4 layers",
    "primitive": "Other primitives",
}


def tables(results: Mapping[str, Found]) -> str:
    """Returns one table per kind of case, in Markdown; a problem follows in its own row."""
    parts = []
    for kind, group in groupby(results.items(), key=lambda item: item[0].split("/")[0]):
        rows = dict(group)
        columns = list(dict.fromkeys(key for found in rows.values() for key in found.figures))
        parts += [f"### {_HEADINGS[kind]}", "", _row("target", "case", *columns, "verdict")]
        parts.append("|" + "---|" * (len(columns) + 3))
        for name, found in rows.items():
            _, target, what = name.split("/", 2)
            figures = (found.figures.get(column, "") for column in columns)
            parts.append(_row(target, what, *figures, "; ".join(found.problems) or "ok"))
        parts.append("")
    return "\n".join(parts)


def _row(*cells: object) -> str:
    return "| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |"


def summary(results: Mapping[str, Found], seconds: float) -> str:
    """Returns the last lines: how many, how many broke a bound, by which compilers, how long."""
    num_broken = sum(bool(found.problems) for found in results.values())
    verdict = f"{num_broken} broke a bound" if num_broken else "all within their bounds"
    names = {name.split("/")[1] for name in results}
    lines = [f"{len(results)} cases, {verdict}, {seconds:.0f} s."]
    return "\n".join(lines + [wording(name) for name in TARGETS if name in names])


def wording(name: str) -> str:
    """Returns how far the proof goes for a target, until it has been run there."""
    target = TARGETS[name]
    return (
        f"{target.kind}: compiled with {target.compiler} and run in the interpreter; "
        f"not run on {target.kind}."
    )


def document(text: str, results: Mapping[str, Found]) -> str:
    """Returns `text` with the tables between its two marks."""
    head, rest = text.split(_BEGIN)
    tail = rest.split(_END)[1]
    names = dict.fromkeys(name.split("/")[1] for name in results)
    said = "\n".join(f"- {wording(name)}" for name in names)
    return f"{head}{_BEGIN}\n{said}\n\n{tables(results)}\n{_END}{tail}"
