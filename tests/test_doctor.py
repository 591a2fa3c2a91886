"""The prompt-template doctor: what could have hit, what did, what stands in the way."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import uuid
from pathlib import Path

import numpy as np
import pytest

from jserve.doctor import possible_hit_tokens, report
from jserve.doctor.codec import IdsOnly, make_codec
from jserve.doctor.kinds import kind_of
from jserve.doctor.prompt_log import read_log
from jserve.doctor.report import diagnose, report_text
from jserve.doctor.shingles import SharedText, shingle_hashes
from jserve.errors import ConfigError
from scheduler.config import SchedulerConfig
from scheduler.kv_events import token_bytes
from scheduler.page_pool import PagePool
from scheduler.prefix_cache import PrefixCache
from scheduler.request import Request, SamplingView
from scheduler.scheduler import Scheduler

ROOT = Path(__file__).parents[1]
PAGE = 16
STATIC = " ".join(f"rule{i} says that case{i} is handled by desk{i}." for i in range(60))
WORDS = "what is the state of my order now then".split()  # noqa: SIM905
draw = random.Random(11)
QUESTIONS = [" ".join([*draw.choices(WORDS, k=20), f"q{i}"]) for i in range(40)]


def report_of(tmp_path: Path, prompts, tenant=lambda i: "", **options) -> dict:
    path = tmp_path / "log.jsonl"
    lines = [
        json.dumps({"prompt": prompt, "arrival_s": i, "tenant": tenant(i)})
        for i, prompt in enumerate(prompts)
    ]
    path.write_text("\n".join(lines) + "\n")
    codec = make_codec("whitespace", "", "")
    return diagnose(read_log(str(path), codec), codec.decode, PAGE, **options)


def with_request_ids(questions) -> list[str]:
    rng = random.Random(1)
    ids = [uuid.UUID(int=rng.getrandbits(128), version=4) for _ in questions]
    return [f"Request {i}\n{STATIC}\n{q}" for i, q in zip(ids, questions, strict=True)]


def report_on(path: Path, lines, codec=None) -> dict:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    codec = codec or make_codec("whitespace", "", "")
    return diagnose(read_log(str(path), codec), codec.decode, PAGE)


def test_example_f_a_request_id_on_top_hits_nothing_and_is_named(tmp_path):
    rng = random.Random(1)
    ids = [uuid.UUID(int=rng.getrandbits(128), version=4) for _ in QUESTIONS]
    prompts = [f"Request {i}\n{STATIC}\n{q}" for i, q in zip(ids, QUESTIONS, strict=True)]
    report = report_of(tmp_path, prompts)
    assert report["could_hit"]["tokens"] == 0
    (template,) = report["templates"]
    assert template["kind"] == "request id (UUID)"
    assert template["positions"]["p50"] == 1  # the second word
    assert template["num_requests"] >= len(prompts) - 1, "the first has nobody to share with"
    static_share = len(STATIC.split()) / len(prompts[0].split())
    assert report["reordered"]["share"] == pytest.approx(static_share, abs=0.1)
    assert any(str(ids[1])[:8] in example for example in template["examples"])
    text = report_text(report)
    assert "request id (UUID) at token 1" in text
    assert "Move this (request id (UUID)) behind the text that all prompts have" in text


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (lambda i: f"2026-11-30T05:{i:02}:17Z", "timestamp"),
        (
            lambda i: f"{['Ada', 'Bob', 'Eve', 'Max', 'Zoe'][i % 5]} {'ABCDEFGH'[i // 5]}abel",
            "name",
        ),
        (lambda i: str(1000 + 7 * i), "number or counter"),
    ],
)
def test_a_value_in_the_second_line_is_found_and_told_what_it_is(tmp_path, value, kind):
    head = "You are the helpful assistant of a shop."
    prompts = [
        f"{head}\nNow: {value(i)} |\n{STATIC}\n{question}" for i, question in enumerate(QUESTIONS)
    ]
    report = report_of(tmp_path, prompts)
    assert report["templates"][0]["kind"] == kind
    assert report["templates"][0]["positions"]["p50"] >= len(head.split())
    assert report["reordered"]["share"] > 0.8 > 0.2 > report["could_hit"]["share"]


def test_documents_in_varying_order_are_told_from_values(tmp_path):
    documents = [" ".join(f"d{d}w{i}" for i in range(100)) for d in range(4)]
    rng = random.Random(2)
    prompts = [" ".join([*rng.sample(documents, 4), question]) for question in QUESTIONS]
    report = report_of(tmp_path, prompts)
    assert report["templates"], "their order is worth a complaint"
    assert report["templates"][0]["kind"] == "shared texts in varying order"
    assert report["reordered"]["share"] > report["could_hit"]["share"]


def test_a_template_with_its_static_part_first_gets_no_complaint(tmp_path):
    report = report_of(tmp_path, [f"{STATIC}\n{question}" for question in QUESTIONS])
    assert report["templates"] == []
    assert report["could_hit"]["share"] > 0.8
    assert "Nothing to complain about" in report_text(report)


def test_tenants_share_nothing_with_each_other(tmp_path):
    prompts = [f"{STATIC}\n{question}" for question in QUESTIONS]
    one = report_of(tmp_path, prompts)
    each = report_of(tmp_path, prompts, tenant=lambda i: f"tenant{i}")
    assert each["could_hit"]["tokens"] == 0 < one["could_hit"]["tokens"]
    assert each["templates"] == [], "no order of a template would share across tenants"


def test_one_template_of_many_tenants_is_told_once(tmp_path):
    found = report_of(tmp_path, with_request_ids(QUESTIONS), tenant=lambda i: "ab"[i % 2])
    (template,) = found["templates"]
    assert (template["num_requests"], template["num_tenants"]) == (len(QUESTIONS), 2)
    static_pages = len(STATIC.split()) // PAGE
    assert template["reordered"]["tokens"] == (len(QUESTIONS) - 2) * static_pages * PAGE


def test_each_template_of_a_mixed_log_is_judged_by_itself(tmp_path):
    documents = [" ".join(f"d{d}w{i}" for i in range(100)) for d in range(4)]
    rng = random.Random(2)
    prompts = []
    for i, with_id in enumerate(with_request_ids(QUESTIONS)):
        prompts += [with_id, f"{'Be kind. ' * 60}{i}"]
        prompts.append(" ".join([*rng.sample(documents, 4), f"{i}"]))
    by_id, by_order = report_of(tmp_path, prompts)["templates"]
    assert (by_id["kind"], by_id["num_requests"]) == ("request id (UUID)", len(QUESTIONS))
    assert by_order["kind"] == "shared texts in varying order"


def test_what_is_promised_is_what_reordering_gives(tmp_path):
    promised = report_of(tmp_path, with_request_ids(QUESTIONS))["reordered"]["tokens"]
    moved = [f"{STATIC}\n{question}" for question in QUESTIONS]
    assert promised == report_of(tmp_path, moved)["could_hit"]["tokens"]


def test_only_the_latest_prompts_are_judged_where_there_are_too_many(tmp_path, monkeypatch):
    prompts = with_request_ids(QUESTIONS)
    monkeypatch.setattr(report, "MAX_TOKENS", 6 * len(prompts[0].split()))
    found = report_of(tmp_path, prompts)
    assert found["judged"]["num_requests"] == found["templates"][0]["num_requests"] == 6
    assert "in the latest 6 requests" in report_text(found)


@pytest.mark.parametrize("tokenizer", ["bytes", "model"])
def test_a_value_is_read_whole_whatever_the_tokens_are(tmp_path, tokenizer, smollm2_gguf):
    codec = make_codec(tokenizer, str(smollm2_gguf), "")
    prompts = with_request_ids(QUESTIONS[:6])
    lines = [{"messages": [{"role": "user", "content": prompt}]} for prompt in prompts]
    (template,) = report_on(tmp_path / "log.jsonl", lines, codec)["templates"]
    assert template["kind"] == "request id (UUID)"
    before, _, rest = template["examples"][0].partition("[[")
    assert before.endswith(("user: Request ", "user\nRequest "))
    assert uuid.UUID(rest.partition("]]")[0].strip())


def test_a_bounded_cache_holds_less_and_what_did_hit_is_taken_from_the_log(tmp_path):
    prompts = [f"{topic} {STATIC}" for _ in range(3) for topic in ("a", "b", "c")]
    whole = report_of(tmp_path, prompts)["could_hit"]["tokens"]
    small = report_of(tmp_path, prompts, num_pages=1 + 40)
    assert small["could_hit"]["tokens"] == whole
    assert small["could_hit_bounded"]["tokens"] < whole
    path = tmp_path / "served.jsonl"
    path.write_text('{"prompt_tokens": 100, "cached_tokens": 48, "output_tokens": 3}\n')
    codec = make_codec("whitespace", "", "")
    report = diagnose(read_log(str(path), codec), codec.decode, PAGE)
    assert report["did_hit"] == {"tokens": 48, "share": 0.48}
    assert "keeps no prompts" in report_text(report)


@pytest.mark.parametrize("seed", range(5))
def test_possible_hits_are_those_of_the_engines_own_cache(seed):
    rng = np.random.default_rng(seed)
    prompts = []
    for _ in range(30):
        family, length = int(rng.integers(3)), int(rng.integers(1, 120))
        ids = np.arange(length, dtype=np.int32) + 1000 * family
        if rng.random() < 0.5:
            ids[int(rng.integers(length)) :] += 500
        prompts.append((f"t{family % 2}", ids))
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=1,
            max_num_batched_tokens=256,
            prefill_chunk=256,
            page_size=PAGE,
            num_pages=2000,
            max_model_len=256,
        )
    )
    hits = []
    for i, (tenant, ids) in enumerate(prompts):
        keys = (("tenant", tenant),)
        request = Request(str(i), ids, SamplingView(1), arrival_time=float(i), cache_keys=keys)
        scheduler.add(request)
        plan = scheduler.schedule(float(i))
        scheduler.update(plan, [0])
        hits.append(request.num_cached_tokens)
    assert list(possible_hit_tokens(prompts, PAGE)) == hits
    assert sum(hits) > 0


@pytest.mark.parametrize("num_pages", [12, 25, 60])
def test_possible_hits_of_a_bounded_cache_are_those_of_the_engines_own(num_pages):
    rng = np.random.default_rng(0)
    cache, page_size = PrefixCache(PagePool(num_pages), 4), 4
    prompts, hits = [], []
    for _ in range(500):
        tenant = str(rng.integers(2))
        ids = rng.integers(0, 2, 1 + 2 * rng.integers(20)).tolist()
        prompts.append((tenant, ids))
        tokens = token_bytes(ids)
        node, held = cache.acquire((("tenant", tenant),), tokens, (len(ids) - 1) // page_size)
        hits.append(page_size * len(held))
        fresh = cache.allocate(len(ids) // page_size - len(held))
        node, _ = cache.extend(node, tokens, len(held), fresh)
        cache.release(node)
    assert list(possible_hit_tokens(prompts, page_size, num_pages)) == hits
    assert 0 < sum(hits) < sum(possible_hit_tokens(prompts, page_size))


def test_a_prompt_seen_before_still_computes_one_token():
    ids = list(range(8))
    assert list(possible_hit_tokens([("", ids), ("", ids), ("", [*ids, 8])], 4)) == [0, 4, 8]


def test_the_same_text_has_the_same_shingles_wherever_it_stands():
    rng = np.random.default_rng(0)
    text, before = rng.integers(0, 100, 50), rng.integers(0, 100, 7)
    assert set(shingle_hashes(text, 8)) <= set(shingle_hashes(np.append(before, text), 8))
    twice = shingle_hashes(np.concatenate([text, text]), 8)
    assert len(set(twice)) == len(twice)
    assert len(shingle_hashes(text[:7], 8)) == 0


def test_shared_text_counts_the_prompts_of_one_tenant_that_have_it():
    rng = np.random.default_rng(0)
    text, own = rng.integers(0, 1000, 20), [rng.integers(0, 1000, 5) for _ in range(3)]
    shared = SharedText([("a", np.concatenate([ids, text])) for ids in own] + [("b", text)], 8)
    for index in range(3):
        counts, first = shared.of(index)
        assert counts.tolist() == [1] * 5 + [3] * 20
        assert first[:5].tolist() == list(range(5))
        assert np.all(np.diff(first[5:]) == 1)
        assert np.all((first[5:] < 0) == (index > 0)), "the first prompt has it first"
    assert shared.of(3)[0].tolist() == [1] * 20


def test_judging_grows_with_the_tokens_and_not_with_the_pairs():
    """Twice the prompts may not take four times the work; counted in calls, not in seconds."""
    num_calls = []
    codec = make_codec("whitespace", "", "")
    for questions in (QUESTIONS * 4, QUESTIONS * 8):
        prompts = [("", np.array(codec.encode(p))) for p in with_request_ids(questions)]
        calls = []
        sys.setprofile(lambda frame, event, argument, calls=calls: calls.append(event))
        try:
            report._judge(prompts, codec.decode, PAGE)
        finally:
            sys.setprofile(None)
        num_calls.append(len(calls))
    assert num_calls[1] < 2.5 * num_calls[0]


@pytest.mark.parametrize(
    ("before", "span", "after", "kind"),
    [
        ("id ", "550e8400-e29b-41d4-a716-446655440000", " x", "request id (UUID)"),
        ("at 2026-11-30 05:", "12", ":00 go", "timestamp"),
        ("now ", "Nov 30, 2026 10:15 PM", "", "timestamp"),
        ("ts=", "1795982400", "", "timestamp"),
        ("on ", "2026-11-30", " we", "date"),
        ("Date: 2026-11-", "30", "\n", "date"),
        ("It is ", "10:15", " now", "time of day"),
        ("session ", "req_8fK2l19dkz", "\n", "id"),
        ("", f"{uuid.UUID(int=7)}\nat 10:15", "\n", "request id (UUID), time of day"),
        ("Q: ", "in 2026-11-30 " + "so many words " * 20, "", "free text"),
        ("called ", "Zoë O'Brien", ".", "name"),
        ("<1>", "<22><333>", "<4>", "token ids"),
        ("ref ", "0xdeadbeef99", " ok", "hexadecimal id"),
        ("case ", "4711", " of", "number or counter"),
        ("Dear ", "Ada Lovelace", ", hi", "name"),
        ("say ", "the weather is fine today", " end", "free text"),
    ],
)
def test_spellings_are_recognised(before, span, after, kind):
    assert kind_of(before, span, after) == kind


def test_every_kind_of_line_is_read(tmp_path):
    chat = {"messages": [{"role": "user", "content": "one two three"}]}
    batch = {"custom_id": "a", "method": "POST"}
    lines = [
        {"prompt": "one two three"},
        chat,
        batch | {"url": "/v1/completions", "body": {"prompt": "one two three four", "tools": []}},
        batch | {"url": "/v1/chat/completions", "body": chat},
        {"arrival_s": 1.0, "prompt_tokens": 9, "cached_tokens": 4, "ttft_s": None},
        {"arrival_s": 2.0, "prompt_tokens": 3, "prompt_token_ids": [1, 2, 3]},
    ]
    found = report_on(tmp_path / "log.jsonl", lines)
    assert (found["num_requests"], found["num_with_prompt"]) == (6, 5)
    assert found["prompt_tokens"] == 3 + 5 + 4 + 5 + 9 + 3
    assert found["did_hit"] == {"tokens": 4, "share": 4 / 9}


def test_requests_are_taken_in_order_of_arrival_and_not_of_their_ends(tmp_path):
    lines = [
        {"arrival_s": 2.0, "prompt_token_ids": list(range(20))},
        {"arrival_s": 1.0, "prompt_token_ids": list(range(90))},
        {"arrival_s": 3.0, "prompt_token_ids": list(range(60))},
    ]
    assert report_on(tmp_path / "log.jsonl", lines)["could_hit"]["tokens"] == 16 + 48


def test_token_ids_are_judged_without_a_tokenizer(tmp_path):
    rng = np.random.default_rng(0)
    text = rng.integers(0, 1000, 100).tolist()
    lines = [{"prompt_token_ids": rng.integers(0, 1000, 4).tolist() + text} for _ in range(9)]
    (template,) = report_on(tmp_path / "log.jsonl", lines, IdsOnly())["templates"]
    assert template["kind"] == "token ids"
    assert template["examples"][0].startswith("[[<")


def test_bad_lines_are_counted_and_a_useless_log_is_an_error(tmp_path):
    path = tmp_path / "log.jsonl"
    bad = ["nonsense", '{"other": 1}', '{"prompt": [1, "x"]}', '{"prompt": []}', '{"prompt": 7}']
    path.write_text("\n".join(['{"prompt": "a b"}', *bad, '{"prompt_tokens": -1}', ""]))
    codec = make_codec("whitespace", "", "")
    log = read_log(str(path), codec)
    assert (len(log.requests), log.num_skipped) == (1, 6)
    assert ":2:" in log.first_skipped
    path.write_text("nonsense\n")
    with pytest.raises(ConfigError):
        read_log(str(path), codec)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_log(str(tmp_path / "none"), codec)
    path.write_text('{"prompt": "a b"}\n')
    with pytest.raises(ConfigError, match="name what they are tokenised with"):
        read_log(str(path), make_codec("model", "", ""))


def test_the_script_prints_a_report_and_writes_it_as_json(tmp_path):
    path, out = tmp_path / "log.jsonl", tmp_path / "report.json"
    lines = [json.dumps({"prompt": f"n{i} {STATIC}", "arrival_s": i}) for i in range(10)]
    path.write_text("\n".join(lines))
    command = [sys.executable, str(ROOT / "scripts" / "diagnose_prefix_cache.py")]
    done = subprocess.run(
        [*command, f"--log={path}", "--tokenizer=whitespace", f"--json={out}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )
    assert done.returncode == 0, done.stderr
    assert "could hit" in done.stdout
    assert json.loads(out.read_text())["num_requests"] == 10
    failed = subprocess.run([*command, "--log=/nowhere"], capture_output=True, text=True, cwd=ROOT,
                            env={"PYTHONPATH": str(ROOT), "PATH": ""})  # fmt: skip
    assert failed.returncode == 1
    assert "cannot be read" in failed.stderr
