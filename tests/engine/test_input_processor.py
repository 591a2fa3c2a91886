"""The one validation behind every front end: what is refused, in which words, what comes out."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jserve.engine.input_processor import InputProcessor
from jserve.engine.prompt_input import ModelLimits
from jserve.errors import InvalidRequest
from jserve.messages import GenerateRequest
from jserve.sampling_params import SamplingParams
from jserve.text.chat import chat_template_of
from scheduler.config import RequestClass
from tests.engine.tiny import byte_tokenizer

VOCAB = 97
LIMIT = 64
POOL = 40  # tokens that the KV pool holds
HUGE = 10**400  # an integer that no float holds


def why_too_large(num_tokens: int) -> str | None:
    return f"{num_tokens} tokens do not fit" if num_tokens > POOL else None


def make(fits=lambda num_tokens: None, eos: tuple[int, ...] = (1, 2), **rules) -> InputProcessor:
    tokenizer = byte_tokenizer()
    limits = ModelLimits("tiny", VOCAB, LIMIT, eos)
    return InputProcessor(
        tokenizer, chat_template_of(tokenizer), limits, fits, lambda: 100.0, **rules
    )


PROCESSOR = make()


def refused(match: str, processor: InputProcessor = PROCESSOR, **fields) -> None:
    message = GenerateRequest(**({"prompt_token_ids": [5]} | fields))
    with pytest.raises(InvalidRequest, match=match) as caught:
        processor.prepare(message)
    assert "\n" not in str(caught.value)


def test_a_request_carries_its_fields_to_the_scheduler():
    message = GenerateRequest(
        prompt_token_ids=[5, 6],
        request_id="r",
        model="tiny",
        priority=-3,
        tenant="t",
        timeout_s=2.5,
        queue_timeout_s=0.5,
        sampling=SamplingParams(
            temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, seed=11, max_tokens=9, logprobs=3
        ),
    )
    request = PROCESSOR.prepare(message).request
    assert (request.request_id, request.prompt_token_ids) == ("r", [5, 6])
    assert (request.priority, request.tenant) == (-3, "t")
    assert (request.arrival_time, request.deadline) == (100.0, 102.5)
    assert request.queue_deadline == 100.5
    assert request.cache_keys == (("tenant", "t"),)
    view = request.sampling
    assert (view.temperature, view.top_k, view.top_p, view.min_p) == (0.5, 7, 0.9, 0.1)
    assert (view.seed, view.max_tokens, view.num_logprobs) == (11, 9, 3)
    assert view.stop_token_ids == {1, 2}


def test_a_class_adds_its_priority_and_an_unknown_one_is_refused_with_those_known():
    processor = make(classes=(RequestClass(name="chat"), RequestClass(name="bulk", priority=10)))
    message = GenerateRequest(prompt_token_ids=[5], priority=-3, request_class="bulk")
    request = processor.prepare(message).request
    assert (request.request_class, request.priority) == ("bulk", 7)
    assert processor.prepare(GenerateRequest(prompt_token_ids=[5])).request.request_class == ""
    refused("request_class='x' is not known here; use chat or bulk", processor, request_class="x")
    refused("request_class='x'.*none: the engine has no classes", request_class="x")


@pytest.mark.parametrize(
    ("of_engine", "of_request", "expected"),
    [(0.0, None, None), (3.0, None, 103.0), (0.0, 5.0, 105.0), (3.0, 5.0, 103.0), (5.0, 3, 103.0)],
)
def test_the_smaller_queue_timeout_holds(of_engine, of_request, expected):
    message = GenerateRequest(prompt_token_ids=[5], queue_timeout_s=of_request)
    assert make(queue_timeout_s=of_engine).prepare(message).request.queue_deadline == expected


def test_an_authenticated_identity_is_the_tenant_and_the_callers_own_only_divides_its_cache():
    def prepared(**fields):
        return PROCESSOR.prepare(GenerateRequest(prompt_token_ids=[5], **fields)).request

    alice = prepared(identity="alice", tenant="bob")
    assert alice.tenant == "alice"
    assert alice.cache_keys == (("identity", "alice"), ("tenant", "bob"))
    assert prepared(identity="alice").cache_keys == (("identity", "alice"),)
    keys = {prepared(**f).cache_keys for f in ({"identity": "bob"}, {"tenant": "bob"}, {})}
    assert len(keys | {alice.cache_keys}) == 4, "two different callers share a prefix"


def test_ignore_eos_leaves_the_callers_own_stop_ids():
    sampling = SamplingParams(ignore_eos=True, stop_token_ids=(7,))
    message = GenerateRequest(prompt_token_ids=[5], sampling=sampling)
    assert PROCESSOR.prepare(message).request.sampling.stop_token_ids == {7}


def test_equal_64_bit_seeds_fold_to_equal_32_bit_ones_and_none_draws_different_ones():
    def seed(value):
        sampling = SamplingParams(seed=value)
        message = GenerateRequest(prompt_token_ids=[5], sampling=sampling)
        return PROCESSOR.prepare(message).request.sampling.seed

    for value in (0, 1, -1, 2**63, 2**64 - 1, -(2**63)):
        assert seed(value) == seed(value)
        assert 0 <= seed(value) < 2**32
    assert seed(1) != seed(2)
    assert len({seed(None) for _ in range(20)}) > 1


@pytest.mark.parametrize("bad", [VOCAB, -1, 2**40, 1.5, "7", None, True, HUGE])
def test_O21_an_id_that_is_none_names_its_place_and_the_range(bad):
    refused(rf"prompt_token_ids\[1\].*integers from 0 to {VOCAB - 1}", prompt_token_ids=[5, bad, 6])


def test_O21_text_whose_token_the_model_lacks_is_refused_too():
    refused("token id 122, which this model does not have", prompt_token_ids=None, prompt="z!")


def test_ids_of_numpy_are_taken():
    message = GenerateRequest(prompt_token_ids=list(np.array([3, 4], np.int64)))
    ids = PROCESSOR.prepare(message).request.prompt_token_ids
    assert ids == [3, 4]
    assert all(type(i) is int for i in ids)


@pytest.mark.parametrize("ids", ["56", b"56", 7, {5: 6}])
def test_ids_that_are_no_list_are_refused(ids):
    refused("not a list of token ids", prompt_token_ids=ids)


@pytest.mark.parametrize("fields", [{"prompt_token_ids": []}, {"prompt": ""}])
def test_O20_an_empty_prompt_is_refused(fields):
    refused("the prompt is empty; give at least one token", **({"prompt_token_ids": None} | fields))


def test_O20_an_empty_chat_is_refused():
    refused("messages", prompt_token_ids=None, messages=[])


def test_message_fields_that_a_template_might_ignore_are_refused_by_name():
    messages = [{"role": "user", "content": "x"}, {"role": "user", "content": "x", "audio": [[]]}]
    refused(r"messages\[1\].audio is not supported", prompt_token_ids=None, messages=messages)


def test_exactly_one_input_is_given():
    refused("no prompt given; give exactly one", prompt_token_ids=None)
    refused("prompt and prompt_token_ids given", prompt="x")
    refused("prompt is a int, not a text", prompt_token_ids=None, prompt=5)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "remedy"),
    [
        (LIMIT, 1, rf"{LIMIT} tokens.*max_model_len={LIMIT}: use at most {LIMIT - 1}"),
        (LIMIT + 1, 1, rf"max_model_len={LIMIT}"),
        (10 * LIMIT, None, rf"max_model_len={LIMIT}"),
        (LIMIT - 5, 6, r"max_tokens=6 and 59 prompt tokens.*max_tokens of at most 5"),
        (1, 2**31 - 1, r"max_tokens of at most 63"),
    ],
)
def test_O18_what_exceeds_the_models_length_names_the_limit_and_the_remedy(
    num_prompt, max_tokens, remedy
):
    sampling = SamplingParams(max_tokens=max_tokens)
    refused(remedy, prompt_token_ids=[5] * num_prompt, sampling=sampling)


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(LIMIT - 1, 1), (LIMIT - 5, 5), (1, 63)])
def test_O18_what_just_fits_the_models_length_is_taken(num_prompt, max_tokens):
    message = GenerateRequest(
        prompt_token_ids=[5] * num_prompt, sampling=SamplingParams(max_tokens=max_tokens)
    )
    assert PROCESSOR.prepare(message).request.sampling.max_tokens == max_tokens


def test_a_text_that_no_tokenisation_could_make_fit_is_not_even_tokenised(monkeypatch):
    monkeypatch.setattr(PROCESSOR.tokenizer, "encode", lambda text: pytest.fail("it was"))
    refused(
        rf"50000000 characters; max_model_len={LIMIT} tokens hold at most {LIMIT}",
        prompt_token_ids=None,
        prompt="X" * 50_000_000,
    )


def test_no_max_tokens_means_all_that_fit():
    unlimited = SamplingParams(max_tokens=None)
    message = GenerateRequest(prompt_token_ids=[5] * 10, sampling=unlimited)
    assert PROCESSOR.prepare(message).request.sampling.max_tokens == LIMIT - 10
    assert make(why_too_large).prepare(message).request.sampling.max_tokens == POOL - 10


def test_O39_what_the_pool_can_never_hold_is_refused_at_the_door():
    small_pool = make(why_too_large)
    unlimited = SamplingParams(max_tokens=None)
    refused("never run: 46 tokens", small_pool, prompt_token_ids=[5] * 30)
    refused("never run: 41", small_pool, prompt_token_ids=[5] * POOL, sampling=unlimited)


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({"model": "other"}, "model='other' is not served here; use 'tiny'"),
        ({"priority": 1.5}, "priority=1.5 is not an integer"),
        ({"priority": True}, "priority=True is not an integer"),
        ({"priority": 2**31}, "32-bit"),
        ({"tenant": 5}, "tenant must be a string"),
        ({"tenant": "t" * 257}, "at most 256"),
        ({"identity": b"alice"}, "identity must be a string"),
        ({"request_class": ["x"]}, "request_class="),
        ({"request_id": ""}, "request_id must have 1 to 256"),
        ({"request_id": "r" * 257}, "request_id must have 1 to 256"),
        ({"request_id": 5}, "request_id must have 1 to 256"),
        *(
            ({name: value}, f"{name}=.* is not a number of seconds above 0")
            for name in ("timeout_s", "queue_timeout_s")
            for value in (0, -1.0, math.nan, math.inf, HUGE, "5", True)
        ),
    ],
)
def test_a_field_out_of_range_is_refused_by_name(fields, remedy):
    refused(remedy, **fields)


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, HUGE, -HUGE, -0.1, "1", None, 1j])
def test_O28_a_float_that_is_none_is_refused_by_name(name, value):
    with pytest.raises(InvalidRequest, match=rf"{name}=.*; use"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", 1.5),
        ("top_k", -2),
        ("seed", 2**64),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2**31),
        ("max_tokens", math.nan),
        ("max_tokens", True),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", 2_000_000_000),
        ("logprobs", 1.0),
        ("stop", 5),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", 7),
        ("ignore_eos", 1),
        ("skip_special_tokens", "yes"),
    ],
)
def test_a_sampling_field_of_a_wrong_type_or_range_is_refused_by_name(name, value):
    with pytest.raises(InvalidRequest, match=name):
        SamplingParams(**{name: value})


def test_numbers_of_numpy_are_taken_as_plain_ones():
    sampling = SamplingParams(temperature=np.float32(0.5), max_tokens=np.int64(3))
    assert (sampling.temperature, sampling.max_tokens) == (0.5, 3)
    assert (type(sampling.temperature), type(sampling.max_tokens)) == (float, int)
