"""Random traffic in which some requests break the device: they end, and they alone."""

from __future__ import annotations

import random

import pytest

from jserve.errors import RequestFailed
from tests.engine.tiny import answer, asking, joined, run, tiny


@pytest.mark.parametrize("seed", range(12))
def test_of_random_traffic_only_those_end_that_break_the_device(seed):
    rng = random.Random(seed)
    t = tiny(
        overlap=rng.random() < 0.5,
        policy=rng.choice(["fcfs", "sjf", "priority"]),
        max_num_seqs=rng.choice([2, 4, 8]),
        num_pages=rng.choice([24, 64]),  # the former preempts
        num_host_pages=rng.choice([0, 16]),
        max_queued=1000,
    )
    t.engine.scheduler.preemption.swap_page_s = 1e-9
    asked, left, updates = {}, set(), []
    breaks_at = {}  # by name: how many tokens it gets before

    def fail_on_those() -> None:
        for request in t.engine._newest_plan.requests:
            at = breaks_at.get(request.request_id)
            if at is not None and len(request.output_token_ids) >= at:
                raise RuntimeError("the device cannot do it")

    t.device.on_dispatch = fail_on_those
    for _ in range(40):
        for _ in range(rng.randrange(4)):
            prompt = [rng.randrange(90) for _ in range(rng.randrange(1, 20))]
            priority, name = rng.randrange(3), f"r{len(asked)}"
            asked[name] = asking(name, prompt, rng.randrange(1, 12), priority=priority)
            if rng.random() < 0.15:
                breaks_at[name] = rng.choice([0, 2])
            t.engine.add(asked[name])
        if asked and rng.random() < 0.1:
            left.add(name := rng.choice(list(asked)))
            t.engine.abort(name)
        for _ in range(rng.randrange(5)):
            updates += t.engine.step()
        t.engine.scheduler.check_integrity()
    outputs = joined(updates + run(t.engine))
    t.assert_idle()
    for name in asked.keys() - left:
        output = outputs[name]
        if name in breaks_at and output.last.error:
            assert isinstance(output.last.error, RequestFailed)
        else:  # few tokens may be computed before it is known how many there are
            assert breaks_at.get(name) != 0
            assert output.token_ids == answer(asked[name])
