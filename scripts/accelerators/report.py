"""Turns what was found into tables and the document. Knows names and numbers only."""

from __future__ import annotations

from collections.abc import Mapping

from accelerators.cases import Found
from accelerators.targets import TARGETS

_BEGIN, _END = "<!-- tables: begin -->", "<!-- tables: end -->"
_HEADINGS = {
    "refused": "what must be refused or found",
    "step": "forward passes",
    "sampler": "choosing, scoring and counting tokens",
    "kernel": "attention kernels, in a loop over 4 layers",
    "primitive": "other primitives",
}


def tables(results: Mapping[str, Found]) -> str:
    """Returns a table per kind of case and target, in Markdown."""
    groups: dict[tuple[str, str], dict[str, Found]] = {}
    for name, found in results.items():
        kind, target, what = name.split("/", 2)
        groups.setdefault((kind, target), {})[what] = found
    parts = []
    for (kind, target), rows in groups.items():
        columns = list(dict.fromkeys(key for found in rows.values() for key in found.figures))
        parts += [f"### {TARGETS[target].kind}: {_HEADINGS[kind]}", ""]
        parts += [_row("case", *columns, "verdict"), "|" + "---|" * (len(columns) + 2)]
        for what, found in rows.items():
            figures = (found.figures.get(column, "") for column in columns)
            parts.append(_row(what, *figures, "; ".join(found.problems) or "ok"))
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
        f"Compiled for {target.kind} with {target.compiler} and run in the interpreter; "
        f"not run on {target.kind}."
    )


def document(text: str, results: Mapping[str, Found]) -> str:
    """Returns `text` with the tables between its two marks."""
    head, rest = text.split(_BEGIN)
    tail = rest.split(_END)[1]
    names = dict.fromkeys(name.split("/")[1] for name in results)
    said = "\n".join(f"- {wording(name)}" for name in names)
    return f"{head}{_BEGIN}\n{said}\n\n{tables(results)}\n{_END}{tail}"
