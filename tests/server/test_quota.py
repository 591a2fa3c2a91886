"""How much a caller may use: buckets that fill with time, and requests at once."""

from __future__ import annotations

import pytest

from jserve.errors import Overloaded
from jserve.server.caller import Caller
from jserve.server.quota import CallerQuota, QuotaLimits, one_request


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def quota_of(**limits: float) -> tuple[CallerQuota, Clock]:
    clock = Clock()
    return CallerQuota(QuotaLimits(**limits), clock), clock


def refusal(quota: CallerQuota) -> Overloaded:
    with pytest.raises(Overloaded) as caught:
        quota.enter()
    return caught.value


def test_a_minutes_requests_may_come_at_once_and_then_as_fast_as_the_rate():
    quota, clock = quota_of(requests_per_minute=6)
    for _ in range(6):
        quota.enter().close()
    assert refusal(quota).retry_after_s == pytest.approx(10)
    clock.now += 9.9
    assert refusal(quota).retry_after_s == pytest.approx(0.1)
    clock.now += 0.1
    quota.enter()
    refusal(quota)


@pytest.mark.parametrize("limits", [{"requests_per_minute": 7}, {"tokens_per_minute": 70}])
def test_after_the_time_that_a_refusal_names_the_request_is_admitted(limits):
    quota, clock = quota_of(**limits)
    for _ in range(5):
        while True:
            try:
                quota.enter().charge(33)
            except Overloaded as error:
                clock.now += error.retry_after_s - 1e-3
                refusal(quota)
                clock.now += 1e-3
                break


def test_refused_requests_cost_nothing():
    quota, clock = quota_of(requests_per_minute=60)
    for _ in range(60):
        quota.enter()
    for _ in range(1000):
        refusal(quota)
    clock.now += 1
    quota.enter()


def test_a_caller_in_debt_of_tokens_waits_until_it_is_paid():
    quota, clock = quota_of(tokens_per_minute=60)
    lease = quota.enter()
    lease.charge(59)
    quota.enter().charge(61)  # there was one left, so it may begin
    error = refusal(quota)
    assert error.retry_after_s == pytest.approx(61)
    assert "tokens" in str(error)
    assert "60 per minute" in str(error)
    clock.now += 61
    quota.enter()


def test_a_long_rest_saves_no_more_than_a_minutes_share():
    quota, clock = quota_of(requests_per_minute=2)
    clock.now += 3600
    quota.enter()
    quota.enter()
    refusal(quota)


def test_requests_at_once_are_counted_until_they_end_and_once_however_often_closed():
    quota, _ = quota_of(max_concurrent_requests=2)
    first, second = quota.enter(), quota.enter()
    assert "2 requests" in str(refusal(quota))
    first.close()
    first.close()
    third = quota.enter()
    refusal(quota)
    second.close()
    third.close()
    for _ in range(2):
        quota.enter()


def test_new_limits_keep_what_was_used():
    quota, _ = quota_of(requests_per_minute=10)
    for _ in range(6):
        quota.enter()
    quota.set_limits(QuotaLimits(requests_per_minute=7))
    quota.enter()
    refusal(quota)
    quota.set_limits(QuotaLimits())
    quota.enter()


def test_what_is_left_is_told_under_openais_names():
    quota, _ = quota_of(requests_per_minute=60, tokens_per_minute=600)
    quota.enter().charge(700)
    assert quota.headers() == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1.000s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "70.000s",
    }
    assert quota_of(max_concurrent_requests=1)[0].headers() == {}


def test_all_requests_of_a_call_are_one_and_it_is_given_back_where_none_found_room():
    quota, _ = quota_of(requests_per_minute=2, max_concurrent_requests=1)
    with one_request(Caller(quota=quota)) as caller:
        for _ in range(3):
            lease = caller.quota.enter()
            lease.charge(5)
            lease.close()
        refusal(quota)  # the call still runs
    with one_request(Caller(quota=quota)) as caller:
        caller.quota.enter().give_back()
    quota.enter().close()
    refusal(quota)
