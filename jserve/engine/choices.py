"""The choices of one request: whose they are, how many are left, and the best of them. Knows
updates and token counts: no scheduling, no text."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from jserve.messages import RequestUpdate, Usage, joined
from jserve.sampling_params import SamplingParams


@dataclass(slots=True)
class Choices:
    """The choices of a live request. With `best_of`, nothing is given out before all have ended."""

    request_id: str
    sampling: SamplingParams
    num_live: int
    _held: dict[int, list[RequestUpdate]] = field(default_factory=dict)

    def take(self, update: RequestUpdate) -> list[RequestUpdate]:
        """Returns what the client is to hear, after one choice's update."""
        is_end = update.finish_reason is not None
        self.num_live -= is_end
        if self.sampling.best_of is None or update.error is not None:
            if is_end and self.num_live:
                update = replace(update, num_live_choices=self.num_live)
            return [update]
        self._held.setdefault(update.index, []).append(update)
        return [] if self.num_live else self._best()

    def _best(self) -> list[RequestUpdate]:
        """One update for each of the n choices with the highest mean log-probability."""
        wholes = joined(update for updates in self._held.values() for update in updates)
        n = self.sampling.n
        ranked = sorted(wholes, key=_mean_logprob, reverse=True)
        unused = sum(_num_tokens(update) for update in ranked[n:])
        prompt = {
            "prompt_token_ids": wholes[0].prompt_token_ids,
            "prompt_logprobs": wholes[0].prompt_logprobs,
        }
        best = []
        for index, update in enumerate(ranked[:n]):
            best.append(
                replace(
                    update,
                    index=index,
                    num_live_choices=n - 1 - index,
                    logprobs=() if self.sampling.logprobs is None else update.logprobs,
                    usage=_with_more(update.usage, unused if index == 0 else 0),
                    **(prompt if index == 0 else dict.fromkeys(prompt, ())),
                )
            )
        return best


def _mean_logprob(update: RequestUpdate) -> float:
    logprobs = [entry.logprob for entry in update.logprobs]
    return sum(logprobs) / len(logprobs) if logprobs else float("-inf")


def _num_tokens(update: RequestUpdate) -> int:
    return update.usage.completion_tokens if update.usage else 0


def _with_more(usage: Usage | None, num_tokens: int) -> Usage | None:
    """What was generated has its price, also where it is not returned."""
    if usage is None:
        return None
    return replace(usage, completion_tokens=usage.completion_tokens + num_tokens)
