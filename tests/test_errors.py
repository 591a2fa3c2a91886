"""What is left of an error that has been answered."""

from __future__ import annotations

import gc
import weakref

from jserve.errors import InvalidRequest, let_go


class Prompt(list):
    """A list that can be watched."""


def test_an_answered_error_keeps_nothing_of_its_request_though_it_sits_in_a_cycle():
    watched: list[weakref.ref[Prompt]] = []

    def check() -> None:
        prompt = Prompt([1] * 100)
        watched.append(weakref.ref(prompt))
        raise InvalidRequest(f"{len(prompt)} tokens are too many")

    gc.disable()
    try:
        kept = []
        try:
            check()
        except InvalidRequest as error:
            kept.append(error)
        assert watched[0]() is not None
        let_go(kept[0])
        assert watched[0]() is None
        assert str(kept[0]) == "100 tokens are too many"
    finally:
        gc.enable()
