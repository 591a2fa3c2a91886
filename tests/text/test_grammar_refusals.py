"""Grammars that are bad, unsupported, too large, too deep or too slow are the caller's error, told
within two seconds, and the process goes on."""

from __future__ import annotations

import copy
import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from llguidance import LLMatcher

from jserve.errors import InvalidRequest, Overloaded
from jserve.structured import GrammarKind, StructuredOutput
from jserve.text import grammar as grammar_module
from jserve.text.grammar import GrammarCompiler

SCHEMA, REGEX = GrammarKind.JSON_SCHEMA, GrammarKind.REGEX
LARK, TAGS = GrammarKind.LARK, GrammarKind.STRUCTURAL_TAG
MAX_S = 2.0


@pytest.fixture(scope="module")
def compiler(byte_level) -> GrammarCompiler:
    return GrammarCompiler(byte_level, byte_level.vocab_size, byte_level.eos_token_ids)


def nested_schema(depth: int) -> str:
    opening = '{"type":"object","properties":{"a":'
    return opening * depth + '{"type":"null"}' + "}}" * depth


def chained_schema(length: int) -> str:
    links = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(length)}
    return json.dumps({"$defs": links | {f"d{length}": {}}, "$ref": "#/$defs/d0"})


def chained_rules(length: int, name: str) -> str:
    links = (f'{name}{i}: "x" {name}{i + 1}' for i in range(length))
    return "\n".join([f"start: {name}0", *links, f'{name}{length}: "y"'])


