"""Chooses what steps are timed by: plain costs, a fit of a step log, or a roofline. Knows flags and
the scheduler's step-time models."""

from __future__ import annotations

import math
from typing import NamedTuple

from absl import flags

from jserve.errors import ConfigError
from jserve.sim.histogram import Histogram
from jserve.sim.model_size import ModelSize, model_size, read_model_config
from jserve.sim.step_log import StepLog, read_step_log
from pallas_kernels.devices import DEVICES, DeviceSpec
from scheduler.bucket import Bucket, choose_bucket
from scheduler.step_time import FittedStepTime, LinearStepTime, RooflineStepTime, StepTime

DEFAULT_DEVICE, DEFAULT_MODEL = "NVIDIA H200", "llama-3-8b"
LINEAR = {  # of --step_time: argument of LinearStepTime, seconds per unit
    "constant_ms": ("constant_s", 1e-3),
    "per_prefill_token_us": ("per_prefill_token_s", 1e-6),
    "per_decode_row_us": ("per_decode_row_s", 1e-6),
    "per_context_token_us": ("per_context_token_s", 1e-6),
}
ROOFLINE = {  # of --roofline: argument of RooflineStepTime, unit
    **{name: (name, 1.0) for name in ("weight_bytes", "kv_bytes_per_token", "flops_per_token")},
    **{name: (name, 1.0) for name in ("flops_per_pair", "hbm_bytes_per_s", "flop_per_s")},
    "efficiency": ("efficiency", 1.0),
    "overhead_us": ("overhead_s", 1e-6),
}


class Basis(NamedTuple):
    """What steps are timed by, as far as it is known: a step log, a device, a model."""

    log: StepLog | None
    device: DeviceSpec | None
    size: ModelSize | None


def basis_from_flags(values: flags.FlagValues) -> Basis:
    """Opens what the flags name; the default device and model where they name nothing.

    Raises:
      ConfigError: they contradict each other, or name what there is not.
    """
    given = [n for n in ("roofline", "step_time", "fit_step_log") if values[n].value]
    if len(given) > 1:
        raise ConfigError(f"--{' and --'.join(given)} exclude each other; give one")
    is_roofline = given in ([], ["roofline"])
    kind = values.device or (DEFAULT_DEVICE if is_roofline else "")
    if kind and kind not in DEVICES:
        raise ConfigError(f"--device={kind} is none of {', '.join(DEVICES)}")
    model = values.model_config or (DEFAULT_MODEL if is_roofline else "")
    return Basis(
        read_step_log(values.fit_step_log) if values.fit_step_log else None,
        DEVICES.get(kind),
        model_size(read_model_config(model)) if model else None,
    )


def step_time_from_flags(
    values: flags.FlagValues, basis: Basis, buckets: list[Bucket]
) -> tuple[StepTime, str]:
    """Returns the step-time model that the flags choose, and its name for people.

    `buckets` are those that the run needs. Raises ConfigError.
    """
    log, device, size = basis
    if values.step_time:
        costs = _numbers("step_time", values.step_time, LINEAR)
        return LinearStepTime(**costs), f"--step_time={values.step_time}"
    if log:
        return _fitted(log, _all_buckets(log.buckets, buckets))
    assert device, "a roofline has a default device"
    assert size, "a roofline has a default model"
    roofline: dict[str, float] = {
        "weight_bytes": size.weight_bytes,
        "kv_bytes_per_token": size.kv_bytes_per_token,
        "flops_per_token": size.flops_per_token,
        "flops_per_pair": size.flops_per_pair,
        "hbm_bytes_per_s": device.hbm_bytes_per_s,
        "flop_per_s": device.bf16_flop_per_s,
    }
    roofline |= _numbers("roofline", values.roofline, ROOFLINE)
    if not (
        roofline["hbm_bytes_per_s"] and roofline["flop_per_s"] and roofline.get("efficiency", 1)
    ):
        raise ConfigError("--roofline: rates and efficiency must be above 0")
    name = f"roofline of {values.model_config or DEFAULT_MODEL} on {device.kind}"
    if values.roofline:
        name += f" with {values.roofline}"
    return RooflineStepTime(**roofline), name


def _fitted(log: StepLog, buckets: list[Bucket]) -> tuple[StepTime, str]:
    try:
        model = FittedStepTime.fit(log.samples(), buckets)
    except ValueError as error:
        raise ConfigError(f"{log.path}: {error}; log a longer run") from error
    errors = Histogram()
    for shape, seconds in log.samples():
        errors.add(abs(model.predict(shape) / seconds - 1))
    typical = f"off by {100 * errors.percentile(50):.1f} % at the median"
    return model, f"fit of {errors.count} steps of {log.path}, {typical}"


def _all_buckets(logged: list[Bucket], needed: list[Bucket]) -> list[Bucket]:
    """The buckets that were measured, and those that this run needs beyond the largest of them."""
    buckets = list(logged)
    for bucket in needed:
        try:
            choose_bucket(buckets, bucket.num_tokens, bucket.num_rows)
        except AssertionError:
            buckets.append(bucket)
    return sorted(buckets, key=lambda b: (not b.decode_only, b))


def _numbers(flag: str, text: str, names: dict[str, tuple[str, float]]) -> dict[str, float]:
    """Reads "name:number,..." into arguments, each in the unit that its name says."""
    numbers = {}
    for part in filter(None, text.split(",")):
        name, _, number = part.partition(":")
        try:
            argument, unit = names[name.strip()]
            numbers[argument] = float(number) * unit
            if not 0 <= numbers[argument] < math.inf:
                raise ValueError(number)
        except (KeyError, ValueError):
            raise ConfigError(
                f"--{flag}: {part!r} is not understood; use {', '.join(names)}, each with a "
                "number of 0 or more, as in constant_ms:5"
            ) from None
    return numbers
