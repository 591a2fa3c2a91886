"""The sampler and the masks of bad words and minimum lengths against transformers' own processors,
in transformers' own order (data/sampling), and the penalties that only OpenAI defines."""

from __future__ import annotations

import json
from functools import partial

import jax
import numpy as np
import pytest

from jserve.engine.constraint import Constraint
from jserve.runner.sampling import sample
from scheduler.packer import Wants
from tests.conftest import DATA
from tests.runner.sampling_reference import Row, log_softmax, pack

ABOUT = json.loads((DATA / "sampling" / "processors.json").read_text())
ARRAYS = np.load(DATA / "sampling" / "processors.npz")
VOCAB = ARRAYS["logits"].shape[1]
processed_jit = jax.jit(partial(sample, processed_logprobs=True))


def allowed_by(case: dict) -> list[int] | None:
    """Returns the tokens that the host lets come, as the engine finds them."""
    if not case.keys() & {"allowed", "bad_words_ids", "min_new_tokens"}:
        return None
    constraint = Constraint(
        VOCAB,
        allowed_token_ids=case.get("allowed"),
        bad_word_ids=[tuple(ids) for ids in case.get("bad_words_ids", ())],
        min_tokens=case.get("min_new_tokens", 0),
        stop_token_ids=ABOUT["eos"],
    )
    words = np.zeros(-(-VOCAB // 32), np.uint32)
    assert constraint.fill(words, ABOUT["output"], len(ABOUT["output"])) == ""
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB]).tolist()


def row_of(case: dict, logits: np.ndarray) -> Row:
    names = ("top_k", "top_p", "min_p", "repetition_penalty")
    return Row(
        logits,
        temperature=case.get("temperature", 1.0),
        bias={int(i): value for i, value in case.get("sequence_bias", {}).items()},
        allowed=allowed_by(case),
        prompt=ABOUT["prompt"],
        output=ABOUT["output"],
        **{name: case[name] for name in names if name in case},
    )


def distributions(rows: list[Row]) -> np.ndarray:
    """Returns the log-probabilities f64[S, V] that the rows' tokens were drawn from."""
    top = jax.tree.map(np.asarray, processed_jit(*pack(rows, Wants.LOGPROBS))).of_tokens
    found = np.empty(top.top_ids.shape)
    np.put_along_axis(found, top.top_ids, top.top_logprobs, axis=1)
    return found


def test_every_processor_and_their_order_are_those_of_transformers():
    cases = ABOUT["cases"]
    rows = [row_of(*pair) for pair in zip(cases, ARRAYS["logits"], strict=True)]
    for case, found, scores in zip(cases, distributions(rows), ARRAYS["scores"], strict=True):
        np.testing.assert_array_equal(np.isfinite(found), np.isfinite(scores), err_msg=str(case))
        np.testing.assert_allclose(
            found, log_softmax(scores), rtol=1e-6, atol=2e-5, err_msg=str(case)
        )


@pytest.mark.parametrize(("presence", "frequency"), [(1.5, 0.0), (0.0, -0.75), (2.0, 0.5)])
def test_presence_and_frequency_penalties_are_openais_formula(presence, frequency):
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, c the counts of the output alone."""
    logits = ARRAYS["logits"][0]
    prompt, output = ABOUT["prompt"], ABOUT["output"]
    row = Row(
        logits,
        temperature=1.0,
        presence_penalty=presence,
        frequency_penalty=frequency,
        prompt=prompt,
        output=output,
    )
    count = np.bincount(output, minlength=VOCAB)
    expected = log_softmax(logits - count * frequency - (count > 0) * presence)
    np.testing.assert_allclose(distributions([row])[0], expected, rtol=1e-6, atol=2e-5)


def test_o26_prompt_and_output_are_counted_apart():
    """Flat logits: a prompt's token loses by the repetition penalty alone, an output's by all."""
    flat = np.full(VOCAB, 2.0, np.float32)
    settings = {"temperature": 1.0, "prompt": (3, 3)}
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.25}
    only_prompt = Row(flat, **settings, **penalties)
    repeated = Row(flat, **settings, **penalties, repetition_penalty=2.0)
    then_output = Row(flat, **settings, **penalties, repetition_penalty=2.0, output=(3, 3))
    relative = distributions([only_prompt, repeated, then_output])
    relative -= relative[:, [0]]
    np.testing.assert_allclose(relative[:, 3], [0, -1, -1 - 0.5 - 2 * 0.25], atol=2e-6)
    np.testing.assert_allclose(np.delete(relative, 3, axis=1), 0, atol=2e-6)
