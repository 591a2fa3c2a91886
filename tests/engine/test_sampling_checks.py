"""Settings that a model of this vocabulary or length cannot honour."""

from __future__ import annotations

import pytest

from jserve import sampling_params
from jserve.engine.sampling_checks import check_min_tokens, check_token_ids
from jserve.errors import InvalidRequest
from jserve.sampling_params import SamplingParams
from jserve.structured import GrammarKind, StructuredOutput
from scheduler import packer


@pytest.mark.parametrize("token_id", [100, 191_222, 2**31 - 1])
@pytest.mark.parametrize(
    ("name", "value_of"),
    [
        ("logit_bias", lambda token_id: {token_id: 1.0}),
        ("allowed_token_ids", lambda token_id: (5, token_id)),
        ("bad_words", lambda token_id: ("text", (5, token_id))),
    ],
)
def test_o30_a_token_id_outside_the_vocabulary_is_refused_by_field_and_id(name, value_of, token_id):
    with pytest.raises(InvalidRequest, match=f"^{name} has the token id {token_id}; .* 0 to 99"):
        check_token_ids(SamplingParams(**{name: value_of(token_id)}), 100)
    check_token_ids(SamplingParams(**{name: value_of(99)}), 100)


def test_a_token_id_that_is_biased_twice_is_refused():
    with pytest.raises(InvalidRequest, match="logit_bias names a token id twice"):
        check_token_ids(SamplingParams(logit_bias=((1, 2.0), (1, 3.0))), 100)


def test_min_tokens_above_what_fits_is_refused_with_both_numbers():
    params = SamplingParams(min_tokens=9, max_tokens=None)
    check_min_tokens(params, 9)
    with pytest.raises(InvalidRequest, match="min_tokens=9 is above the 8 tokens"):
        check_min_tokens(params, 8)


@pytest.mark.parametrize(
    "bad", [((1,),), (5,), [(1, 2)], "x", {"a": 1.0}, {1: 1e9}, ((1, float("nan")),)]
)
def test_a_bias_of_another_form_is_an_invalid_request(bad):
    with pytest.raises(InvalidRequest, match="logit_bias"):
        SamplingParams(logit_bias=bad)


def test_a_penalty_that_float32_cannot_hold_is_out_of_range():
    with pytest.raises(InvalidRequest, match=r"repetition_penalty=1e-40 .*0\.01 to 100"):
        SamplingParams(repetition_penalty=1e-40)


def test_stop_ids_that_the_model_lacks_are_refused_by_name():
    with pytest.raises(InvalidRequest, match="stop_token_ids has the token id 1000000"):
        check_token_ids(SamplingParams(stop_token_ids=(1_000_000,)), 384)


def test_a_value_beside_json_object_is_refused():
    with pytest.raises(InvalidRequest, match="json_object takes no value"):
        StructuredOutput(GrammarKind.JSON_OBJECT, "{}")


def test_the_bias_that_may_be_asked_for_is_the_one_that_a_row_has_room_for():
    """Neither module may import the other, so each names it."""
    assert sampling_params.MAX_LOGIT_BIAS == packer.MAX_LOGIT_BIAS
