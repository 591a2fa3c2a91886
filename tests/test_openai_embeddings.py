"""Bodies of /v1/embeddings: what they may ask, and the form of answers."""

from __future__ import annotations

import base64

import jsonschema
import numpy as np
import pytest

from jserve.errors import InvalidRequest
from jserve.messages import GenerateRequest, Usage
from jserve.openai_embeddings import embeddings_body, read_embeddings_body
from jserve.openai_fields import MAX_EMBEDDING_INPUTS
from jserve.server.openapi import document


def request_of(**fields) -> GenerateRequest:
    return GenerateRequest(**{"pooling": "last"} | fields)


@pytest.mark.parametrize(
    ("given", "requests"),
    [
        ("a text", [request_of(prompt="a text")]),
        (["a", "b"], [request_of(prompt="a"), request_of(prompt="b")]),
        ([1, 2, 3], [request_of(prompt_token_ids=[1, 2, 3])]),
        ([[1], [2, 3]], [request_of(prompt_token_ids=[1]), request_of(prompt_token_ids=[2, 3])]),
        (["a", [4]], [request_of(prompt="a"), request_of(prompt_token_ids=[4])]),
    ],
)
def test_an_input_is_a_text_ids_or_a_list_of_these(given, requests):
    call = read_embeddings_body({"input": given})
    assert list(call.requests) == requests
    assert (call.is_base64, call.dimensions) == (False, None)


def test_what_all_requests_have_goes_into_each_of_them():
    body = {"input": ["a", "b"], "model": "m", "pooling": "mean", "priority": 3, "timeout": 2.5}
    body |= {"cache_salt": "mine", "user": "someone", "encoding_format": "base64"}
    call = read_embeddings_body(body | {"dimensions": 64, "request_class": None})
    common = {"pooling": "mean", "model": "m", "priority": 3, "timeout_s": 2.5, "tenant": "mine"}
    assert list(call.requests) == [request_of(prompt=text, **common) for text in "ab"]
    assert (call.is_base64, call.dimensions) == (True, 64)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": None}, "^input must be"),
        ({"input": []}, "^input must be"),
        ({"input": 5}, "^input must be"),
        ({"input": {"text": "a"}}, "^input must be"),
        ({"input": ["a", 5]}, r"^input\[1\] is neither"),
        ({"input": [5, "a"]}, "^input is neither"),
        ({"input": [True]}, r"^input\[0\] is neither"),
        ({"input": [[1.5]]}, r"^input\[0\] is neither"),
        ({"input": ["a"] * (MAX_EMBEDDING_INPUTS + 1)}, "^input has 2049 entries; use at most"),
        ({"encoding_format": "int8"}, "^encoding_format='int8' is none of float, base64"),
        ({"encoding_format": ["float"]}, "^encoding_format="),
        ({"dimensions": 0}, "^dimensions=0 is not"),
        ({"dimensions": "64"}, "^dimensions='64' is not"),
        ({"pooling": ""}, "^pooling='' is not"),
        ({"pooling": 3}, "^pooling=3 is not"),
        ({"user": 3}, "^user is"),
        ({"temperature": 0}, "unknown or unsupported fields: 'temperature'"),
        ({"max_tokens": 1, "x": 2}, "unknown or unsupported fields: 'max_tokens', 'x'"),
        ({"stream": True}, "^stream=True is not supported"),
    ],
)
def test_other_bodies_are_refused_by_name(fields, message):
    with pytest.raises(InvalidRequest, match=message):
        read_embeddings_body({"input": "a"} | fields)


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_an_answer_has_the_vectors_in_order_and_their_prompts_tokens(encoding):
    call = read_embeddings_body({"input": ["a", "b"], "encoding_format": encoding})
    vectors = [np.array(v, np.float32) for v in ([0.1, -0.2], [1.0, 3e-8])]
    body = embeddings_body(call, vectors, [Usage(3, 0, 0), Usage(4, 0, 2)], model="m")
    found = [entry.pop("embedding") for entry in body["data"]]
    if encoding == "base64":
        found = [np.frombuffer(base64.b64decode(text), "<f4") for text in found]
    assert [np.asarray(v, np.float32).tolist() for v in found] == [v.tolist() for v in vectors]
    assert body == {
        "object": "list",
        "data": [{"object": "embedding", "index": i} for i in range(2)],
        "model": "m",
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
    }


EXAMPLES = {
    "input": ["a", ["a", [4]], [1, 2], [[1], [2]], 5, ["a", 5], [], [[1.5]], {"text": "a"}],
    "encoding_format": ["float", "base64", "int8", 3, None],
    "dimensions": [1, 64, 0, -1, "64", 1.5, None],
    "user": ["someone", 3, None],
    "stream": [False, True, None],
    "temperature": [0],
    "x": [1],
}


@pytest.mark.parametrize(("name", "values"), EXAMPLES.items(), ids=str)
def test_the_openapi_document_shows_what_is_read(name, values):
    post = document()["paths"]["/v1/embeddings"]["post"]
    schema = post["requestBody"]["content"]["application/json"]["schema"]
    for value in values:
        body = {"input": "a"} | {name: value}
        try:
            read_embeddings_body(body)
            is_read = True
        except InvalidRequest:
            is_read = False
        assert is_read == jsonschema.Draft202012Validator(schema).is_valid(body), body


def test_the_openapi_document_shows_every_field():
    post = document()["paths"]["/v1/embeddings"]["post"]
    schema = post["requestBody"]["content"]["application/json"]["schema"]
    ours = {"input", "encoding_format", "dimensions", "pooling", "model", "user", "timeout"}
    assert ours | {"priority", "request_class", "cache_salt"} <= set(schema["properties"])
    assert not {"temperature", "max_completion_tokens", "prompt"} & set(schema["properties"])
