"""Writes one self-contained HTML page: figures in cards, tables, pictures. Knows HTML: no numbers'
meaning, no files that it would have to load."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --paper: #ffffff;
  --card: #f6f8fa; --line: #d1d9e0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --paper: #0d1117;
  --card: #161b22; --line: #30363d; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 76rem; color: var(--ink);
  background: var(--paper); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2.25rem 0 .75rem; }
p.about { color: var(--soft); margin: .25rem 0 1.5rem; overflow-wrap: anywhere; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .75rem; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: .7rem .9rem; }
.card span { display: block; color: var(--soft); font-size: .8rem; }
.card b { font-size: 1.25rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: .35rem .75rem; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th { color: var(--soft); font-weight: 500; font-size: .85rem; }
figure { margin: 0; } svg { height: auto; display: block; } svg text { font-family: inherit; }
details { margin-top: 2.5rem; } summary { cursor: pointer; color: var(--soft); }
pre { overflow-x: auto; background: var(--card); padding: 1rem; border-radius: 8px;
  font-size: .8rem; }
"""

Table = Sequence[Sequence[str]]  # the header first


def write_page(
    path: str,
    title: str,
    about: str,
    *,
    cards: Mapping[str, str],
    tables: Mapping[str, Table],
    pictures: Mapping[str, str],
    data: Mapping[str, Any],
) -> None:
    """Writes the page. `pictures` are SVG elements by heading; `data` is shown as JSON."""
    parts = [f"<h1>{escape(title)}</h1><p class=about>{escape(about)}</p><div class=cards>"]
    parts += [
        f"<div class=card><span>{escape(name)}</span><b>{escape(value)}</b></div>"
        for name, value in cards.items()
    ]
    parts.append("</div>")
    for heading, table in tables.items():
        parts.append(f"<h2>{escape(heading)}</h2><div class=scroll>{_table(table)}</div>")
    for heading, svg in pictures.items():
        parts.append(f"<h2>{escape(heading)}</h2><figure>{svg}</figure>")
    shown = escape(json.dumps(data, indent=2))
    parts.append(f"<details><summary>All figures as JSON</summary><pre>{shown}</pre></details>")
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body>{''.join(parts)}</body></html>\n"
    )
    Path(path).write_text(page, encoding="utf-8")


def _table(table: Table) -> str:
    header, *rows = table
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
