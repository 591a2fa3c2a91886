"""JSON that keeps to its schema: random walks over masks of the default model's vocabulary; the
`jsonschema` library judges each output that ended by itself, and where there are patterns, which it
reads as Python does, `jsonschema_rs`, which reads them as ECMA 262 says."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from typing import Any

import jsonschema
import jsonschema_rs
import numpy as np
import pytest

from jserve.checkpoint.gguf import open_gguf
from jserve.errors import InvalidRequest
from jserve.structured import GrammarKind, StructuredOutput
from jserve.text.gguf_tokenizer import tokenizer_from_gguf
from jserve.text.grammar import Grammar, GrammarCompiler

DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
}
MAX_TOKENS, CLOSE_FROM = 300, 60
ANY_OBJECT = StructuredOutput(GrammarKind.JSON_OBJECT)


@pytest.fixture(scope="module")
def compiler(smollm2_gguf) -> GrammarCompiler:
    tokenizer = tokenizer_from_gguf(open_gguf(smollm2_gguf).gguf_metadata)
    return GrammarCompiler(
        tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids, cache_size=2000
    )


def packed(ids: list[int], num_words: int) -> np.ndarray:
    bits = np.zeros(32 * num_words, np.uint8)
    bits[ids] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


class RandomModel:
    """Draws evenly from what a mask allows, with a bias to close what is open; or takes tokens that
    hold a favourite text wherever one is allowed."""

    def __init__(
        self, compiler: GrammarCompiler, seed: int, favourite: bytes | None = None
    ) -> None:
        self.tokenizer = compiler._tokenizer
        self.random = random.Random(seed)
        self.words = np.zeros((compiler.vocab_size + 31) // 32, np.uint32)
        spellings = [self.tokenizer.token_bytes(id) for id in range(compiler.vocab_size)]
        closing = [id for id, text in enumerate(spellings) if text and set(text) <= set(b'"]}, ')]
        loved = [id for id, text in enumerate(spellings) if favourite and favourite in text]
        groups = ((loved, 1.0), (list(self.tokenizer.eos_token_ids), 0.5), (closing, 0.3))
        self.groups = [(packed(ids, len(self.words)), share) for ids, share in groups]

    def output(self, grammar: Grammar, max_tokens: int = MAX_TOKENS) -> str | None:
        """A text that ended by itself; None where it had to be cut."""
        matcher, out = grammar.matcher(), []
        while len(out) < max_tokens:
            assert matcher.fill(self.words), matcher.error
            id = self._choose(is_late=len(out) > CLOSE_FROM)
            assert matcher.accept(id)
            if id in self.tokenizer.eos_token_ids:
                return self.tokenizer.decode(out)
            out.append(id)
        return None

    def _choose(self, is_late: bool) -> int:
        allowed, draw = self.words, self.random.random()
        for group, share in self.groups:
            if (draw < share or is_late) and (of_group := self.words & group).any():
                allowed = of_group
                break
        ids = np.flatnonzero(np.unpackbits(allowed.view(np.uint8), bitorder="little"))
        return int(ids[self.random.randrange(len(ids))])


def can_compile(compiler: GrammarCompiler, schema: dict) -> bool:
    try:
        compiler.compile(StructuredOutput.of_json_schema(json.dumps(schema)))
    except InvalidRequest:
        return False
    return True


def suite_schemas(suite: list) -> dict[str, dict]:
    return {
        f"{draft}/{name}/{i}": {"$schema": DRAFTS[draft]} | schema
        for i, (name, drafts, schema, *_) in enumerate(suite)
        for draft in drafts
    }


def composed_schemas(compiler: GrammarCompiler, suite: list, number: int) -> dict[str, dict]:
    """Objects and lists whose parts are schemas of the suite, each of which compiles alone."""
    plain = [
        schema
        for _, drafts, schema, *_ in suite
        if "draft2020-12" in drafts and "$" not in json.dumps(schema)
    ]
    parts = [schema for schema in plain if can_compile(compiler, schema)]
    draw, made = random.Random(0), {}
    for i in range(number):
        a, b, c, d = draw.sample(parts, 4)
        some = {"type": "array", "items": {"anyOf": [a, b]}, "maxItems": 3}
        properties = {"a": some, "b": c, "c": {"allOf": [d, {"type": ["object", "string"]}]}}
        made[f"composed/{i}"] = {
            "type": "object",
            "properties": properties,
            "required": ["a", "c"],
            "additionalProperties": False,
        }
    return made


def judge_of(schema: dict) -> jsonschema.protocols.Validator | jsonschema_rs.Validator:
    if "pattern" in json.dumps(schema):
        return jsonschema_rs.validator_for(schema)
    latest = jsonschema.Draft202012Validator
    return jsonschema.validators.validator_for(schema, latest)(schema)


def read_json(text: str) -> Any:
    """Numbers as doubles, the largest one where they are larger: -1e999 -> -1.8e308."""
    largest = sys.float_info.max
    return json.loads(text, parse_float=lambda n: min(max(float(n), -largest), largest))


def run_walks(compiler: GrammarCompiler, schemas: dict[str, dict], seeds: range) -> Counter:
    """Walks through each schema and judges what ended; returns how many did what."""
    counts: Counter = Counter()
    distinct: set[str] = set()  # but for the draft
    models = [RandomModel(compiler, seed) for seed in seeds]
    for name, schema in schemas.items():
        if not can_compile(compiler, schema):
            counts["refused"] += 1
            continue
        counts["compiled"] += 1
        distinct.add(json.dumps({key: schema[key] for key in schema if key != "$schema"}))
        grammar = compiler.compile(StructuredOutput.of_json_schema(json.dumps(schema)))
        judge = judge_of(schema)
        for model in models:
            text = model.output(grammar)
            counts["cut" if text is None else "ended"] += 1
            assert text is None or judge.is_valid(read_json(text)), f"{name}: {text!r}"
    return counts | {"distinct": len(distinct)}


@pytest.mark.slow
def test_every_output_of_a_public_suites_schemas_that_ended_is_valid(
    compiler, json_schema_suite, request
):
    schemas = suite_schemas(json_schema_suite)
    num_seeds = 50 if request.config.getoption("--nightly") else 2
    counts = run_walks(compiler, schemas, range(num_seeds))
    print(f"{len(schemas)} schemas: {dict(counts)}")
    assert counts["compiled"] >= 1000
    assert counts["distinct"] >= 360
    assert counts["ended"] > 0.95 * (counts["ended"] + counts["cut"])


@pytest.mark.slow
def test_every_output_of_composed_schemas_that_ended_is_valid(compiler, json_schema_suite, request):
    number = 3000 if request.config.getoption("--nightly") else 300
    counts = run_walks(compiler, composed_schemas(compiler, json_schema_suite, number), range(2))
    print(dict(counts))
    assert counts["compiled"] >= number // 2
    assert counts["ended"] > counts["compiled"]


@pytest.mark.parametrize("favourite", [b"\n", b"\t", b"\r"])
@pytest.mark.parametrize(
    "spec",
    [
        ANY_OBJECT,
        StructuredOutput.of_json_schema(
            {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "maximum": 999, "minimum": 0},
                    "b": {"type": "array", "items": {"type": "boolean"}, "maxItems": 9},
                    "c": {"enum": ["x", None]},
                },
                "additionalProperties": False,
            }
        ),
    ],
    ids=["json_object", "json_schema"],
)
def test_o64_a_model_that_loves_white_space_still_ends_after_the_closing_brace(
    compiler, spec, favourite
):
    texts = [
        RandomModel(compiler, seed, favourite).output(compiler.compile(spec), max_tokens=200)
        for seed in range(5)
    ]
    for text in texts:
        assert text is not None
        assert text == json.dumps(json.loads(text), ensure_ascii=False)
