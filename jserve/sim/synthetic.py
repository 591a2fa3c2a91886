"""Draws load from a description: arrivals, lengths, classes, tenants, shared prefixes. Knows seeds:
no files, no scheduler."""

from __future__ import annotations

import itertools
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from jserve.bench.workload import Lengths
from jserve.errors import ConfigError
from jserve.sim.prompts import LONGEST_PROMPT, UniquePrompts, from_blocks
from scheduler.request import Request, SamplingView

_MIX_EXAMPLE = "chat:share=0.8,input=64-256,output=16-64;batch:share=0.2,input=1500,output=200"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of request of a mix, all of one class.

    Attributes:
      share: of the requests, relative to the other kinds'.
      prefix: leading tokens that all prompts of the kind (and tenant) have in common; they count
        towards `input`.
      tenant: who sends them; "": drawn from the tenants of the mix.
    """

    request_class: str = ""
    share: float = 1.0
    input: Lengths
    output: Lengths
    prefix: int = 0
    tenant: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """All that arrives. `rate` is per second, 0: all at once; `burstiness` is the gamma shape of
    the gaps: 1 Poisson, below 1 bursts, above 1 more even. `tenants` have relative shares."""

    kinds: Sequence[Kind]
    num_requests: int
    rate: float = 0.0
    burstiness: float = 1.0
    tenants: Mapping[str, float]
    seed: int = 0


def parse_kinds(text: str, default: Kind) -> list[Kind]:
    """Reads "chat:share=0.8,input=64-256,output=16-64;batch:input=1500": a class, then what differs
    from `default`; a length is a number, a range, or several of them as in 64-128|1024.

    Raises:
      ConfigError: naming the part that is not understood.
    """
    kinds = []
    for entry in filter(None, map(str.strip, text.split(";"))):
        name, _, rest = entry.partition(":")
        fields: dict[str, Any] = {}
        for part in filter(None, map(str.strip, rest.split(","))):
            key, _, value = part.partition("=")
            try:
                fields[key] = _FIELDS[key](value)
            except (KeyError, ValueError):
                raise ConfigError(
                    f"--mix: {part!r} of {name!r} is not understood; use {', '.join(_FIELDS)}, "
                    f"as in {_MIX_EXAMPLE}"
                ) from None
        kinds.append(replace(default, request_class=name.strip(), **fields))
    return kinds or [default]


def _lengths(text: str) -> Lengths:
    return Lengths(text.replace("-", ":").replace("|", ","))


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share < float("inf"):
        raise ValueError(text)
    return share


def _count(text: str) -> int:
    count = int(text)
    if count < 0:
        raise ValueError(text)
    return count


_FIELDS: dict[str, Callable[[str], Any]] = {
    "share": _share,
    "input": _lengths,
    "output": _lengths,
    "prefix": _count,
    "tenant": str,
}


def parse_tenants(text: str) -> dict[str, float]:
    """Reads "8", so many equal tenants, or shares as in "flood:0.9,a:0.05,b:0.05".

    Raises:
      ConfigError: it has another form.
    """
    try:
        if text.strip().isdigit():
            return {f"tenant{i}": 1.0 for i in range(int(text))}
        pairs = [part.split(":") for part in filter(None, text.split(","))]
        return {name.strip(): _share(share) for name, share in pairs}
    except ValueError:
        raise ConfigError(
            f"--tenants={text} is not understood; use 8 or flood:0.9,a:0.05,b:0.05"
        ) from None


def synthetic(mix: Mix) -> Iterator[Request]:
    """Yields the requests of a mix in order of arrival; equal seeds give equal requests."""
    rng = np.random.default_rng(mix.seed)
    unique, prefixes = UniquePrompts(), _Prefixes()
    kind_ends = list(itertools.accumulate(kind.share for kind in mix.kinds))
    tenants = list(mix.tenants)
    tenant_ends = list(itertools.accumulate(mix.tenants.values()))
    arrival_s = 0.0
    for number in range(mix.num_requests):
        if number and mix.rate:
            arrival_s += rng.gamma(mix.burstiness, 1 / (mix.rate * mix.burstiness))
        kind = mix.kinds[bisect(kind_ends, rng.random() * kind_ends[-1], hi=len(kind_ends) - 1)]
        tenant = kind.tenant
        if tenants and not tenant:
            at = bisect(tenant_ends, rng.random() * tenant_ends[-1], hi=len(tenants) - 1)
            tenant = tenants[at]
        num_tokens = kind.input.draw(rng)
        prompt = unique.take(min(num_tokens, LONGEST_PROMPT))
        if kind.prefix:
            prompt = prefixes.put_before(prompt, kind)
        yield Request(
            f"{number}",
            prompt,
            SamplingView(max_tokens=kind.output.draw(rng)),
            tenant=tenant,
            request_class=kind.request_class,
            arrival_time=arrival_s,
            cache_keys=(("tenant", tenant),) if tenant else (),
        )


class _Prefixes:
    """The shared beginning of each kind's prompts."""

    def __init__(self) -> None:
        self._ids: dict[Kind, int] = {}

    def put_before(self, prompt: Sequence[int], kind: Kind) -> Sequence[int]:
        """Overwrites a prompt's beginning, of which one token at least stays its own."""
        length = min(kind.prefix, len(prompt) - 1)
        prefix_id = self._ids.setdefault(kind, len(self._ids))
        prefix = from_blocks([prefix_id], max(length, 1), length)
        return cast(Sequence[int], np.concatenate([prefix, prompt[length:]]))
