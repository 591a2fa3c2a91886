"""A backend is chosen by platform, or asked for and refused by name where it does not run."""

import pytest

from pallas_kernels.dispatch import Backend, backend_for


@pytest.mark.parametrize(
    ("platform", "native"),
    [("cpu", "xla"), ("tpu", "mosaic_tpu"), ("gpu", "mosaic_gpu"), ("cuda", "mosaic_gpu")],
)
def test_auto_takes_the_platforms_own_kernels(platform, native):
    assert backend_for(platform) is backend_for(platform, native) is Backend(native)


def test_xla_can_be_asked_for_anywhere():
    assert {backend_for(p, "xla") for p in ("cpu", "tpu", "gpu", "cuda")} == {Backend.XLA}


@pytest.mark.parametrize(
    ("platform", "requested", "message"),
    [
        ("cpu", "mosaic_gpu", "mosaic_gpu.*does not run on"),
        ("cpu", "triton", "'triton' is unknown"),
        ("abacus", "auto", "platform='abacus' is unknown"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(platform, requested, message):
    with pytest.raises(ValueError, match=message):
        backend_for(platform, requested)
