"""Readers of recorded and drawn load."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import numpy as np
import pytest

from jserve.bench.workload import Lengths
from jserve.errors import ConfigError
from jserve.sim.prompts import UniquePrompts, from_blocks
from jserve.sim.synthetic import Kind, Mix, parse_kinds, parse_tenants, synthetic
from jserve.sim.traces import read_trace

AZURE_2023 = """TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:17:03.9799600,4808,10\r
2023-11-16 18:17:04.0319600,3180,8\r
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01+00:00,2399,0
2024-05-10 00:00:02.509930+00:00,76,15
"""
MOONCAKE = """{"timestamp": 0, "input_length": 700, "output_length": 500, "hash_ids": [0, 1]}
{"timestamp": 3052, "input_length": 1100, "output_length": 26, "hash_ids": [0, 2, 3]}
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118.5,GPT-4,417,276,693,API log
"""


def written(tmp_path, content, name="trace"):
    path = tmp_path / name
    path.write_text(content, newline="")
    return str(path)


def figures(requests):
    return [(r.arrival_time, r.num_prompt_tokens, r.sampling.max_tokens) for r in requests]


def num_shared(one, other):
    pairs = itertools.takewhile(
        lambda pair: pair[0] == pair[1],
        zip(one.prompt_token_ids, other.prompt_token_ids, strict=False),
    )
    return len(list(pairs))


# ---- public traces ----


def test_azure_traces_of_both_years_are_read(tmp_path):
    old = list(read_trace(written(tmp_path, AZURE_2023)))
    assert figures(old) == [(0.0, 4808, 10), (pytest.approx(0.052), 3180, 8)]
    skipped = Counter()
    new = list(read_trace(written(tmp_path, AZURE_2024), "azure", skipped))
    assert figures(new) == [(0.0, 2162, 5), (pytest.approx(2.5), 76, 15)]
    assert sum(skipped.values()) == 1


def test_mooncake_prompts_with_equal_leading_hash_ids_begin_alike(tmp_path):
    first, second = read_trace(written(tmp_path, MOONCAKE))
    assert figures([first, second]) == [(0.0, 700, 500), (3.052, 1100, 26)]
    assert num_shared(first, second) == 512


def test_failed_requests_of_burstgpt_are_skipped_and_counted(tmp_path):
    skipped = Counter()
    requests = list(read_trace(written(tmp_path, BURSTGPT), skipped=skipped))
    assert figures(requests) == [(0.0, 472, 18), (113.5, 417, 276)]
    assert list(skipped.values()) == [1]


def test_rows_that_are_a_little_out_of_order_are_sorted(tmp_path):
    rows = AZURE_2024.splitlines(keepends=True)
    path = written(tmp_path, rows[0] + rows[3] + rows[1])
    assert [r.arrival_time for r in read_trace(path)] == [0.0, pytest.approx(2.5)]


def test_a_trace_that_is_far_out_of_order_is_refused_with_the_remedy(tmp_path):
    rows = "".join(f"{time},ChatGPT,1,1,2,x\n" for time in [*range(10_000, 20_000), 3])
    path = written(tmp_path, BURSTGPT.splitlines(keepends=True)[0] + rows)
    with pytest.raises(ConfigError, match=r"line 10002.*sort the file"):
        list(read_trace(path))


# ---- our own log ----


def test_our_log_is_read_in_order_of_arrival_although_it_is_written_as_requests_end(tmp_path):
    lines = [
        {"arrival_s": 1700.5, "prompt_tokens": 9, "output_tokens": 3, "tenant": "a"},
        {"arrival_s": 1700.0, "prompt_tokens": 5, "output_tokens": 90, "request_class": "batch"},
        {"arrival_s": 1701.0, "prompt_tokens": 7, "output_tokens": 0, "finish_reason": "abort"},
        {"arrival_s": 1702.0, "prompt_tokens": 3, "output_tokens": 2, "priority": -4}
        | {"prompt_token_ids": [11, 12, 13]},
    ]
    skipped = Counter()
    text = "\n".join(map(json.dumps, lines)) + "\n"
    requests = list(read_trace(written(tmp_path, text), skipped=skipped))
    assert figures(requests) == [(0.0, 5, 90), (0.5, 9, 3), (2.0, 3, 2)]
    assert [r.request_class for r in requests] == ["batch", "", ""]
    assert requests[1].tenant == "a"
    assert requests[1].cache_keys == (("tenant", "a"),)
    assert requests[2].priority == -4
    assert list(requests[2].prompt_token_ids) == [11, 12, 13]
    assert sum(skipped.values()) == 1


# ---- what is wrong is named ----


@pytest.mark.parametrize(
    ("content", "kind", "why"),
    [
        ("hello\n", "auto", r"trace, line 1: 'hello' begins no known trace.*--trace_format"),
        ("a,b\n1,2\n", "azure", r"trace, line 1: the header lacks TIMESTAMP"),
        (AZURE_2023 + "yesterday,1,2\n", "auto", r"trace, line 4: .*yesterday.*remove the line"),
        (AZURE_2023 + "2023-11-16 18:17:05,1\n", "auto", r"trace, line 4: .*2 columns"),
        (BURSTGPT + "nan,x,1,1,2,y\n", "auto", r"trace, line 5: .*time nan"),
        (MOONCAKE + "{\n", "auto", r"trace, line 3: a bad record"),
        (MOONCAKE + "7\n", "auto", r"trace, line 3: .*not a JSON object"),
        (MOONCAKE.replace("[0, 2, 3]", "[0]"), "auto", r"line 2: .*1 hash_ids of 512 tokens"),
        ('{"arrival_s": 1, "output_tokens": 1}\n', "auto", r"line 1: .*prompt_tokens"),
    ],
)
def test_a_bad_line_is_named_with_what_to_do(tmp_path, content, kind, why):
    with pytest.raises(ConfigError, match=why):
        list(read_trace(written(tmp_path, content), kind))


def test_a_missing_trace_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read_trace(str(tmp_path / "none")))


# ---- drawn load ----


def a_mix(kinds, **fields):
    fields = {"num_requests": 200, "tenants": {}, "seed": 3} | fields
    return list(synthetic(Mix(kinds=kinds, **fields)))


KIND = Kind(input=Lengths("50:60"), output=Lengths("5"))


def test_equal_seeds_draw_equal_load_and_others_do_not():
    assert figures(a_mix([KIND], rate=5.0)) == figures(a_mix([KIND], rate=5.0))
    assert figures(a_mix([KIND], rate=5.0)) != figures(a_mix([KIND], rate=5.0, seed=4))


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 5.0])
def test_arrivals_keep_their_rate_and_their_gaps_vary_as_burstiness_says(burstiness):
    requests = a_mix([KIND], rate=4.0, burstiness=burstiness, num_requests=4000)
    gaps = np.diff([r.arrival_time for r in requests])
    assert gaps.mean() == pytest.approx(0.25, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.1)


def test_a_mix_draws_its_kinds_tenants_and_lengths_by_their_shares():
    text = "chat:share=3,input=8-16|32;batch:share=1,input=100,output=7,tenant=night"
    requests = a_mix(parse_kinds(text, KIND), tenants=parse_tenants("a:0.9,b:0.1"))
    kinds = Counter(r.request_class for r in requests)
    assert 120 < kinds["chat"] < 180
    assert {r.num_prompt_tokens for r in requests if r.request_class == "batch"} == {100}
    chat = [r for r in requests if r.request_class == "chat"]
    assert {r.num_prompt_tokens for r in chat} <= {*range(8, 17), 32}
    assert {r.sampling.max_tokens for r in chat} == {5}
    tenants = Counter(r.tenant for r in chat)
    assert tenants["a"] > 5 * tenants["b"] > 0
    assert {r.tenant for r in requests if r.request_class == "batch"} == {"night"}


def test_prompts_share_their_prefix_and_nothing_more():
    requests = a_mix([Kind(input=Lengths("50:60"), output=Lengths("5"), prefix=32)])
    assert {num_shared(requests[0], r) for r in requests[1:]} == {32}


def test_prompts_without_a_prefix_share_nothing():
    requests = a_mix([KIND])
    assert len({r.prompt_token_ids[0] for r in requests}) == len(requests)
    assert not np.shares_memory(UniquePrompts().take(5), requests[0].prompt_token_ids)


def test_unique_prompts_take_no_memory_of_their_own():
    unique = UniquePrompts()
    assert np.shares_memory(unique.take(1000), unique.take(1000))


def test_blocks_are_cut_at_the_end_of_the_prompt():
    assert from_blocks([4, 5], 3, 5).tolist() == [2**28 + 4] * 3 + [2**28 + 5] * 2


@pytest.mark.parametrize("text", ["chat:share=0", "chat:speed=3", "chat:input=9-1", "c:prefix=-1"])
def test_a_mix_that_is_not_understood_is_named(text):
    with pytest.raises(ConfigError):
        parse_kinds(text, KIND)


@pytest.mark.parametrize("text", ["a", "a:0", "a:x", "a:1:2"])
def test_tenants_that_are_not_understood_are_named(text):
    with pytest.raises(ConfigError, match="--tenants"):
        parse_tenants(text)
    assert parse_tenants("3") == {"tenant0": 1.0, "tenant1": 1.0, "tenant2": 1.0}
