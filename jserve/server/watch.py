"""Says when files have changed. Knows names and times, not what is in them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

LOOK_EVERY_S = 1.0


class Watch:
    """Compares files with what they were; looks at them every `LOOK_EVERY_S` seconds at most."""

    def __init__(self, paths: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._paths = paths
        self._clock = clock
        self._seen = self._look()
        self._looked_at = clock()

    def has_changed(self) -> bool:
        """Whether any of them is another one, or of another time or size, than when last asked."""
        if self._clock() < self._looked_at + LOOK_EVERY_S:
            return False
        self._looked_at = self._clock()
        before, self._seen = self._seen, self._look()
        return before != self._seen

    def _look(self) -> list[tuple[int, int, int] | None]:
        return [_signature(path) for path in self._paths]


def _signature(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)  # follows links: Kubernetes swaps those of a mounted secret
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