def tag(**fields) -> str:
    structure = {"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}
    return json.dumps({"structures": [structure], "triggers": ["<f"]} | fields)


NASTY = {  # any of these has overflowed a stack, or run for long, somewhere
    "O62 regex (": (REGEX, "("),
    "O65 regex ( x 5000": (REGEX, "(" * 5000),
    "O65 regex (a) x 5000": (REGEX, "(" * 2000 + "a" + ")" * 2000),
    "O65 regex ^+a": (REGEX, "^+a"),
    "O65 regex ^{2}x": (REGEX, "^{2}x"),
    "O65 schema depth 10000": (SCHEMA, nested_schema(10_000)),
    "O65 lists depth 10000": (SCHEMA, "[" * 10_000),
    "lark ( x 5000": (LARK, "start: " + "(" * 5000 + '"a"' + ")" * 5000),
    "schema of patterns": (
        SCHEMA,
        json.dumps({"properties": {f"p{i}": {"pattern": ".?" * 500} for i in range(9)}}),
    ),
    "multiple of a large number": (SCHEMA, '{"type": "integer", "multipleOf": 1000003}'),
    "multiples whose common one is large": (
        SCHEMA,
        '{"allOf": [{"type": "number", "multipleOf": 9973}, {"multipleOf": 0.0009967}]}',
    ),
    "branches that multiply": (
        SCHEMA,
        json.dumps(
            {
                "allOf": [
                    {"anyOf": [{"properties": {f"{a}{i}": {}}} for a in "kl"]} for i in range(25)
                ]
            }
        ),
    ),
    "intersections that double the work with each": (
        SCHEMA,
        json.dumps(
            {"type": "string", "allOf": [{"pattern": f"(a|b)*a(a|b){{{i}}}$"} for i in range(20)]}
        ),
    ),
    "intersections of automata": (
        LARK,
        "start: A\nA: " + " & ".join(f"/(a|b)*a(a|b){{{i}}}/" for i in range(20)),
    ),
}
DEEP = {  # and these compile: a chain of definitions takes one level of the stack per link
    "chain of 2500 definitions": (SCHEMA, chained_schema(2500)),
    "chain of 1000 rules": (LARK, chained_rules(900, "a")),
    "chain of 1000 terminals": (LARK, chained_rules(900, "A")),
}


def compile_all(
    text_data: Path, cases: dict[str, tuple[GrammarKind, str]]
) -> dict[str, tuple[str, float]]:
    """Compiles each case in a process of its own; returns what came of it and in what time."""
    script = (
        "import json, sys, time\n"
        "from jserve.errors import InvalidRequest\n"
        "from jserve.structured import StructuredOutput\n"
        "from jserve.text.grammar import GrammarCompiler\n"
        "from jserve.text.tokenizer import Tokenizer\n"
        "from tokenizers import Tokenizer as Backend\n"
        "tokenizer = Tokenizer(Backend.from_file(sys.argv[1]))\n"
        "compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [2])\n"
        "compiler.warm_up()\n"
        "for name, case in json.load(sys.stdin).items():\n"
        "    begin, told = time.perf_counter(), 'compiled'\n"
        "    try:\n"
        "        matcher = compiler.compile(StructuredOutput(*case)).matcher()\n"
        "        matcher.accept(matcher.forced_tokens()[0]) if matcher.forced_tokens() else None\n"
        "    except InvalidRequest as error:\n"
        "        told = str(error)\n"
        "    print(json.dumps([name, told, time.perf_counter() - begin]), flush=True)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(text_data / "tiny_byte_level.json")],
        input=json.dumps(cases),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert run.returncode == 0, f"died after {lines[-1:]}: {run.stderr[-300:]}"
    return {name: (told, seconds) for name, told, seconds in lines}


def test_o62_o65_nasty_grammars_are_refused_in_time_and_the_process_lives(text_data):
    told = compile_all(text_data, NASTY)
    assert told.keys() == NASTY.keys()
    assert [name for name, (text, _) in told.items() if text == "compiled"] == []
    assert {name: seconds for name, (_, seconds) in told.items() if seconds > MAX_S} == {}


def test_o65_deep_chains_of_definitions_compile_without_a_stack_overflow(text_data):
    told = compile_all(text_data, DEEP)
    assert {name: text for name, (text, _) in told.items()} == dict.fromkeys(DEEP, "compiled")


@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("type", {"type": "foo"}),
        ("not", {"not": {"pattern": "a"}}),
        ("not", {"not": {"maximun": 3}}),
        ("not", {"not": {"type": "strin"}}),
        ("uniqueItems", {"type": "array", "uniqueItems": True}),
        ("contains", {"contains": {"type": "null"}}),
        ("if", {"if": {"items": {"type": "null"}}, "then": {"maxItems": 3}}),
        ("propertyNames", {"type": "object", "propertyNames": {"format": "uuid"}}),
        ("dependentRequired", {"dependentRequired": ["a"]}),
        ("unevaluatedProperties", {"anyOf": [{}], "unevaluatedProperties": False}),
        ("dynamicRef", {"$dynamicRef": "#a"}),
        ("nullable", {"type": "string", "nullable": True}),
        ("maximun", {"type": "integer", "maximun": 3}),
        ("x-guidance", {"type": "object", "x-guidance": {"lenient": True}}),
        ("minProperties", {"type": "object", "minProperties": 2}),
        (r"\$schema", {"$schema": "http://json-schema.org/draft-04/schema#"}),
        ("format", {"type": "string", "format": "regex"}),
        ("oneOf", {"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}),
        ("example.com", {"$ref": "http://example.com/schema.json"}),
        ("minimum", {"type": "integer", "minimum": "1"}),
        ("required", {"type": "object", "required": "a"}),
        ("nsatisfiable", {"allOf": [False]}),
    ],
)
def test_o62_a_keyword_that_cannot_be_kept_is_refused_by_name(compiler, keyword, schema):
    for wrapped in (schema, {"type": "object", "properties": {"a": schema}, "required": ["a"]}):
        with pytest.raises(InvalidRequest, match=keyword):
            compiler.compile(StructuredOutput.of_json_schema(json.dumps(wrapped)))


def test_a_refused_keyword_is_named_with_its_place(compiler):
    schema = {"$defs": {"a": {"anyOf": [{}, {"items": {"foo": 1}}]}}}
    with pytest.raises(InvalidRequest, match=r"#/\$defs/a/anyOf/1/items: keyword 'foo'"):
        compiler.compile(StructuredOutput.of_json_schema(schema))


def test_words_that_only_describe_and_names_of_properties_are_no_keywords(compiler):
    described = {"title": "A", "description": "b", "default": {"not": 1}, "examples": [{"if": 1}]}
    described |= {"deprecated": True, "x-order": 3, "$comment": "c", "readOnly": True}
    names = {"properties": {"not": {"type": "null"}, "if": {"enum": [{"then": 1}]}}}
    compiler.compile(StructuredOutput.of_json_schema(described | names))


@pytest.mark.parametrize(
    ("kind", "value", "told"),
    [
        (SCHEMA, "", "no JSON"),
        (SCHEMA, "{", "no JSON"),
        (SCHEMA, "[]", "not a JSON object"),
        (SCHEMA, '{"const": NaN}', "NaN"),
        (SCHEMA, '{"const": "\\ud800"}', "hex escape"),
        (SCHEMA, "false", "not a JSON object"),
        (
            SCHEMA,
            '{"$schema": "http://json-schema.org/draft-07/schema#", "prefixItems": []}',
            "items",
        ),
        (REGEX, "", "0 characters"),
        (REGEX, "a" * 5000, "5000 characters"),
        (REGEX, r"(?=a)b", "look-around"),
        (REGEX, r"(a)\1", "backreference"),
        (REGEX, "\ud800", "Unicode"),
        (REGEX, "a$*", "nothing to repeat"),
        (REGEX, "a^b", "lookaround"),
        (LARK, "", "start"),
        (LARK, "start: foo", "foo"),
        (LARK, 'begin: "a"', "start"),
        (LARK, '{"grammars": [{"json_schema": {}}]}', "grammar"),
        (LARK, 'start: "' + "a" * 2**15 + '"', "characters"),
        (GrammarKind.CHOICE, "[]", "no text"),
        (GrammarKind.CHOICE, '[""]', "no text"),
        (GrammarKind.CHOICE, '"yes"', "list of texts"),
        (GrammarKind.CHOICE, '["yes", 1]', "list of texts"),
        (TAGS, "3", "JSON object"),
        (TAGS, tag(type="tags"), "type='tags'"),
        (TAGS, tag(triggers=[]), "triggers"),
        (TAGS, tag(triggers=["<g"]), "none of the triggers"),
        (TAGS, tag(triggers=["<", "<f"]), "begin alike"),
        (TAGS, tag(structures=[{"begin": "<f"}]), "schema"),
        (
            TAGS,
            tag(structures=[{"begin": "<f", "schema": {"if": 1, "then": {}}, "end": ""}]),
            "'if'",
        ),
        (TAGS, tag(structures=[{"begin": "<f", "schema": {}, "ende": ""}]), "'ende'"),
        (TAGS, json.dumps({"format": {"type": "sequence"}}), "'sequence'"),
    ],
)
def test_o62_a_bad_grammar_is_the_callers_error(compiler, kind, value, told):
    with pytest.raises(InvalidRequest, match=told):
        compiler.compile(StructuredOutput(kind, value))


@pytest.mark.parametrize("pattern", [r"\^+", r"[$*]+", r"[^*]{2}", r"a\\\$*", "^a$|^b+$", "[]^+]a"])
def test_a_sign_that_is_no_anchor_may_be_repeated(compiler, pattern):
    compiler.compile(StructuredOutput(REGEX, pattern))


NUMBERS = [0, -1, 1.5, 10**400, 1e308]
ANYTHING = [None, True, *NUMBERS, "", "a", "(", "#/", "~", [], {}, [[]], [0], {"": 0}]


def mangled(schema: dict, draw: random.Random) -> dict:
    """`schema` with a value somewhere in it replaced by one of another kind."""
    whole = copy.deepcopy(schema)
    places, waiting = [], [whole]
    while waiting:
        node = waiting.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node))
        places += [(node, key) for key in keys]
        waiting += [node[key] for key in keys if isinstance(node[key], dict | list)]
    node, key = draw.choice(places)
    node[key] = copy.deepcopy(draw.choice(ANYTHING))
    return whole


