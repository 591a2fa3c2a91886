"""Log-probabilities of prompts of real text, by two real models: those of transformers in float32,
and near them in int8. The references are tests/data/perplexity, made by
scripts/make_perplexity_reference.py; docs/quantization.md has the figures of the whole text."""

from __future__ import annotations

import json
import math

import pytest

from jserve.llm import LLM
from jserve.sampling_params import SamplingParams
from tests.conftest import DATA

pytestmark = pytest.mark.slow
SCORE = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
SETTINGS = {"max_model_len": 520, "max_num_seqs": 2, "dtype": "float32", "page_size": 16}
# of the mean negative log-probability, in nats; transformers' own rounding is a tenth of the first
MOST_OFF = {("none", "auto"): 2e-5, ("w8a8", "auto"): 0.1, ("none", "int8"): 0.02}
# Two thirds of this model are its embedding, and its activations have larger outliers.
MOST_OFF_OF_GEMMA = MOST_OFF | {("w8a8", "auto"): 0.25}


@pytest.mark.parametrize(("quantization", "kind"), MOST_OFF)
@pytest.mark.parametrize(
    ("fixture", "name"),
    [
        ("smollm2_gguf", "smollm2_135m"),
        pytest.param("gemma3_gguf", "gemma3_270m", marks=pytest.mark.gemma),
    ],
)
def test_real_text_is_as_likely_as_transformers_finds_it(
    request, fixture, name, quantization, kind
):
    reference = json.loads((DATA / "perplexity" / f"{name}.json").read_text())
    windows = reference["ids_of_first_windows"]
    settings = SETTINGS | {"quantization": quantization, "kv_cache_dtype": kind}
    with LLM(model=str(request.getfixturevalue(fixture)), **settings) as llm:
        outputs = llm.generate(windows, SCORE)
    for output, expected in zip(outputs, reference["nll_of_windows"], strict=False):
        assert output.prompt_logprobs[0] is None
        scored = [entry.logprob for entry in output.prompt_logprobs[1:]]
        assert len(scored) == reference["window"] - 1
        off = abs(-math.fsum(scored) / len(scored) - expected)
        most = MOST_OFF_OF_GEMMA if name.startswith("gemma") else MOST_OFF
        assert off < most[quantization, kind]
        if quantization != "none" or kind != "auto":
            assert off > 1e-5  # it was rounded at all
