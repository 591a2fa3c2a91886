"""Which implementation of a primitive a platform uses. Knows names, not kernels or arrays.

A backend is chosen once, at start-up, and named in the log; one that does not fit is refused by
name. Nothing falls through to another, at start-up or at run time.
"""

from __future__ import annotations

from enum import Enum


class Backend(Enum):
    """An implementation of the device primitives; the value is its name in settings."""

    XLA = "xla"
    MOSAIC_TPU = "mosaic_tpu"
    MOSAIC_GPU = "mosaic_gpu"


_NATIVE = {
    "cpu": Backend.XLA,
    "tpu": Backend.MOSAIC_TPU,
    "gpu": Backend.MOSAIC_GPU,
    "cuda": Backend.MOSAIC_GPU,
}


def backend_for(platform: str, requested: str = "auto") -> Backend:
    """Returns the backend to use on `platform` ("cpu", "tpu", "gpu" or "cuda").

    `requested` is "auto", which takes the platform's own kernels, or a Backend's value.

    Raises:
      ValueError: the platform or backend is unknown, or the backend is another platform's.
    """
    if platform not in _NATIVE:
        raise ValueError(f"{platform=} is unknown; use one of {sorted(_NATIVE)}")
    native = _NATIVE[platform]
    if requested == "auto":
        return native
    try:
        backend = Backend(requested)
    except ValueError:
        names = ["auto", *(b.value for b in Backend)]
        raise ValueError(f"backend {requested!r} is unknown; use one of {names}") from None
    if backend not in (native, Backend.XLA):
        raise ValueError(f"backend {requested!r} does not run on {platform=}; use auto or xla")
    return backend
