"""A backend is chosen by platform, named when it is second best, and refused when it is absent."""

import logging

import pytest

from pallas_kernels.dispatch import Backend, backend_for


def test_cpu_takes_xla_without_a_word(caplog):
    with caplog.at_level(logging.WARNING):
        assert backend_for("cpu") is Backend.XLA
    assert not caplog.records


@pytest.mark.parametrize(("platform", "native"), [("tpu", "mosaic_tpu"), ("gpu", "mosaic_gpu")])
def test_auto_names_the_kernels_that_an_accelerator_lacks(platform, native, caplog):
    with caplog.at_level(logging.WARNING):
        assert backend_for(platform) is Backend.XLA
    assert native in caplog.text


def test_xla_can_be_asked_for_anywhere():
    assert {backend_for(p, "xla") for p in ("cpu", "tpu", "gpu", "cuda")} == {Backend.XLA}


@pytest.mark.parametrize(
    ("platform", "requested", "message"),
    [
        ("tpu", "mosaic_tpu", "mosaic_tpu.*not built"),
        ("cpu", "mosaic_gpu", "mosaic_gpu.*does not run on"),
        ("cpu", "triton", "'triton' is unknown"),
        ("abacus", "auto", "platform='abacus' is unknown"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(platform, requested, message):
    with pytest.raises(ValueError, match=message):
        backend_for(platform, requested)
