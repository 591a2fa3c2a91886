"""The TPU kernel inside the real step, interpreted: scheduler, packer, scanned layers and all."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from pallas_kernels.dispatch import Backend
from pallas_kernels.ragged_paged_attention import api
from tests.e2e.paged import PagedModel
from tests.models.reference import reference_model

TOLERANCE = 1e-4


@pytest.fixture
def interpreted(monkeypatch):
    """Makes a step's attention run Mosaic kernels on this CPU, with a v5e's block sizes."""
    attention = partial(api.ragged_paged_attention, interpret=True)

    def call(*args, **settings):
        return attention(*args, **{**settings, "device_kind": "TPU v5 lite"})

    monkeypatch.setattr(api, "ragged_paged_attention", call)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_logits_with_the_tpu_kernel_are_those_of_transformers(interpreted, name):
    """O104 too: chunks of 7 and single tokens meet keys of other lengths."""
    model = reference_model(name)
    paged = PagedModel(
        model.params(stacked=True), model.config,
        page_size=8, loop="scanned", backend=Backend.MOSAIC_TPU,
    )  # fmt: skip
    prompts, num_new = [s.ids for s in model.sequences], [3] * len(model.sequences)
    scheduler = paged.scheduler(chunk=7)
    answers = paged.run(scheduler, prompts, num_new)
    for answer, sequence in zip(answers, model.sequences, strict=True):
        n = len(sequence.ids)
        assert np.abs(answer.logits[:n] - sequence.logits).max() < TOLERANCE
    again = paged.run(scheduler, prompts, num_new)
    assert [a.token_ids for a in again] == [a.token_ids for a in answers]
    assert any(a.num_cached_tokens for a in again), "nothing came from the prefix cache"
