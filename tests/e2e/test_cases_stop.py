"""Fault reports about stop conditions and special ids, on the real engine."""

from __future__ import annotations

import pytest

from jserve.errors import InvalidRequest
from jserve.llm import LLM
from jserve.messages import GenerateRequest
from tests.e2e.chain_model import VOCAB
from tests.e2e.real_engine import (
    END_OF_TURN,
    EOS,
    arranged,
    assert_balanced,
    generate,
    greedy,
    model,
    serving_real,
)

BOTH = pytest.mark.parametrize("overlap", [True, False])


@pytest.fixture
def engine():
    engine = arranged("chain")
    yield engine
    assert_balanced(engine)


def completion(engine, prompt, params):
    return generate(engine, [prompt], params)[0].outputs[0]


async def both_ways(engine, prompt, params):
    """The whole and the joined stream over gRPC; they must agree (check C)."""
    request = GenerateRequest(prompt=prompt, sampling=params)
    async with serving_real(engine) as s:
        whole = await s.client.generate(request)
        updates = [u async for u in s.client.stream(request)]
    assert "".join(u.text for u in updates) == whole.text
    assert tuple(i for u in updates for i in u.token_ids) == whole.token_ids
    last = updates[-1]
    assert (last.finish_reason, last.stop_reason) == (whole.finish_reason, whole.stop_reason)
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    return whole, updates


def test_the_chain_model_walks_as_told(engine):
    assert completion(engine, "B", greedy(3)).text == "redgreenblue"
    assert completion(engine, "a", greedy(4)).text == "bcde"


def test_O12_ignore_eos_ignores_every_eos_id_of_the_generation_config(engine):
    first, second = model("chain").ids(*EOS)
    stopped = completion(engine, "A", greedy(10))
    assert stopped.token_ids == [*model("chain").ids("one", "two"), second]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", second)
    assert stopped.text == "onetwo"
    ignored = completion(engine, "A", greedy(10, ignore_eos=True))
    assert ignored.token_ids[2:] == [second, *[first] * 7]
    assert (ignored.finish_reason, ignored.text) == ("length", "onetwo")


@BOTH
def test_O13_O16_min_tokens_holds_back_every_eos_id_stop_id_and_stop_string(overlap):
    engine = arranged("chain", overlap=overlap)
    eos = set(model("chain").ids(*EOS))
    held = completion(engine, "A", greedy(30, min_tokens=8))
    assert len(held.token_ids) >= 8
    assert not eos & set(held.token_ids[:7])
    stops = greedy(9, min_tokens=5, stop=("d",), stop_token_ids=[ord("e")])
    text = completion(engine, "b", stops).text  # "cdefg..." without the stops
    assert text.startswith("cd"), "a stop string before the minimum is text"
    assert "e" not in text[:4], "a stop id may not come before the minimum"


@BOTH
async def test_O08_the_beginning_of_a_stop_string_is_never_sent(overlap):
    params = greedy(8, stop=("DEFGHIJ",))
    whole, updates = await both_ways(arranged("chain", overlap=overlap), "C", params)
    assert (whole.text, whole.finish_reason, whole.stop_reason) == ("ABC", "stop", "DEFGHIJ")
    assert whole.usage.completion_tokens == 4
    assert all("D" not in u.text for u in updates)
    near_miss = greedy(5, stop=("DEXGHXK",))
    whole, _ = await both_ways(arranged("chain", overlap=overlap), "D", near_miss)
    assert (whole.text, whole.finish_reason) == ("ABXDEXGHXJX.KLX", "length")


async def test_O14_the_stop_text_is_left_out_in_completions_and_in_chats():
    whole, _ = await both_ways(arranged("chain"), "0", greedy(20, stop=("7",)))
    assert (whole.text, whole.finish_reason, whole.stop_reason) == ("123456", "stop", "7")
    kept, _ = await both_ways(
        arranged("chain"), "0", greedy(20, stop=("7",), include_stop_str=True)
    )
    assert kept.text == "1234567"
    llm = LLM.from_engine(arranged("chain"))
    chat = [{"role": "user", "content": "count"}]  # rendered it ends with ">": "?@A" come next
    (output,) = llm.chat(chat, greedy(20, stop=("two",)))
    (same,) = llm.generate("user:count;>", greedy(20, stop=("two",)))
    assert output.prompt_token_ids == same.prompt_token_ids
    assert output.outputs == same.outputs
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("?@Aone", "two")


@BOTH
def test_O15_the_text_of_a_special_token_works_as_a_stop_string(overlap):
    engine = arranged("chain", overlap=overlap)
    for skip in (True, False):
        params = greedy(10, stop=(END_OF_TURN,), skip_special_tokens=skip)
        output = completion(engine, "B", params)
        assert (output.text, output.finish_reason) == ("redgreenblue", "stop")
        assert output.stop_reason == END_OF_TURN
        assert len(output.token_ids) == 4, "it went on after the stop"
    assert_balanced(engine)


def test_O03_special_tokens_are_shown_only_when_asked_for(engine):
    hidden = completion(engine, "B", greedy(5))
    shown = completion(engine, "B", greedy(5, skip_special_tokens=False))
    assert hidden.token_ids == shown.token_ids
    assert (hidden.text, shown.text) == ("redgreenblueafter", f"redgreenblue{END_OF_TURN}after")


def test_O07_an_id_that_the_tokenizer_lacks_is_empty_text_and_harms_nobody(engine):
    padded = VOCAB - 1  # followed by itself
    assert engine.tokenizer.token_bytes(padded) == b""
    outputs = generate(engine, [[padded], "a", [padded]], greedy(6, logprobs=2))
    assert [o.outputs[0].text for o in outputs] == ["", "bcdefg", ""]
    assert outputs[0].outputs[0].token_ids == [padded] * 6
    assert outputs[0].outputs[0].finish_reason == "length"
    assert completion(engine, "a", greedy(3)).text == "bcd"


async def test_O02_a_prompt_that_ends_inside_a_character_is_not_repeated():
    prompt = [*b"Hello world ", 0xF0, 0x9F, 0x98]  # the model follows 0x98 by 0x99
    params = greedy(1)
    async with serving_real(arranged("chain")) as s:
        request = GenerateRequest(prompt_token_ids=prompt, sampling=params)
        updates = [u async for u in s.client.stream(request)]
    assert "".join(u.text for u in updates) == b"\xf0\x9f\x98\x99".decode()


def test_an_unknown_stop_setting_is_refused():
    with pytest.raises(InvalidRequest, match="stop has 17 strings"):
        greedy(1, stop=("x",) * 17)
