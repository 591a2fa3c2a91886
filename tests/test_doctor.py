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

from jserve.doctor import possible_hit_tokens
from jserve.doctor.codec import make_codec
from jserve.doctor.kinds import kind_of
from jserve.doctor.prompt_log import read_log
from jserve.doctor.report import diagnose, report_text
from jserve.errors import ConfigError
from scheduler.config import SchedulerConfig
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


@pytest.mark.parametrize(
    ("before", "span", "after", "kind"),
    [
        ("id ", "550e8400-e29b-41d4-a716-446655440000", " x", "request id (UUID)"),
        ("at 2026-11-30 05:", "12", ":00 go", "timestamp"),
        ("on ", "2026-11-30", " we", "date"),
        ("ref ", "0xdeadbeef99", " ok", "hexadecimal id"),
        ("case ", "4711", " of", "number or counter"),
        ("Dear ", "Ada Lovelace", ", hi", "name"),
        ("say ", "the weather is fine today", " end", "free text"),
    ],
)
def test_spellings_are_recognised(before, span, after, kind):
    assert kind_of(before, span, after) == kind


def test_bad_lines_are_counted_and_a_useless_log_is_an_error(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"prompt": "a b"}\nnonsense\n{"other": 1}\n')
    codec = make_codec("whitespace", "", "")
    log = read_log(str(path), codec)
    assert (len(log.requests), log.num_skipped) == (1, 2)
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
