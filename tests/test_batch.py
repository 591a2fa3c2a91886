"""Offline batch jobs over an engine without a model: every line answered once, whatever happens."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import tracemalloc
from collections import deque
from itertools import cycle

import pytest

from jserve.batch import BatchOptions, Order, run_batch
from jserve.batch import job as batch_job
from jserve.batch import lines as batch_lines
from jserve.batch.main import STOP_NOTICE
from jserve.batch.progress import BatchProgress
from jserve.errors import ConfigError, EngineDead
from tests.fake_engine import FakeEngine, answer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SHORT = {"prompt": "abc", "max_tokens": 4}


def chat_line(custom_id, content="hi", url=CHAT, **body):
    messages = [{"role": "user", "content": content}]
    body = {"messages": messages, "max_tokens": 4, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write_lines(path, lines):
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{t}\n" for t in text))


def read_records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def job(tmp_path):
    """Runs a job over `lines` and returns its summary and records."""

    def run(lines=None, engine=None, should_stop=lambda: False, **options):
        if lines is not None:
            write_lines(job.input, lines)
        engine = engine or FakeEngine()
        summary = run_batch(engine, job.input, job.output, BatchOptions(**options), should_stop)
        assert not engine.has_work
        return summary, read_records(job.output)

    job = run
    job.input, job.output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    return job


def error_of(record):
    assert record["response"] is None
    return record["error"]["message"]


def test_a_chat_line_gets_an_openai_shaped_record(job):
    summary, (record,) = job([chat_line("a", model="fake")], model_name="fake")
    assert (record["line"], record["custom_id"], record["error"]) == (1, "a", None)
    assert record["id"].startswith("batch_req_")
    response = record["response"]
    assert response["status_code"] == 200
    assert response["request_id"]
    body = response["body"]
    assert (body["object"], body["model"]) == ("chat.completion", "fake")
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": answer("user:hi;", 4)}
    assert choice["finish_reason"] == "length"
    assert body["usage"] == {
        "prompt_tokens": 8,
        "completion_tokens": 4,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert (summary.num_ok, summary.prompt_tokens, summary.output_tokens) == (1, 8, 4)


def test_short_lines_take_text_messages_or_token_ids(job):
    _, records = job(
        [
            SHORT,
            {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "custom_id": "m"},
            {"prompt_token_ids": [97, 98], "max_tokens": 3},
        ]
    )
    bodies = [r["response"]["body"] for r in records]
    assert bodies[0]["choices"][0]["text"] == answer("abc", 4)
    assert bodies[1]["choices"][0]["message"]["content"] == answer("user:x;", 2)
    assert records[1]["custom_id"] == "m"
    assert bodies[2]["choices"][0]["token_ids"] == [98, 97, 98]
    assert bodies[2]["prompt_token_ids"] == [97, 98]


def test_logprobs_come_in_the_shape_of_their_endpoint(job):
    completion = {"prompt": "ab", "max_tokens": 2, "logprobs": 1}
    _, records = job([completion, chat_line("c", logprobs=True, top_logprobs=1)])
    point = records[0]["response"]["body"]["choices"][0]["logprobs"]
    assert point["tokens"] == ["b", "a"]
    assert point["top_logprobs"] == [{"b": -0.5}, {"a": -0.5}]
    content = records[1]["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert (content[0]["token"], content[0]["bytes"]) == (";", [59])
    assert content[0]["top_logprobs"][0]["logprob"] == -0.5


def test_a_token_that_is_a_part_of_a_character_is_named_by_its_bytes(job):
    _, (record,) = job([{"prompt_token_ids": [127], "max_tokens": 1, "logprobs": 1}])
    point = record["response"]["body"]["choices"][0]["logprobs"]
    assert point["tokens"] == [r"bytes:\xf0\x9f"]


@pytest.mark.parametrize("order", list(Order))
def test_O106_a_bad_line_becomes_an_error_record_and_the_good_ones_are_answered(job, order):
    lines = [
        chat_line("good-1"),
        '{"custom_id": "broken", ',
        chat_line("url", url="/v1/embeddings"),
        chat_line("stream", stream=True),
        chat_line("over-long", content="x" * 100),
        chat_line("good-2"),
        chat_line("good-1"),
        "",
        {"custom_id": "id-out-of-range", **{"prompt_token_ids": [999]}},
        chat_line("good-3", stream=False),
    ]
    summary, records = job(lines, order=order)
    assert (summary.num_ok, summary.num_errors) == (3, 7)
    assert sorted(r["line"] for r in records) == list(range(1, 11))
    by_line = {r["line"]: r for r in records}
    expected_ids = "good-1 None url stream over-long good-2 good-1 None id-out-of-range good-3"
    assert [str(by_line[n]["custom_id"]) for n in range(1, 11)] == expected_ids.split()
    for n in (1, 6, 10):
        text = by_line[n]["response"]["body"]["choices"][0]["message"]["content"]
        assert text == answer("user:hi;", 4)
    reasons = {2: "JSON", 3: "/v1/embeddings", 4: "stream", 5: "64", 7: "before", 8: "blank"}
    for n, reason in reasons.items():
        assert reason in error_of(by_line[n])
        assert by_line[n]["error"]["code"] == "invalid_argument"


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("[1]", "not an object"),
        ("7", "not an object"),
        ("[" * 100_000, "not valid JSON"),
        ('{"prompt": "\\ud83d"}', "not valid JSON"),
        ({"prompt": "a", "max_tokens": 4, "best": 1}, "'best'"),
        ({"prompt": "a", "identity": "root"}, "'identity'"),
        ({"prompt": "a", "n": 0}, "n=0"),
        ({"prompt": "a", "n": True}, "n=True"),
        ({"prompt": "a", "presence_penalty": 2.5}, "presence_penalty=2.5"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ('{"prompt": "a", "temperature": NaN}', "temperature"),
        ('{"prompt": "a", "top_p": 1e999}', "top_p"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens"),
        ({"prompt": "a", "return_token_ids": 1}, "return_token_ids"),
        ({"prompt": ["a", "b"]}, "one prompt"),
        ({"prompt": "a", "messages": []}, "exactly one"),
        ({"max_tokens": 3}, "exactly one"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids"),
        ({"prompt_token_ids": [1.5]}, "token ids"),
        ({"prompt": "a", "priority": "high"}, "priority"),
        ({"prompt": "a", "model": "gpt-4"}, "gpt-4"),
        ({"custom_id": 7, "prompt": "a"}, "custom_id"),
        ({"method": "POST", "url": CHAT, "body": {}}, "custom_id is missing"),
        ({"custom_id": "x", "url": CHAT}, "body is null"),
        (chat_line("x") | {"method": "GET"}, "GET"),
        (chat_line("x") | {"extra": 1}, "'extra'"),
        (chat_line("x", top_logprobs=2), "top_logprobs"),
        (chat_line("x", logprobs=5), "logprobs"),
    ],
)
def test_every_fault_of_a_line_is_named(job, line, names):
    summary, records = job([line, SHORT])
    assert names in error_of(records[0])
    assert (summary.num_ok, summary.num_errors) == (1, 1)


@pytest.mark.parametrize("empty", ["", []])
def test_O20_an_empty_prompt_is_an_error_record_and_the_job_goes_on(job, empty):
    name = "prompt_token_ids" if empty == [] else "prompt"
    chat = chat_line("c") | {"body": {"messages": []}}
    summary, records = job([{name: empty}, chat, SHORT])
    assert "empty" in error_of(records[0])
    assert "empty" in error_of(records[1])
    assert summary.num_ok == 1


@pytest.mark.parametrize("length", [64, 640])
def test_O17_an_over_long_prompt_among_others_names_the_limit_and_changes_nothing_else(job, length):
    summary, records = job([SHORT, {"prompt": "x" * length}, SHORT])
    assert "64" in error_of(records[1])
    texts = [records[n]["response"]["body"]["choices"][0]["text"] for n in (0, 2)]
    assert texts == [answer("abc", 4)] * 2
    assert summary.num_ok == 2


def test_a_line_beyond_the_size_limit_is_refused_without_being_held(job, monkeypatch):
    monkeypatch.setattr(batch_lines, "MAX_LINE_BYTES", 1000)
    _, records = job([SHORT, json.dumps({"prompt": "x" * 5000}), SHORT])
    assert "longer than 1000 bytes" in error_of(records[1])
    assert records[2]["response"]["status_code"] == 200


def test_what_ends_a_request_early_is_its_line_s_error(job):
    lines = [SHORT | {"timeout_s": 0.5}, SHORT | {"tenant": "cursed"}, SHORT]
    summary, records = job(lines)
    assert [r["error"] and r["error"]["code"] for r in records] == [
        "deadline_exceeded",
        "internal",
        None,
    ]
    assert "0.5 s" in error_of(records[0])
    assert "bad page" in error_of(records[1])
    assert (summary.num_ok, summary.num_errors) == (1, 2)


def test_lines_done_before_move_the_bar_but_not_the_rate_behind_its_eta(capfd):
    with BatchProgress(100, enabled=True) as progress:
        progress.skip(40)
        progress.answered(20, 5, ok=True)
        shown = progress._bar.format_dict
        assert (shown["n"], shown["initial"], shown["total"]) == (60, 40, 100)


def test_the_progress_bar_tells_the_rate_and_reaches_the_end_after_a_resume_too(job, capfd):
    job([SHORT] * 10, progress=True, should_stop=stop_after(14))
    assert "100%" not in capfd.readouterr().err
    job(progress=True)
    err = capfd.readouterr().err
    assert "100%" in err
    assert "tok/s" in err


def test_input_order_is_kept_and_finished_order_is_as_it_happens(job, tmp_path):
    lines = [{"prompt": "p", "max_tokens": n} for n in (30, 1, 20, 2, 10, 3)]
    _, in_order = job(lines, order=Order.INPUT)
    assert [r["line"] for r in in_order] == [1, 2, 3, 4, 5, 6]
    job.output = tmp_path / "finished.jsonl"
    _, finished = job(order=Order.FINISHED)
    assert [r["line"] for r in finished] == [2, 4, 6, 5, 3, 1]


def test_a_last_line_without_its_newline_counts(job):
    job.input.write_text(json.dumps(SHORT) + "\n" + json.dumps(SHORT))
    assert job()[0].num_ok == 2


@pytest.mark.parametrize("order", list(Order))
def test_memory_and_the_engine_queue_stay_bounded(job, order):
    def peak_bytes(num_lines):
        job.output.unlink(missing_ok=True)
        # one slow line up front: in input order, all others must wait for it
        write_lines(job.input, [{"prompt": "p", "max_tokens": 60}, *[SHORT] * num_lines])
        engine = FakeEngine()
        engine.added = deque(maxlen=1)
        options = BatchOptions(order=order, max_in_flight=6)
        tracemalloc.start()
        summary = run_batch(engine, job.input, job.output, options)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert summary.num_ok == num_lines + 1
        assert engine.max_seen <= 6
        return peak

    peak_bytes(10)
    few, many = peak_bytes(200), peak_bytes(1200)
    assert many - few < 1000 * 80 + 50_000


def test_bad_lines_behind_a_slow_one_do_not_pile_up_in_memory(job, monkeypatch):
    read_ahead = []

    def counted(file):
        for line in batch_lines.read_lines(file):
            read_ahead.append(line.number)
            yield line

    def check():
        assert len(read_ahead) <= 2 * 16

    monkeypatch.setattr(batch_job, "read_lines", counted)
    engine = FakeEngine(before_step=check)
    lines = [{"prompt": "p", "max_tokens": 60}, *["nonsense"] * 500]
    summary, records = job(lines, engine=engine, order=Order.INPUT, max_in_flight=2)
    assert (summary.num_ok, summary.num_errors) == (1, 500)
    assert [r["line"] for r in records] == list(range(1, 502))


# ---- resuming ----


def stop_after(num_calls):
    calls = iter(range(num_calls))
    return lambda: next(calls, None) is None


@pytest.mark.parametrize("order", list(Order))
def test_a_stopped_job_resumes_with_no_line_lost_or_done_twice(job, order):
    lines = [{"custom_id": f"c{i}", "prompt": f"p{i}", "max_tokens": 1 + i % 7} for i in range(30)]
    # a doubled custom_id must be one whichever run sees it, and whichever run saw the first
    lines[4] = lines[29] = lines[3]
    job(lines, order=order, max_in_flight=4, should_stop=stop_after(40))
    before = job.output.read_bytes()
    num_before = before.count(b"\n")
    assert 0 < num_before < 30
    engine = FakeEngine()
    summary, records = job(order=order, max_in_flight=4, engine=engine)
    assert job.output.read_bytes().startswith(before)
    assert sorted(r["line"] for r in records) == list(range(1, 31))
    assert summary.num_skipped == num_before
    assert summary.num_ok + summary.num_errors == 30 - num_before
    by_line = {r["line"]: r for r in records}
    assert "before" in error_of(by_line[5])
    assert "before" in error_of(by_line[30])
    assert by_line[4]["response"]
    if order == Order.INPUT:
        assert [r["line"] for r in records] == list(range(1, 31))


@pytest.mark.parametrize("num_bytes_kept", [0, 1, 20, -1])
def test_a_torn_last_record_is_cut_and_done_again(job, num_bytes_kept):
    job([SHORT] * 3)
    whole = job.output.read_bytes()
    cut = whole.rindex(b"\n", 0, -1) + 1
    torn = whole[cut:-1] if num_bytes_kept == -1 else whole[cut : cut + num_bytes_kept]
    job.output.write_bytes(whole[:cut] + torn)
    summary, records = job()
    assert [r["line"] for r in records] == [1, 2, 3]
    assert (summary.num_ok, summary.num_skipped) == (1, 2)


@pytest.mark.parametrize("content", ["notes", "notes\n", '{"a": 1}\n', "7\n", '{"line": 0}\n'])
def test_a_file_of_another_kind_is_refused_and_left_as_it_was(job, content):
    job.output.write_text(content)
    with pytest.raises(ConfigError, match="not a record"):
        job([SHORT])
    assert job.output.read_text() == content


def test_the_input_itself_is_refused_as_the_output(job):
    write_lines(job.input, [SHORT])
    with pytest.raises(ConfigError, match="not a record"):
        run_batch(FakeEngine(), job.input, job.input, BatchOptions())


def test_an_output_that_answers_other_input_is_refused(job):
    job([SHORT, SHORT])
    with pytest.raises(ConfigError, match="line 2 of the input"):
        job([SHORT, {"prompt": "changed"}])
    with pytest.raises(ConfigError, match="beyond the input's end"):
        job([SHORT])


def test_lines_added_to_the_input_are_answered_by_the_next_run(job):
    job([SHORT])
    summary, records = job([SHORT, SHORT])
    assert (summary.num_ok, summary.num_skipped, len(records)) == (1, 1, 2)


def test_without_resume_an_output_that_exists_is_refused(job):
    job([SHORT])
    with pytest.raises(ConfigError, match="exists"):
        job(resume=False)
    assert len(read_records(job.output)) == 1


def test_a_failed_engine_ends_the_job_and_blames_no_line(job):
    lines = [SHORT] * 20
    with pytest.raises(EngineDead):
        job(lines, engine=FakeEngine(fail_after_steps=6))
    assert 0 < len(read_records(job.output)) < 20
    summary, records = job()
    assert [r["line"] for r in records] == list(range(1, 21))
    assert summary.num_errors == 0


# ---- in a process of its own ----


class BatchProcess:
    """The command itself (tests/batch_process.py), led step by step."""

    def __init__(self, job, *flags):
        command = [sys.executable, "-m", "tests.batch_process", "--noprogress"]
        files = [f"--input={job.input}", f"--output={job.output}"]
        self.process = subprocess.Popen(
            [*command, *files, "--max_in_flight=8", *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            # Shells start what runs in the background deaf to Ctrl-C, tests as well.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def wait_for(self, event):
        assert self.process.stdout.readline() == f"{event}\n".encode()

    def let_go(self):
        self.process.stdin.write(b".")

    def run_steps(self, num_steps):
        """Returns when step `num_steps` has begun, those before it have ended, and it waits."""
        self.wait_for("load")
        for _ in range(num_steps):
            self.let_go()
            self.wait_for("step")

    def run_on(self):
        """Runs to the end and returns the exit code, stdout and stderr."""
        stdout, stderr = self.process.communicate(timeout=30)
        return self.process.returncode, stdout.decode(), stderr.decode()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.process.kill()
        self.process.communicate()


@pytest.mark.parametrize("order", list(Order))
def test_a_job_killed_again_and_again_answers_every_line_once(job, order):
    num_lines = 60
    lengths = [n for _, n in zip(range(num_lines), cycle((3, 1, 9, 2)), strict=False)]
    lines = [
        {"custom_id": f"c{i}", "prompt": f"p{i}", "max_tokens": n} for i, n in enumerate(lengths)
    ]
    write_lines(job.input, lines)
    for num_steps in (8, 13):
        with BatchProcess(job, f"--order={order}") as batch:
            batch.run_steps(num_steps)
            batch.process.send_signal(signal.SIGKILL)
    with job.output.open("ab") as file:
        file.write(b'{"line": 59, "id": "ba')  # what a kill inside a write leaves
    num_killed = job.output.read_bytes().count(b"\n")
    assert 0 < num_killed < num_lines
    with BatchProcess(job, f"--order={order}") as batch:
        code, stdout, _ = batch.run_on()
    assert code == 0
    summary = stdout.splitlines()[-1]
    assert f"done: {num_lines - num_killed} ok, 0 errors, {num_killed} done before" in summary
    records = read_records(job.output)
    assert sorted(r["line"] for r in records) == list(range(1, num_lines + 1))
    for record in records:
        i = record["line"] - 1
        assert record["custom_id"] == f"c{i}"
        choice = record["response"]["body"]["choices"][0]
        assert choice["text"] == answer(f"p{i}", lengths[i])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_O107_sigint_ends_the_job_within_5_seconds_and_it_can_resume(job, number):
    write_lines(job.input, [SHORT] * 50)
    with BatchProcess(job, "--order=finished") as batch:
        batch.run_steps(6)
        began = time.monotonic()
        batch.process.send_signal(number)  # inside a step
        batch.let_go()
        code, stdout, stderr = batch.run_on()
    assert time.monotonic() - began < 5
    assert (code, stderr) == (130, STOP_NOTICE.decode())
    num_before = len(read_records(job.output))
    assert 0 < num_before < 50
    assert f"interrupted: {num_before} ok" in stdout
    summary, records = job()
    assert sorted(r["line"] for r in records) == list(range(1, 51))
    assert summary.num_skipped == num_before


def test_O107_sigint_while_the_model_loads_ends_the_command(job):
    write_lines(job.input, [SHORT])
    with BatchProcess(job) as batch:
        batch.wait_for("load")
        batch.process.send_signal(signal.SIGINT)
        code, _, stderr = batch.run_on()
    assert (code, stderr) == (130, "jserve-batch: interrupted\n")


def test_O107_a_second_sigint_does_not_wait_for_the_step(job):
    write_lines(job.input, [SHORT])
    with BatchProcess(job) as batch:
        batch.run_steps(1)
        batch.process.send_signal(signal.SIGINT)
        notice = batch.process.stderr.read(len(STOP_NOTICE))
        assert notice == STOP_NOTICE
        batch.process.send_signal(signal.SIGINT)
        assert batch.process.wait(timeout=5) == 130  # the step was never let go
        assert batch.process.stderr.read() == b"jserve-batch: interrupted\n"


def test_a_second_job_on_the_same_output_is_refused_before_it_loads_a_model(job):
    write_lines(job.input, [SHORT] * 50)
    with BatchProcess(job) as first:
        first.run_steps(1)
        with pytest.raises(ConfigError, match="in use"):
            job()
        with BatchProcess(job) as second:
            code, stdout, stderr = second.run_on()
    assert (code, stdout) == (1, "")
    assert "in use" in stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--input=absent.jsonl"], "--input=absent.jsonl is not a file"),
        (["--output=absent/out.jsonl"], "--output=absent/out.jsonl: No such file"),
        (["--noresume"], "exists"),
        (["--model=damaged.gguf"], "damaged.gguf"),
        (["--max_num_seqs=0"], "max_num_seqs=0"),
    ],
)
def test_the_command_says_what_is_wrong_in_one_line(job, flags, message):
    job([SHORT])
    with BatchProcess(job, *flags) as batch:
        code, _, stderr = batch.run_on()
    assert code == 1
    assert message in stderr
    assert stderr.count("\n") == 1


def test_the_command_s_help_lists_its_flags_and_the_engine_s(job):
    with BatchProcess(job, "--help") as batch:
        _, stdout, _ = batch.run_on()
    for flag in ("--input", "--order", "--max_num_seqs", "--[no]resume"):
        assert flag in stdout


def test_the_command_answers_good_and_bad_lines_and_exits_with_0(job):
    write_lines(job.input, [SHORT, "nonsense"])
    with BatchProcess(job, "--served_model_name=my-model") as batch:
        code, stdout, stderr = batch.run_on()
    assert (code, stderr) == (0, "")
    assert "done: 1 ok, 1 errors" in stdout
    assert read_records(job.output)[0]["response"]["body"]["model"] == "my-model"
