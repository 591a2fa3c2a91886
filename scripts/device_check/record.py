"""What the parts of the check found, one JSON object a line, so that a part that is stopped keeps
what it had. Knows files and names; standard library only."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Record:
    """Appends the results of one part to its file."""

    def __init__(self, path: Path, part: str) -> None:
        self._path, self._part = path, part

    def add(self, name: str, **figures: Any) -> None:
        line = {"part": self._part, "name": name, **figures}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"  {name}: " + ", ".join(f"{k}={_shown(v)}" for k, v in figures.items()), flush=True)

    def skip(self, name: str, why: str) -> None:
        self.add(name, skipped=why)

    @contextmanager
    def guard(self, name: str) -> Iterator[None]:
        """Records what goes wrong inside under `name`, and lets the part go on. What is missing on
        this machine is a skip, all else an error."""
        try:
            yield
        except (ImportError, NotImplementedError) as error:
            self.skip(name, f"{type(error).__name__}: {_first_line(error)}")
        except Exception as error:
            self.add(name, error=f"{type(error).__name__}: {_first_line(error)}")
            traceback.print_exc()


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a record; a last one that was cut off is left out."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:300]


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
