"""Which implementation of a primitive a platform uses. Knows names, not kernels or arrays.

A backend is chosen once, at start-up, and named in the log; one that is asked for and absent is
refused by name. Nothing falls through to another at run time.
"""

from __future__ import annotations

import logging
from enum import Enum

_log = logging.getLogger(__name__)


class Backend(Enum):
    """An implementation of the device primitives; the value is its name in settings."""

    XLA = "xla"
    MOSAIC_TPU = "mosaic_tpu"
    MOSAIC_GPU = "mosaic_gpu"


# What each platform would run at its best, and the backends that exist so far.
_NATIVE = {
    "cpu": Backend.XLA,
    "tpu": Backend.MOSAIC_TPU,
    "gpu": Backend.MOSAIC_GPU,
    "cuda": Backend.MOSAIC_GPU,
}
_AVAILABLE = frozenset({Backend.XLA})


def backend_for(platform: str, requested: str = "auto") -> Backend:
    """Returns the backend to use on `platform` ("cpu", "tpu", "gpu" or "cuda").

    `requested` is "auto" or a Backend's value. "auto" takes the platform's own kernels where they
    exist, else XLA with a warning that names what is missing.

    Raises:
      ValueError: the platform or backend is unknown, the backend is another platform's, or it is
        not built.
    """
    if platform not in _NATIVE:
        raise ValueError(f"{platform=} is unknown; use one of {sorted(_NATIVE)}")
    native = _NATIVE[platform]
    if requested == "auto":
        if native in _AVAILABLE:
            return native
        _log.warning(
            "attention backend %s for %s is not built yet; using %s, which is slower",
            native.value, platform, Backend.XLA.value,
        )  # fmt: skip
        return Backend.XLA
    try:
        backend = Backend(requested)
    except ValueError:
        names = ["auto", *(b.value for b in Backend)]
        raise ValueError(f"backend {requested!r} is unknown; use one of {names}") from None
    if backend not in (native, Backend.XLA):
        raise ValueError(f"backend {requested!r} does not run on {platform=}; use auto or xla")
    if backend not in _AVAILABLE:
        raise ValueError(f"backend {requested!r} is not built yet; use auto or xla")
    return backend
