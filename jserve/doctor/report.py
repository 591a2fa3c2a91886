"""Puts the doctor's findings together, as plain values and as text. Knows no files and no flags."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jserve.doctor.divergence import ORDER, Decode, Site, describe, find_site
from jserve.doctor.hits import possible_hit_tokens
from jserve.doctor.prompt_log import PromptLog
from jserve.doctor.shingles import SharedText, most_shared_first, shingle_hashes

MAX_TOKENS = 2**24  # of the latest prompts, whose templates are judged; bounds memory and time
MAX_SHINGLE = 16  # tokens; text that is shared in shorter pieces is not worth a page
MIN_GAIN_SHARE = 0.05  # of a template's prompt tokens; below it there is nothing to complain about
MAX_TEMPLATES_SHOWN = 5
_EXAMPLE_CHARS = 300


def diagnose(log: PromptLog, decode: Decode, page_size: int, num_pages: int = 0) -> dict[str, Any]:
    """Returns the report as plain JSON values.

    `did_hit` is over the requests whose cached tokens are logged, every other count over those
    whose prompts are, in order of arrival. Answers are in no log: what a chat's next turn finds of
    the answer before it is in `did_hit` alone.

    `judged` are the latest MAX_TOKENS of prompts. `reordered` counts the possible hits, without a
    bound, once in each of them the text that most prompts of its tenant have stands in front, and
    what varies last. `templates` are the prompts that leave the cached text at the same point.
    """
    known = [(r.tenant, r.token_ids) for r in log.requests if r.token_ids is not None]
    logged = [r for r in log.requests if r.num_cached_tokens is not None]
    num_tokens = sum(len(ids) for _, ids in known)
    report = {
        "num_requests": len(log.requests),
        "prompt_tokens": sum(r.num_prompt_tokens for r in log.requests),
        "num_skipped_lines": log.num_skipped,
        "first_skipped_line": log.first_skipped,
        "page_size": page_size,
        "num_pages": num_pages,
        "num_with_prompt": len(known),
        "could_hit": _share(sum(possible_hit_tokens(known, page_size)), num_tokens),
        "could_hit_bounded": None,
        "did_hit": None,
    }
    if num_pages:
        bounded = sum(possible_hit_tokens(known, page_size, num_pages))
        report["could_hit_bounded"] = _share(bounded, num_tokens)
    if logged:
        did_hit = sum(r.num_cached_tokens or 0 for r in logged)
        report["did_hit"] = _share(did_hit, sum(r.num_prompt_tokens for r in logged))
    return report | _judge(_latest(known), decode, page_size)


def _share(tokens: int, total: int) -> dict[str, Any]:
    return {"tokens": tokens, "share": tokens / total if total else 0.0}


def _latest(known: list[tuple[str, np.ndarray]]) -> list[tuple[str, np.ndarray]]:
    num_behind = np.cumsum([len(ids) for _, ids in reversed(known)])
    return known[len(known) - int(np.searchsorted(num_behind, MAX_TOKENS, side="right")) :]


def _judge(
    prompts: Sequence[tuple[str, np.ndarray]], decode: Decode, page_size: int
) -> dict[str, Any]:
    could = list(possible_hit_tokens(prompts, page_size))
    width = min(page_size, MAX_SHINGLE)
    reordered: list[tuple[str, np.ndarray]] = []
    found: dict[tuple[str, int], list[tuple[int, Site]]] = defaultdict(list)
    shared = SharedText(prompts, width) if prompts else None
    for index, (tenant, ids) in enumerate(prompts):
        assert shared is not None
        counts, first = shared.of(index)
        order = most_shared_first(counts, first)
        reordered.append((tenant, ids[order]))
        site = find_site(counts, first, could[index], page_size)
        if site is not None:
            # One site: the same text follows; where texts change places, the same one is shared
            # by most.
            is_order = site.start == site.end
            at = int(order[0]) if is_order else site.end
            hashes = shingle_hashes(ids, width)
            key = (ORDER if is_order else "", int(hashes[min(at, len(hashes) - 1)]))
            found[key].append((index, site))
    would = list(possible_hit_tokens(reordered, page_size))
    templates = [
        _template(prompts, could, would, sites, decode, page_size)
        for sites in found.values()
        if len(sites) > 1  # a template has more than one prompt
    ]
    templates = [template for template in templates if template is not None]
    num_tokens = sum(len(ids) for _, ids in prompts)
    return {
        "judged": {"num_requests": len(prompts), "prompt_tokens": num_tokens},
        "could_hit_judged": _share(sum(could), num_tokens),
        "reordered": _share(sum(would), num_tokens),
        "templates": sorted(templates, key=lambda t: -t["gain"]["tokens"]),
    }


def _template(
    prompts: Sequence[tuple[str, np.ndarray]],
    could: Sequence[int],
    would: Sequence[int],
    found: Sequence[tuple[int, Site]],
    decode: Decode,
    page_size: int,
) -> dict[str, Any] | None:
    """Returns what there is to say about the prompts that part at one site; None where moving it
    would gain too little."""
    members, sites = [index for index, _ in found], [site for _, site in found]
    num_tokens = sum(len(prompts[i][1]) for i in members)
    now, then = sum(could[i] for i in members), sum(would[i] for i in members)
    if then - now < max(MIN_GAIN_SHARE * num_tokens, page_size * len(members)):
        return None
    what = describe([prompts[i][1] for i in members], sites, decode)
    return {
        "num_requests": len(members),
        "num_tenants": len({prompts[i][0] for i in members}),
        "prompt_tokens": num_tokens,
        "could_hit": _share(now, num_tokens),
        "reordered": _share(then, num_tokens),
        "gain": _share(then - now, num_tokens),
        "positions": what.positions,
        "kind": what.kind,
        "shared_tokens_behind": float(np.mean([site.num_shared_behind for site in sites])),
        "examples": what.examples,
        "advice": "Give the shared texts one order, the most used first."
        if what.kind == ORDER
        else f"Move this ({what.kind}) behind the text that all prompts have, or drop it.",
    }


def report_text(report: Mapping[str, Any]) -> str:
    """Returns the report for people, as lines of text."""
    return "\n".join([*_totals(report), *_verdict(report)])


def _totals(r: Mapping[str, Any]) -> Iterable[str]:
    yield f"requests    {r['num_requests']:,} with {r['prompt_tokens']:,} prompt tokens"
    if r["num_skipped_lines"]:
        yield f"skipped     {r['num_skipped_lines']:,} lines, the first: {r['first_skipped_line']}"
    if r["num_with_prompt"] < r["num_requests"]:
        yield f"prompts     known of {r['num_with_prompt']:,} requests: what follows is of them"
    unbounded = f"full pages of {r['page_size']} tokens, no bound on the cache, tenants apart"
    yield f"could hit   {_figures(r['could_hit'])}: {unbounded}"
    if r["could_hit_bounded"]:
        bounded = f"the same in {r['num_pages']:,} pages, the least recently used dropped"
        yield f"bounded     {_figures(r['could_hit_bounded'])}: {bounded}"
    if r["did_hit"]:
        yield f"did hit     {_figures(r['did_hit'])}: cached_tokens of the log"


def _figures(share: Mapping[str, Any]) -> str:
    return f"{100 * share['share']:5.1f} % {share['tokens']:>13,} tokens"


def _verdict(r: Mapping[str, Any]) -> Iterable[str]:
    if not r["num_with_prompt"]:
        yield "\nThe log keeps no prompts, so nothing can be said of templates."
        return
    if not r["templates"]:
        least = f"{MIN_GAIN_SHARE:.0%} of its tokens"
        yield f"\nNothing to complain about: no template would share {least} more in another order."
        return
    yield f"reordered   {_figures(r['reordered'])}: with the text that most prompts share first"
    if r["judged"]["num_requests"] < r["num_with_prompt"]:
        yield (
            f"            in the latest {r['judged']['num_requests']:,} requests, which could "
            f"hit {100 * r['could_hit_judged']['share']:.1f} % as they are; templates are theirs"
        )
    for number, t in enumerate(r["templates"][:MAX_TEMPLATES_SHOWN], 1):
        p = t["positions"]
        yield (
            f"\n{number}. {t['kind']} at token {p['p50']:,.0f} (p10 {p['p10']:,.0f}, "
            f"p90 {p['p90']:,.0f}); {t['shared_tokens_behind']:,.0f} shared tokens follow, unused"
        )
        yield (
            f"   requests {t['num_requests']:,}, tenants {t['num_tenants']:,}, prompt tokens "
            f"{t['prompt_tokens']:,}; could hit {100 * t['could_hit']['share']:.1f} %, reordered "
            f"{100 * t['reordered']['share']:.1f} %: {t['gain']['tokens']:+,} tokens"
        )
        yield from (f"   | {_one_line(example)}" for example in t["examples"])
        yield f"   Advice: {t['advice']}"
    if rest := r["templates"][MAX_TEMPLATES_SHOWN:]:
        gain = sum(t["gain"]["tokens"] for t in rest)
        yield f"\n{len(rest):,} smaller ones are in --json; together {gain:+,} tokens"


def _one_line(text: str) -> str:
    """Spells control characters; of a long text, the part around the mark."""
    spelled = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    start = max(spelled.find("[[") - 80, 0) if len(spelled) > _EXAMPLE_CHARS else 0
    return spelled[start : start + _EXAMPLE_CHARS]