def test_o62_a_schema_with_anything_anywhere_is_compiled_or_refused(compiler, json_schema_suite):
    draw, outcomes, told = random.Random(0), Counter(), []
    for _, _, schema, *_ in json_schema_suite * 3:
        try:
            compiler.compile(StructuredOutput.of_json_schema(mangled(schema or {"a": 1}, draw)))
        except InvalidRequest as error:
            outcomes["refused"] += 1
            told.append(str(error))
        else:
            outcomes["compiled"] += 1
    assert min(outcomes.values()) > 100
    assert max(map(len, told)) < 1500


def test_a_grammar_of_too_many_bytes_is_refused(byte_level):
    compiler = GrammarCompiler(byte_level, byte_level.vocab_size, [2], max_bytes=30)
    compiler.compile(StructuredOutput(REGEX, "é" * 15))
    with pytest.raises(InvalidRequest, match="more than 30 bytes"):
        compiler.compile(StructuredOutput(GrammarKind.REGEX, "é" * 16))


def test_o65_a_grammar_that_compiles_too_slowly_is_refused_and_holds_up_a_bounded_number(
    byte_level, monkeypatch
):
    compiler = GrammarCompiler(byte_level, byte_level.vocab_size, [2], timeout_s=0.5)
    compiler.warm_up()
    going_on = threading.Event()

    def slow(*args, **kwargs):
        going_on.wait()
        return LLMatcher(*args, **kwargs)

    monkeypatch.setattr(grammar_module, "LLMatcher", slow)
    monkeypatch.setattr(grammar_module, "WAIT_S", 0.05)
    spec = StructuredOutput(GrammarKind.JSON_OBJECT)
    for _ in range(grammar_module.MAX_COMPILING):
        with pytest.raises(InvalidRequest, match=r"0\.5 s to compile twice"):
            compiler.compile(spec)
    with pytest.raises(Overloaded):
        compiler.compile(spec)
    going_on.set()
    for thread in threading.enumerate():
        if thread.name == "jserve-grammar":
            thread.join()
    monkeypatch.undo()
    compiler.compile(spec)


