"""Says what a log's requests could have found in the prefix cache, and which part of their prompts
kept them from it.

  scripts/diagnose_prefix_cache.py --log=requests.jsonl --model=smollm2-135m
  scripts/diagnose_prefix_cache.py --log=prompts.jsonl --tokenizer=whitespace --page_size=64
  scripts/diagnose_prefix_cache.py --log=requests.jsonl --num_pages=4096 --json=report.json

The log is one of jserve-serve --request_log=... --request_log_prompts, or a file of jserve-batch or
OpenAI batch requests. Exit codes: 0 a report, 1 the log, the model or the settings are no good.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from absl import app, flags

from jserve.config import DEFAULT_CACHE_DIR
from jserve.doctor.codec import make_codec
from jserve.doctor.prompt_log import read_log
from jserve.doctor.report import diagnose, report_text
from jserve.errors import ConfigError, JserveError
from jserve.flags import list_in_help


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    text, number = flags.DEFINE_string, flags.DEFINE_integer
    fv: Any = {"flag_values": values}
    text("log", None, "The requests, as JSON lines.", required=True, **fv)
    text("model", "", "Whose tokenizer reads texts and shows ids; as for jserve-serve.", **fv)
    kinds = ["model", "whitespace", "bytes"]
    help_text = "model: that of --model; whitespace (words) and bytes need none, and estimate."
    flags.DEFINE_enum("tokenizer", "model", kinds, help_text, **fv)
    number("page_size", 16, "Tokens per KV page, as the engine has it.", lower_bound=1, **fv)
    help_text = "Pages of a pool to judge as well; 0: only a cache without bound."
    number("num_pages", 0, help_text, lower_bound=0, **fv)
    text("json", "", "Also write the report there.", **fv)
    text("cache_dir", DEFAULT_CACHE_DIR, "Where fetched models are kept.", **fv)


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}; all settings are --flags")
    values = flags.FLAGS
    try:
        if values.model and values.tokenizer != "model":
            raise ConfigError(f"--model and --tokenizer={values.tokenizer} exclude each other")
        codec = make_codec(values.tokenizer, values.model, values.cache_dir)
        log = read_log(values.log, codec)
        report = diagnose(log, codec.decode, values.page_size, values.num_pages)
        if values.json:
            Path(values.json).write_text(json.dumps(report, indent=2) + "\n")
    except (JserveError, OSError) as error:
        print(f"diagnose_prefix_cache: {error}", file=sys.stderr)
        return 1
    print(report_text(report))
    return 0


def run() -> NoReturn:
    """Entry point of scripts/diagnose_prefix_cache.py."""
    define_flags()
    list_in_help()
    app.run(main)
