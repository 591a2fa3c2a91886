"""The command-line client: what it prints, its figures, its one-line errors and exit codes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
import trustme
from absl import flags

from jserve.client import Clock, define_client_flags, request_from_flags
from jserve.config import SecuritySettings
from jserve.errors import DeadlineExceeded, EngineDead, InvalidRequest, Overloaded
from jserve.messages import RequestUpdate, Usage
from jserve.sampling_params import SamplingParams
from jserve.server.api_keys import add_entry, digest_of, new_key
from jserve.server.security import KeyGate
from jserve.server.tls import TlsFiles
from jserve.structured import GrammarKind, StructuredOutput
from tests.server.conftest import TIMEOUT_S, serving
from tests.server.fake_engine import FakeEngine

ROOT = Path(__file__).parents[2]


def parsed(*arguments: str) -> flags.FlagValues:
    values = flags.FlagValues()
    define_client_flags(values)
    values(["client", *arguments])
    return values


async def run_client(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/client.py", *arguments]
    return await asyncio.to_thread(
        subprocess.run,
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},  # the package need not be installed
        input=stdin,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


@pytest.mark.parametrize("stream", ["--stream", "--nostream"])
async def test_the_answer_goes_to_stdout_and_the_figures_to_stderr(stream):
    async with serving(FakeEngine(interval_s=0.005)) as s:
        done = await run_client(
            f"--target={s.target}", "--prompt=abc", "--max_tokens=4", "--wait_ready_s=10", stream
        )
    assert (done.returncode, done.stdout) == (0, "t0 t1 t2 t3 \n")
    for part in ("TTFT ", "ITL ", "tokens/s", "3 prompt tokens", "4 output tokens, length"):
        assert part in done.stderr
    assert len(done.stderr.splitlines()) == 1


async def test_a_prompt_can_come_from_standard_input():
    async with serving() as s:
        done = await run_client(f"--target={s.target}", "--prompt=-", stdin="hello")
        assert done.returncode == 0
        assert s.engine.requests[0].prompt == "hello"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequest("the prompt is too long"), 2),
        (Overloaded("the queue is full"), 3),
        (EngineDead("the engine has stopped"), 3),
        (DeadlineExceeded("too late"), 4),
        (RuntimeError("x"), 1),
    ],
)
async def test_an_error_of_the_server_is_one_line_and_an_exit_code(error, code):
    async with serving() as s:
        s.engine.submit_error = error
        done = await run_client(f"--target={s.target}", "--prompt=x")
    assert done.returncode == code
    assert done.stderr.startswith("jserve-client: ")
    assert len(done.stderr.splitlines()) == 1


async def test_o31_several_answers_are_printed_one_after_the_other_with_their_numbers():
    async with serving() as s:
        done = await run_client(
            f"--target={s.target}", "--prompt=abc", "--max_tokens=2", '--extra_body={"n": 2}'
        )
    assert (done.returncode, done.stdout) == (0, "[0] t0 t1 \n[1] t100 t101 \n")
    assert "4 output tokens" in done.stderr


async def test_a_server_that_is_not_there_is_one_line_and_exit_code_3(unused_tcp_port):
    target = f"--target=127.0.0.1:{unused_tcp_port}"
    for wait in ("--wait_ready_s=0", "--wait_ready_s=0.3"):
        done = await run_client(target, "--prompt=x", wait)
        assert done.returncode == 3
        assert len(done.stderr.splitlines()) == 1


async def test_no_prompt_is_one_line_and_exit_code_2():
    done = await run_client()
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "--prompt" in done.stderr


def test_every_flag_reaches_the_request():
    request = request_from_flags(
        parsed(
            *("--prompt=x", "--chat", "--system=be brief", "--model=m", "--max_tokens=5"),
            *("--temperature=0.5", "--top_k=3", "--top_p=0.8", "--min_p=0.1", "--seed=9"),
            *("--stop=a", "--stop=b", "--ignore_eos", "--request_id=r", "--priority=-2"),
            *("--tenant=t", "--timeout_s=3", "--request_class=c", "--queue_timeout_s=1.5"),
        )
    )
    assert request.sampling == SamplingParams(
        temperature=0.5,
        top_k=3,
        top_p=0.8,
        min_p=0.1,
        seed=9,
        max_tokens=5,
        stop=("a", "b"),
        ignore_eos=True,
    )
    assert [turn["role"] for turn in request.messages] == ["system", "user"]
    assert (request.prompt, request.model, request.request_id) == (None, "m", "r")
    assert (request.priority, request.tenant, request.timeout_s) == (-2, "t", 3.0)
    assert (request.request_class, request.queue_timeout_s) == ("c", 1.5)


def test_other_fields_of_an_openai_body_reach_the_request_as_json():
    body = '{"guided_regex": "a+", "logit_bias": {"5": 1}, "chat_template_kwargs": {"x": 1}}'
    request = request_from_flags(parsed("--prompt=x", "--chat", f"--extra_body={body}"))
    assert request.sampling.structured == StructuredOutput(GrammarKind.REGEX, "a+")
    assert request.sampling.logit_bias == ((5, 1.0),)
    assert request.template_args == {"x": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no prompt"),
        (("--prompt=x", "--extra_body={"), "--extra_body is not JSON"),
        (("--prompt=x", "--extra_body=[]"), "--extra_body is not a JSON object"),
        (("--prompt=x", '--extra_body={"nonsense": 1}'), "'nonsense'"),
        (("--prompt=x", '--extra_body={"logprobs": 0}'), "log-probabilities"),
        (("--prompt=x", '--extra_body={"echo": true}'), "echo"),
        (("--prompt=x", "--system=y"), "--chat"),
        (("--prompt=x", "--temperature=nan"), "temperature"),
    ],
)
def test_flags_that_make_no_request_are_refused_with_the_remedy(arguments, message):
    with pytest.raises(InvalidRequest, match=message):
        request_from_flags(parsed(*arguments))


def test_the_figures_are_those_of_the_readers_own_clock():
    clock = Clock(started=10.0)
    clock.on_update(RequestUpdate(request_id="r", token_ids=(1,)), 10.5)
    clock.on_update(RequestUpdate(request_id="r", text="late text"), 10.6)
    clock.on_update(RequestUpdate(request_id="r", token_ids=(2, 3)), 11.0)
    last = RequestUpdate(request_id="r", finish_reason="stop", usage=Usage(7, 3, 4))
    clock.on_update(last, 12.0)
    assert clock.summary(last) == (
        "TTFT 500.0 ms, ITL 250.0 ms, 3.0 tokens/s, 7 prompt tokens (4 cached), "
        "3 output tokens, stop"
    )


def test_an_answer_without_tokens_has_no_latencies_to_show():
    last = RequestUpdate(request_id="r", finish_reason="stop")
    assert Clock(started=1.0).summary(last) == "0 output tokens, stop"


async def test_a_key_comes_from_a_file_and_one_that_is_not_known_is_exit_code_2(tmp_path):
    key, file = new_key(), tmp_path / "key"
    add_entry(tmp_path / "keys.toml", "alice", {"sha256": digest_of(key).hex()})
    async with serving(gate=KeyGate(str(tmp_path / "keys.toml"))) as s:
        ask = (f"--target={s.target}", "--prompt=x", "--max_tokens=1")
        for text, code in ((f"{key}\n", 0), ("jserve-wrong", 2), ("ü", 2)):
            file.write_text(text)
            done = await run_client(*ask, f"--api_key_file={file}")
            assert (done.returncode, len(done.stderr.splitlines())) == (code, 1)
        assert (await run_client(*ask)).returncode == 2
        missing = await run_client(*ask, f"--api_key_file={tmp_path}/none")
    assert missing.returncode == 2
    assert "--api_key_file" in missing.stderr


async def test_the_command_speaks_mutual_tls(tmp_path):
    authority, own = trustme.CA(), trustme.CA()
    server = authority.issue_cert("localhost", "127.0.0.1")
    caller = own.issue_cert("alice.example", common_name="alice")
    files = {
        "cert": server.cert_chain_pems[0],
        "key": server.private_key_pem,
        "callers": own.cert_pem,
        "ca": authority.cert_pem,
        "own": caller.cert_chain_pems[0],
        "own_key": caller.private_key_pem,
    }
    path = {name: str(tmp_path / f"{name}.pem") for name in files}
    for name, pem in files.items():
        pem.write_to_path(path[name])
    settings = SecuritySettings(
        tls_cert=path["cert"], tls_key=path["key"], tls_client_ca=path["callers"]
    )
    async with serving(tls=TlsFiles(settings)) as s:
        ask = (f"--target={s.target}", "--prompt=x", "--max_tokens=1", f"--tls_ca={path['ca']}")
        pair = (f"--tls_cert={path['own']}", f"--tls_key={path['own_key']}")
        assert (await run_client(*ask, *pair)).returncode == 0
        assert s.engine.requests[-1].identity == "alice"
        assert (await run_client(*ask)).returncode == 3
        half = await run_client(*ask, pair[0])
    assert half.returncode == 2
    assert "belong together" in half.stderr