def test_o65_what_would_compile_for_minutes_holds_up_nothing(byte_level):
    """A process that can be ended tries each grammar: the threads for others stay free."""
    compiler = GrammarCompiler(byte_level, byte_level.vocab_size, [2], timeout_s=0.5)
    slow = StructuredOutput(*NASTY["intersections that double the work with each"])
    for _ in range(2 * grammar_module.MAX_COMPILING):
        with pytest.raises(InvalidRequest, match="to compile"):
            compiler.compile(slow)
    assert not any(thread.name == "jserve-grammar" for thread in threading.enumerate())
    compiler.compile(StructuredOutput(REGEX, "a+"))


HUGE = '{"type":"integer","multipleOf":100000007}'


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (GrammarKind.LARK, f"start: %json {HUGE}"),
        (GrammarKind.LARK, f'start: "a" b\nb: %json\n {HUGE}'),
        (GrammarKind.JSON_SCHEMA, f'{{"$ref": "#/default", "default": {HUGE}}}'),
        (GrammarKind.JSON_SCHEMA, f'{{"$ref": "#/x-y/0", "x-y": [{HUGE}]}}'),
        (
            GrammarKind.JSON_SCHEMA,
            '{"$ref": "#/const", "const": {"pattern": "' + "a" * 5000 + '"}}',
        ),
    ],
)
def test_O65_nothing_that_compiles_for_minutes_is_reached_by_a_way_round(kind, value, compiler):
    """A compile cannot be stopped, and holds one of the few threads for it."""
    begin = time.monotonic()
    with pytest.raises(InvalidRequest, match="multipleOf of at most"):
        compiler.compile(StructuredOutput(kind, value))
    assert time.monotonic() - begin < 1
