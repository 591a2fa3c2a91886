"""How much one caller may use: requests and tokens per minute, requests at once. Knows numbers and
a clock: no names, no engine.

Source: the token bucket, as in ITU-T I.371 (there the generic cell rate algorithm).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from jserve.errors import Overloaded
from jserve.server.caller import Caller, Lease, Quota

MINUTE_S = 60.0
RETRY_CONCURRENT_S = 1.0  # when a running request ends is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaLimits:
    """0 is no limit. The rates are also how much may be used at once after a quiet minute."""

    requests_per_minute: float = 0
    tokens_per_minute: float = 0
    max_concurrent_requests: int = 0


class _Bucket:
    """Holds what may be used now; fills up to a minute's worth. In debt it is below 0."""

    def __init__(self, per_minute: float, now: float) -> None:
        self.per_minute = per_minute
        self._level, self._at = per_minute, now

    def level(self, now: float) -> float:
        filled = self._level + max(now - self._at, 0.0) * self.per_minute / MINUTE_S
        self._level, self._at = min(filled, self.per_minute), now
        return self._level

    def take(self, amount: float, now: float) -> None:
        self._level = self.level(now) - amount

    def wait_s(self, now: float) -> float:
        """Returns the seconds until one may be taken."""
        return max((1 - self.level(now)) * MINUTE_S / self.per_minute, 0.0)

    def set_rate(self, per_minute: float, now: float) -> None:
        used = self.per_minute - self.level(now)
        self.per_minute, self._level = per_minute, per_minute - used


class CallerQuota:
    """One caller's share, over all protocols. For one event loop.

    What a request will need is not known before it has run, so tokens are charged as they come: a
    caller may end in debt, and then waits until it is paid.
    """

    def __init__(self, limits: QuotaLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_open = 0
        self._buckets: dict[str, _Bucket] = {}
        self.limits = QuotaLimits()
        self.set_limits(limits)

    def set_limits(self, limits: QuotaLimits) -> None:
        """Goes on with other limits; what was used stays used."""
        self.limits, now = limits, self._clock()
        rates = {"requests": limits.requests_per_minute, "tokens": limits.tokens_per_minute}
        for what, rate in rates.items():
            if not rate:
                self._buckets.pop(what, None)
            elif what in self._buckets:
                self._buckets[what].set_rate(rate, now)
            else:
                self._buckets[what] = _Bucket(rate, now)

    def enter(self) -> QuotaLease:
        """Admits one request. Raises Overloaded, and counts nothing, where a limit is reached."""
        most, now = self.limits.max_concurrent_requests, self._clock()
        if most and self._num_open >= most:
            raise Overloaded(
                f"{self._num_open} requests of this key are running, of at most {most}; wait for "
                "one to end",
                RETRY_CONCURRENT_S,
            )
        waits = {what: bucket.wait_s(now) for what, bucket in self._buckets.items()}
        if wait_s := max(waits.values(), default=0.0):
            what = max(waits, key=lambda name: waits[name])
            raise Overloaded(
                f"this key has used up its {what}, of {self._buckets[what].per_minute:g} per "
                f"minute; try again in {math.ceil(wait_s)} s",
                wait_s,
            )
        if "requests" in self._buckets:
            self._buckets["requests"].take(1, now)
        self._num_open += 1
        return QuotaLease(self)

    def charge(self, num_tokens: int) -> None:
        if "tokens" in self._buckets:
            self._buckets["tokens"].take(num_tokens, self._clock())

    def leave(self) -> None:
        self._num_open -= 1

    def give_back(self) -> None:
        if "requests" in self._buckets:
            self._buckets["requests"].take(-1, self._clock())

    def headers(self) -> dict[str, str]:
        """Returns what is left, under the names of OpenAI's API."""
        now, headers = self._clock(), {}
        for what, bucket in self._buckets.items():
            level = bucket.level(now)
            full_s = (bucket.per_minute - level) * MINUTE_S / bucket.per_minute
            headers[f"x-ratelimit-limit-{what}"] = f"{bucket.per_minute:g}"
            headers[f"x-ratelimit-remaining-{what}"] = str(max(int(level), 0))
            headers[f"x-ratelimit-reset-{what}"] = f"{full_s:.3f}s"
        return headers


class QuotaLease:
    """One request's part of a `CallerQuota`."""

    def __init__(self, quota: CallerQuota) -> None:
        self._quota = quota
        self._is_open = True

    def charge(self, num_tokens: int) -> None:
        self._quota.charge(num_tokens)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._quota.leave()

    def give_back(self) -> None:
        if self._is_open:
            self._quota.give_back()
            self.close()


@contextmanager
def one_request(caller: Caller) -> Iterator[Caller]:
    """Yields the caller for all the requests of one call, which its quota counts as one."""
    if caller.quota is None:
        yield caller
        return
    share = _Share(caller.quota)
    try:
        yield replace(caller, quota=share)
    finally:
        share.end()


class _Share:
    """A call's one place in its caller's quota, taken by the first request that enters."""

    def __init__(self, quota: Quota) -> None:
        self._quota = quota
        self._lease: Lease | None = None
        self._was_used = False

    def enter(self) -> Lease:
        self._lease = self._lease or self._quota.enter()
        return self

    def headers(self) -> dict[str, str]:
        return self._quota.headers()

    def charge(self, num_tokens: int) -> None:
        self._was_used = True
        if self._lease:
            self._lease.charge(num_tokens)

    def close(self) -> None:
        """One request has ended, or was a faulty one; the call goes on."""
        self._was_used = True

    def give_back(self) -> None:
        """The server had no room for one request; the call may try it again."""

    def end(self) -> None:
        if self._lease:
            (self._lease.close if self._was_used else self._lease.give_back)()
