"""What one check is and what it found. Knows names and numbers, not how to compile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MIB, GIB = 2**20, 2**30


@dataclass
class Found:
    """Figures of one compiled program, and which bounds it broke."""

    figures: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def expect(self, holds: bool, problem: str) -> None:
        if not holds:
            self.problems.append(problem)


@dataclass(frozen=True)
class Case:
    """One check, made in a child process that is killed after `limit_s`.

    Attributes:
      name: kind/target/what, by which it is asked for.
      run: compiles and judges. What it raises is a problem too.
      quick: whether it is part of the quick subset.
    """

    name: str
    run: Callable[[], Found]
    quick: bool = False
    limit_s: float = 120

    @property
    def kind(self) -> str:
        return self.name.split("/")[0]

    @property
    def target(self) -> str:
        return self.name.split("/")[1]
