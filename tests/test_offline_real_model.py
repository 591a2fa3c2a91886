"""The offline API and batch jobs on the real engine and a real model: same tokens as the goldens,
bad input refused, everything given back. `smollm2_gguf` skips where the file is absent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jserve.batch import BatchOptions, run_batch
from jserve.errors import InvalidRequest
from jserve.llm import LLM
from jserve.sampling_params import SamplingParams

pytestmark = pytest.mark.slow
GOLDEN = Path(__file__).parent / "data" / "golden" / "smollm2_135m.json"
MAX_MODEL_LEN = 512
NUM_TOKENS = 16
CLEAR_GAP = 1e-3  # where the best two logits are closer, either may win
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


def cases():
    everything = json.loads(GOLDEN.read_text())["cases"]
    fitting = [c for c in everything if len(c["prompt_ids"]) + NUM_TOKENS <= MAX_MODEL_LEN]
    return [c for c in fitting if min(c["top1_top2_gap"][:NUM_TOKENS]) > CLEAR_GAP]


@pytest.fixture(scope="module")
def llm(smollm2_gguf):
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_memory_bytes": 64 * 2**20}
    with LLM(model=smollm2_gguf, max_model_len=MAX_MODEL_LEN, **settings) as llm:
        yield llm


@pytest.fixture
def engine(llm):
    yield llm._engine
    stats = llm._engine.stats()
    assert [stats[name] for name in ("running", "waiting", "pages_used")] == [0, 0, 0]


def test_generate_and_chat_give_the_golden_tokens(llm, engine):
    outputs = llm.generate([c["prompt_ids"] for c in cases()], GREEDY)
    for case, output in zip(cases(), outputs, strict=True):
        assert output.outputs[0].token_ids == case["output_ids"][:NUM_TOKENS], case["name"]
    assert all(o.metrics.ttft_s > 0 and o.metrics.e2e_s >= o.metrics.ttft_s for o in outputs)
    texts = [c for c in cases() if c["text"] is not None and c["messages"] is None]
    for case, output in zip(texts, llm.generate([c["text"] for c in texts], GREEDY), strict=True):
        assert output.prompt_token_ids == case["prompt_ids"]
        assert output.outputs[0].token_ids == case["output_ids"][:NUM_TOKENS]
    chats = [c for c in cases() if c["messages"] is not None]
    for case, output in zip(chats, llm.chat([c["messages"] for c in chats], GREEDY), strict=True):
        assert output.prompt_token_ids == case["prompt_ids"]


@pytest.mark.parametrize("length", [MAX_MODEL_LEN, MAX_MODEL_LEN + 1, 10 * MAX_MODEL_LEN])
def test_O17_an_over_long_prompt_names_the_limit_and_a_fitting_one_runs(llm, engine, length):
    with pytest.raises(InvalidRequest, match=rf"prompt 1: .*{MAX_MODEL_LEN}"):
        llm.generate([[7], [7] * length], GREEDY)
    one = SamplingParams(temperature=0, max_tokens=1)
    (output,) = llm.generate([7] * (MAX_MODEL_LEN - 1), one)
    assert len(output.outputs[0].token_ids) == 1


@pytest.mark.parametrize("prompts", ["", [""], [], [[]], [[49152]], [[-1]]])
def test_O20_an_empty_or_impossible_prompt_is_refused(llm, engine, prompts):
    with pytest.raises(InvalidRequest):
        llm.generate(prompts, GREEDY)


def test_O106_a_batch_file_with_bad_lines_is_answered_line_by_line(llm, engine, tmp_path):
    case = cases()[0]
    body = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 1}
    good = {"custom_id": "good", "prompt_token_ids": case["prompt_ids"], **body}
    over_long = {"custom_id": "long", "prompt": "word " * 2 * MAX_MODEL_LEN, **body}
    lines = [json.dumps(good), "{", "", json.dumps(over_long), json.dumps(good)]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(lines) + "\n")
    summary = run_batch(engine, source, target, BatchOptions())
    assert (summary.num_ok, summary.num_errors) == (1, 4)
    records = [json.loads(line) for line in target.read_text().splitlines()]
    assert [r["line"] for r in records] == [1, 2, 3, 4, 5]
    choice = records[0]["response"]["body"]["choices"][0]
    assert choice["token_ids"] == case["output_ids"][:NUM_TOKENS]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert str(MAX_MODEL_LEN) in records[3]["error"]["message"]
