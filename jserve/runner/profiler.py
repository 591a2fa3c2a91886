"""Records what the device and the host do for a while. Knows a folder and jax's profiler: no
requests, no clock.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import jax

from jserve.errors import ConfigError


class Profiler:
    """Writes each profile into a folder of its own, below `folder`. One runs at a time.

    Raises:
      ConfigError: there is no such folder, and none can be made.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder).expanduser()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--profile_dir={folder} cannot be made ({error.strerror}); choose another folder"
            ) from error

    def start(self) -> str:
        """Begins a profile, and returns the folder where it will be."""
        folder = str(self._folder / datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f"))
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # it would slow the engine's own thread by much
        jax.profiler.start_trace(folder, profiler_options=options)
        return folder

    def stop(self) -> None:
        """Ends the profile and writes it, which may take seconds."""
        jax.profiler.stop_trace()
