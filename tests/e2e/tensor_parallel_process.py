"""Runs LLMs over emulated devices in a process of its own, as their number is fixed once jax has
started: jobs come as JSON on stdin, what became of each goes as JSON to stdout.

A job is {"settings": LLM's, "calls": [{"prompts": [ids, ...], "sampling": SamplingParams'}, ...]},
and may have "embed", which maps a pooling to prompts.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent


def run_jobs(jobs: list[dict[str, Any]], timeout_s: float) -> list[dict[str, Any]]:
    """Returns per job {"error": text}, or {"calls": [[output, ...], ...], "shards": ...,
    "embeddings": {pooling: [vector, ...]}}.

    An output is {"token_ids", "top"}: per token the [id, log-probability] pairs, where asked for.
    """
    run = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(jobs),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout)


def _run_job(job: dict[str, Any]) -> dict[str, Any]:
    from jserve import LLM, SamplingParams
    from jserve.errors import ConfigError

    try:
        llm = LLM(**job["settings"])
    except ConfigError as error:
        return {"error": str(error)}
    with llm:
        shards = _shards(llm)
        calls = [
            _outputs(llm.generate(call["prompts"], SamplingParams(**_fields(call["sampling"]))))
            for call in job["calls"]
        ]
        embeddings = {
            pooling: [output.embedding.tolist() for output in llm.embed(prompts, pooling)]
            for pooling, prompts in job.get("embed", {}).items()
        }
    return {"calls": calls, "shards": shards, "embeddings": embeddings}


def _fields(sampling: dict[str, Any]) -> dict[str, Any]:
    bias = sampling.get("logit_bias", {})  # a key of JSON is a string
    return sampling | {"logit_bias": {int(token_id): value for token_id, value in bias.items()}}


def _outputs(results: list[Any]) -> list[dict[str, Any]]:
    return [
        {
            "token_ids": result.outputs[0].token_ids,
            "top": [list(entry.top) for entry in result.outputs[0].logprobs or ()],
        }
        for result in results
    ]


def _shards(llm: Any) -> dict[str, dict[str, Any]]:
    """Per array of interest: its shape, that of one device's part, and on how many devices."""
    runner = llm._engine._runner
    layer = runner._params["layers"][0]
    arrays = {"kv_pool": runner.state.kv_pool, "embed": runner._params["embed"]}
    arrays |= {name: layer[name] for name in ("qkv", "o", "gate_up", "down")}
    arrays = {name: getattr(array, "values", array) for name, array in arrays.items()}  # if int8
    return {
        name: {
            "whole": array.shape,
            "part": array.addressable_shards[0].data.shape,
            "devices": len(array.sharding.device_set),
        }
        for name, array in arrays.items()
    }


if __name__ == "__main__":
    answers = [_run_job(job) for job in json.load(sys.stdin)]
    json.dump(answers, sys.stdout)
