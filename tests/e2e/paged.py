"""Drives the real scheduler, packer and step over a model's prompts and keeps every logit.

The engine's own step gives the host one token per row; this one, made of the same parts, gives the
logits of each token of the batch instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jserve.models.config import ModelConfig
from jserve.models.decoder import decoder_apply, head_of, logits
from jserve.models.head_layout import head_layout
from jserve.runner.kv_cache import KV_DTYPES, layout_of, make_pool
from jserve.runner.kv_scales import int8_scales
from jserve.runner.mesh import make_mesh
from jserve.runner.step import StepOptions, StepTokens, _token_ids, make_attend, unpack
from pallas_kernels.dispatch import Backend
from scheduler.bucket import Bucket
from scheduler.config import SchedulerConfig
from scheduler.packer import Packer, batch_fields, sampling_fields, views
from scheduler.request import Request, SamplingView
from scheduler.scheduler import Scheduler

MAX_MODEL_LEN = 96
# Two programs for everything: the tests are about content, compile time is most of their cost.
MAX_ROWS, MAX_TOKENS = 4, 160
BUCKETS = [Bucket(MAX_ROWS, MAX_ROWS, True), Bucket(MAX_TOKENS, MAX_ROWS, False)]


@dataclass(frozen=True)
class Answer:
    """What became of one prompt: all of its ids, and logits f32[n, V] of the positions that were
    computed; those found in the prefix cache are NaN."""

    token_ids: list[int]
    logits: np.ndarray
    num_cached_tokens: int


class PagedModel:
    """One model's two compiled steps and its KV pool, for any number of schedulers in turn."""

    def __init__(
        self,
        params: Any,
        config: ModelConfig,
        *,
        page_size: int,
        loop: str,
        backend: Backend = Backend.XLA,
        kv_cache_dtype: str = "auto",
    ) -> None:
        self.config = config
        self.page_size = page_size
        self._params = params
        pages_per_seq = -(-MAX_MODEL_LEN // page_size)
        self.num_pages = MAX_ROWS * pages_per_seq + 1
        self.options = StepOptions(
            config,
            make_mesh(1),
            backend,
            loop,
            pages_per_seq,
            max_tokens=MAX_TOKENS,
            dtype=jnp.dtype(jnp.float32),
        )
        heads, kv_dtype = head_layout(config), KV_DTYPES.get(kv_cache_dtype, self.options.dtype)
        if kv_cache_dtype == "int8":
            ids = np.random.default_rng(8).integers(0, config.vocab_size, MAX_MODEL_LEN)
            scales = int8_scales(params, self.options, heads, page_size, ids)
            self._params = params | {"kv_scales": scales}
        pool = make_pool(
            config,
            layout_of(backend, config, heads, kv_dtype),
            kv_dtype,
            self.num_pages,
            page_size,
            self.options.mesh,
        )
        self._state = (pool, jnp.zeros(MAX_ROWS + 1, jnp.int32))
        self._steps = {bucket: jax.jit(self._make_step(bucket)) for bucket in BUCKETS}

    def _make_step(self, bucket: Bucket) -> Callable:
        """step(params, (kv_pool, last_tokens), buffer, kept_in) -> (state, logits f32[T, V])."""
        options = self.options

        def step(params, state, buffer, kept_in):
            kv_pool, last_tokens = state
            batch = unpack(buffer, batch_fields(bucket, options.max_pages_per_seq))
            tokens = StepTokens(_token_ids(batch, last_tokens), batch["positions"])
            attend = make_attend(options, bucket, batch, params.get("kv_scales"))
            hidden, pool = decoder_apply(
                params, options.model, tokens, kv_pool, attend, options.loop
            )
            out = logits(head_of(params, options.model), options.model, hidden)
            last = jnp.maximum(batch["cu_q_lens"][1:] - 1, 0)
            last_tokens = last_tokens.at[kept_in].set(
                jnp.argmax(out, axis=1).astype(jnp.int32)[last]
            )
            return (pool, last_tokens), out

        return step

    def scheduler(self, chunk: int, num_pages: int = 0) -> Scheduler:
        """A scheduler over this pool, with its prefix cache empty."""
        return Scheduler(
            SchedulerConfig(
                max_num_seqs=MAX_ROWS,
                max_num_batched_tokens=min(MAX_TOKENS, max(MAX_ROWS, 2 * chunk)),
                prefill_chunk=chunk,
                page_size=self.page_size,
                num_pages=num_pages or self.num_pages,
                max_model_len=MAX_MODEL_LEN,
            )
        )

    def run(
        self, scheduler: Scheduler, prompts: Sequence[np.ndarray], num_new: Sequence[int]
    ) -> list[Answer]:
        """Answers prompts together, greedily, with one step in flight ahead of the host as in the
        engine."""
        requests = [
            Request(str(i), [int(t) for t in ids], SamplingView(max_tokens=count))
            for i, (ids, count) in enumerate(zip(prompts, num_new, strict=True))
        ]
        V = self.config.vocab_size
        found = {r: np.full((MAX_MODEL_LEN, V), np.nan, np.float32) for r in requests}
        packer = Packer(scheduler.config, BUCKETS)
        for request in requests:
            scheduler.add(request)
        in_flight: list[tuple] = []
        while scheduler.has_unfinished or in_flight:
            plan = scheduler.schedule(0.0)
            if plan.requests:
                batch = packer.pack(plan)
                step = self._steps[batch.bucket]
                kept_in = np.full(batch.bucket.num_rows, MAX_ROWS, np.int32)
                if batch.sampling is not None:
                    fields = sampling_fields(batch.bucket.num_rows)
                    kept_in = views(batch.sampling, fields)["slots"]
                self._state, out = step(self._params, self._state, batch.buffer, kept_in)
                in_flight.append((plan, out))
            if in_flight and (len(in_flight) > 1 or not plan.requests):
                self._collect(scheduler, *in_flight.pop(0), found)
        scheduler.check_integrity()
        return [
            Answer(r.token_ids, found[r][: len(r.token_ids) - 1], r.num_cached_tokens)
            for r in requests
        ]

    def _collect(self, scheduler: Scheduler, plan: Any, out: jax.Array, found: dict) -> None:
        rows_of_tokens = np.asarray(out)
        end, sampled = 0, []
        for request, start, count, _, _ in plan.rows:
            rows = rows_of_tokens[end : end + count]
            found[request][start : start + count] = rows
            sampled.append(int(rows[-1].argmax()))
            end += count
        scheduler.update(plan, sampled)
