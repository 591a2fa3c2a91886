"""/tokenize and /detokenize, over a tokenizer of bytes."""

from __future__ import annotations

import aiohttp
import pytest

from tests.server.conftest import serving


@pytest.fixture
async def post():
    async with serving(http=True) as served, aiohttp.ClientSession(served.http) as session:

        async def post(path, status=200, **body):
            async with session.post(path, json=body) as response:
                assert response.status == status, await response.text()
                return await response.json()

        yield post


async def test_text_becomes_ids_and_ids_become_the_text_again(post):
    found = await post("/tokenize", model="fake", prompt="abc", return_token_strs=True)
    assert (found["count"], found["tokens"]) == (3, [97, 98, 99])
    assert found["token_strs"] == ["a", "b", "c"]
    assert found["max_model_len"] > 0
    assert (await post("/tokenize", prompt=""))["tokens"] == []
    assert await post("/detokenize", tokens=found["tokens"]) == {"prompt": "abc"}


async def test_a_chat_becomes_the_ids_of_its_template(post):
    found = await post("/tokenize", messages=[{"role": "user", "content": "hi"}])
    assert (await post("/detokenize", tokens=found["tokens"]))["prompt"] == "user:hi;"


CHAT = {"role": "a", "content": "b"}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": 1}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "x", "bogus": 1}, 400, "bogus"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "a"}]}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": 1}, 400, "add_special_tokens"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": [CHAT], "tool_choice": "b"}, 400, "tool_choice"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "abc"}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, True]}, 400, "tokens[1]"),
        ("/detokenize", {"tokens": [10**30]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
    ],
)
async def test_o87_a_bad_field_is_refused_by_name(post, path, body, status, param):
    assert (await post(path, status, **body))["error"]["param"] == param
