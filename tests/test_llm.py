"""The offline Python API over an engine without a model: shapes in, order and errors out."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from jserve.errors import ConfigError, EngineDead, InvalidRequest, JserveError
from jserve.llm import LLM, engine_config
from jserve.messages import Usage
from jserve.sampling_params import SamplingParams
from tests.fake_engine import FakeEngine, answer

FIVE = SamplingParams(max_tokens=5)


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def llm(engine):
    with LLM.from_engine(engine) as llm:
        yield llm


def test_a_text_and_its_token_ids_give_the_same_output(llm):
    (from_text,) = llm.generate("hello", FIVE)
    (from_ids,) = llm.generate([ord(c) for c in "hello"], FIVE)
    assert from_text.prompt == "hello"
    assert from_ids.prompt is None
    assert from_text.prompt_token_ids == from_ids.prompt_token_ids == [ord(c) for c in "hello"]
    assert from_text.outputs == from_ids.outputs
    completion = from_text.outputs[0]
    assert (completion.text, completion.finish_reason) == (answer("hello", 5), "length")
    assert completion.token_ids == [ord(c) for c in completion.text]
    assert completion.logprobs is None


def test_outputs_keep_the_order_of_prompts_of_unequal_length(llm):
    prompts = [f"p{i}" for i in range(20)]
    params = [SamplingParams(max_tokens=1 + i * 7 % 11) for i in range(20)]
    outputs = llm.generate(prompts, params)
    assert [o.prompt for o in outputs] == prompts
    wanted = [answer(p, s.max_tokens) for p, s in zip(prompts, params, strict=True)]
    assert [o.outputs[0].text for o in outputs] == wanted


def test_a_list_may_mix_texts_and_lists_of_token_ids(llm):
    outputs = llm.generate(["ab", [97, 98]], FIVE)
    assert outputs[0].outputs == outputs[1].outputs


def test_more_prompts_than_the_queue_holds_never_overfill_it(llm, engine):
    outputs = llm.generate(["x"] * 50, FIVE)
    assert len(outputs) == 50
    assert engine.max_seen == engine.max_num_seqs + engine.max_queued_requests


def test_metrics_are_in_seconds_and_logprobs_come_one_per_token(llm):
    (output,) = llm.generate("ab", SamplingParams(max_tokens=3, logprobs=2))
    assert output.metrics.ttft_s == 0.002
    assert [p.token_id for p in output.outputs[0].logprobs] == output.outputs[0].token_ids
    assert all(len(p.top) == 2 for p in output.outputs[0].logprobs)


def test_o31_each_choice_comes_once_with_its_own_ending_and_usage_is_their_sum(llm):
    (output,) = llm.generate("abc", SamplingParams(max_tokens=6, n=3, stop="a", logprobs=1))
    assert [c.index for c in output.outputs] == [0, 1, 2]
    assert [c.text for c in output.outputs] == ["cb", "b", ""]
    assert [c.stop_reason for c in output.outputs] == ["a"] * 3
    assert [len(c.logprobs) for c in output.outputs] == [3, 2, 1]
    assert [c.cumulative_logprob for c in output.outputs] == [-1.5, -1.0, -0.5]
    assert output.usage == Usage(prompt_tokens=3, completion_tokens=6, cached_tokens=0)


def test_o31_choices_of_several_prompts_stay_apart(llm):
    outputs = llm.generate(["abc", "xyz", "q"], SamplingParams(max_tokens=4, n=2))
    for output in outputs:
        wanted = [answer(output.prompt, 4, index) for index in (0, 1)]
        assert [c.text for c in output.outputs] == wanted


def test_prompt_logprobs_come_one_per_prompt_token_and_only_where_asked(llm):
    (output,) = llm.generate("abc", SamplingParams(max_tokens=1, prompt_logprobs=2, n=2))
    first, *others = output.prompt_logprobs
    assert first is None
    assert [(p.token_id, p.rank, len(p.top)) for p in others] == [(98, 3, 2), (99, 3, 2)]
    assert llm.generate("abc", FIVE)[0].prompt_logprobs is None


def test_a_choice_that_fails_ends_its_request(llm, engine):
    engine.fail_choice = 1
    with pytest.raises(JserveError, match="not a number"):
        llm.generate("abc", SamplingParams(max_tokens=4, n=3))
    assert not engine.has_work
    assert llm.generate("abc", FIVE)[0].outputs[0].text == answer("abc", 5)


def test_a_stop_string_is_reported_as_the_stop_reason(llm):
    (output,) = llm.generate("abc", SamplingParams(max_tokens=9, stop="b"))
    completion = output.outputs[0]
    assert (completion.text, completion.finish_reason) == ("c", "stop")
    assert completion.stop_reason == "b"


def test_chat_takes_one_conversation_or_a_list_of_them(llm):
    talk = [{"role": "user", "content": "hi"}]
    (one,) = llm.chat(talk, FIVE)
    two = llm.chat([talk, talk], FIVE)
    assert [o.outputs for o in two] == [one.outputs] * 2


def test_chat_hands_tools_and_template_arguments_to_every_conversation(llm, engine):
    talk = [{"role": "user", "content": "hi"}]
    fields = {
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "required",
        "template_args": {"enable_thinking": False},
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    llm.chat([talk, talk], FIVE, **fields)
    for request in engine.added:
        assert {name: getattr(request, name) for name in fields} == fields


@pytest.mark.parametrize("prompts", [[], [[]], "", [""], ["ok", ""], ["ok", []], [[1], None], 7])
def test_O20_an_empty_or_shapeless_prompt_is_refused_and_the_engine_lives(llm, engine, prompts):
    with pytest.raises(InvalidRequest):
        llm.generate(prompts, FIVE)
    assert engine.num_steps == 0
    assert not engine.has_work
    assert llm.generate("ok", FIVE)[0].outputs[0].text == answer("ok", 5)


@pytest.mark.parametrize("messages", [[], [[]], "hi", [["hi"]], None])
def test_O20_empty_or_shapeless_messages_are_refused(llm, messages):
    with pytest.raises(InvalidRequest):
        llm.chat(messages, FIVE)


@pytest.mark.parametrize("length", [64, 640])
def test_O17_an_over_long_prompt_is_refused_by_index_and_limit_before_anything_runs(
    llm, engine, length
):
    with pytest.raises(InvalidRequest, match=r"prompt 2: .*64") as caught:
        llm.generate(["a", "b", "c" * length], FIVE)
    assert "\n" not in str(caught.value)
    assert engine.num_steps == 0
    assert not engine.has_work
    assert len(llm.generate(["a", "b"], FIVE)) == 2


def test_a_bad_prompt_far_beyond_the_queue_is_refused_before_anything_runs_too(llm, engine):
    with pytest.raises(InvalidRequest, match="prompt 30"):
        llm.generate(["x"] * 30 + [[999]], FIVE)
    assert engine.num_steps == 0
    assert not engine.has_work


def test_params_must_match_the_prompts_in_number_and_kind(llm):
    with pytest.raises(InvalidRequest, match="1 params for 2 prompts"):
        llm.generate(["a", "b"], [FIVE])
    with pytest.raises(InvalidRequest, match="params"):
        llm.generate("a", {"max_tokens": 5})


def test_O107_two_threads_on_one_engine_each_get_all_of_their_own(llm):
    results = {}
    gate = threading.Barrier(2)

    def read(name):
        gate.wait()
        prompts = [f"{name}{i}" for i in range(40)]
        results[name] = [(o.prompt, o.outputs[0].text) for o in llm.generate(prompts, FIVE)]

    threads = [threading.Thread(target=read, args=(name,)) for name in ("left", "right")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    for name in ("left", "right"):
        prompts = [f"{name}{i}" for i in range(40)]
        assert results[name] == [(p, answer(p, 5)) for p in prompts]


def test_O107_an_interrupt_aborts_what_is_running():
    def interrupt():
        if engine.num_steps == 3:
            raise KeyboardInterrupt

    engine = FakeEngine(before_step=interrupt)
    llm = LLM.from_engine(engine)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["x"] * 5, FIVE)
    assert not engine.has_work
    llm.close()
    assert engine.closed


def test_a_failed_engine_ends_the_call_with_its_error():
    llm = LLM.from_engine(FakeEngine(fail_after_steps=2))
    with pytest.raises(EngineDead, match="device is lost"):
        llm.generate("x", FIVE)


def test_a_closed_llm_says_so(engine):
    llm = LLM.from_engine(engine)
    llm.close()
    llm.close()
    with pytest.raises(EngineDead, match="closed"):
        llm.generate("x")


def test_flat_settings_reach_their_sections():
    config = engine_config(model="m.gguf", max_num_seqs=8, page_size=16, kv_memory_fraction=0)
    assert (config.model.model, config.scheduler.max_num_seqs) == ("m.gguf", 8)
    assert (config.cache.page_size, config.cache.kv_memory_fraction) == (16, 0.0)


def test_an_unknown_setting_lists_near_ones():
    with pytest.raises(ConfigError, match="max_num_seqs"):
        engine_config(max_num_seq=8)
    for setting in ({"port": 80}, {"access_log": "-"}, {"api_keys": "keys.json"}):
        with pytest.raises(ConfigError, match="unknown engine setting"):
            engine_config(**setting)  # a server's: nothing here would listen
    with pytest.raises(ConfigError, match="must be of type int"):
        engine_config(max_num_seqs="8")


def test_importing_jserve_and_its_offline_api_loads_no_jax():
    code = (
        "import sys, jserve; from jserve import LLM, SamplingParams; import jserve.batch\n"
        "assert 'jax' not in sys.modules and not hasattr(jserve, 'nonsense')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
