"""Part 3: the engine end to end, on a model with random weights that are drawn on the device."""

from __future__ import annotations

import functools
import itertools
import logging
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from jax.sharding import Mesh

from jserve.engine.engine import Engine
from jserve.engine.input_processor import InputProcessor, ModelLimits
from jserve.engine.metrics import EngineMetrics
from jserve.messages import GenerateRequest, RequestUpdate
from jserve.models.config import ModelConfig
from jserve.models.decoder import BEST_LOOP, head_of
from jserve.models.families import model_config_from_hf
from jserve.models.head_layout import head_layout
from jserve.models.layers import WEIGHT_STDDEV
from jserve.models.params import ParamShape, is_norm, param_shapes
from jserve.runner.compile import compile_steps, on_each_compilation
from jserve.runner.kv_cache import layout_of, make_pool
from jserve.runner.mesh import make_mesh, replicated, sharding_of
from jserve.runner.platform import set_compiler_flags
from jserve.runner.runner import Runner, StepHandle
from jserve.runner.step import StepOptions, StepState, make_sampler_state, why_unsupported
from jserve.sampling_params import SamplingParams
from jserve.text.chat import chat_template_of
from jserve.text.tokenizer import BYTE_ALPHABET, Tokenizer
from pallas_kernels.dispatch import backend_for
from scheduler.bucket import Bucket
from scheduler.config import SchedulerConfig
from scheduler.packer import PackedBatch, Packer
from scheduler.scheduler import Scheduler
from scripts.device_check.kernels import copy_bytes_per_s
from scripts.device_check.record import Record
from scripts.device_check.recovery import recovery_figures
from scripts.device_check.sizes import Sizes
from scripts.device_check.trace import device_gaps


class Checked:
    """A warm engine, with what the measurements need to see of it. It is a Runner itself, which
    remembers the last batch."""

    def __init__(self, sizes: Sizes) -> None:
        platform = jax.default_backend()
        self.sizes = sizes
        self.model = model_config_from_hf(sizes.model)
        dtype = jnp.dtype(jnp.float32 if platform == "cpu" else jnp.bfloat16)
        mesh, layout = make_mesh(1), head_layout(self.model)
        loop = BEST_LOOP[platform]
        self.params = random_params(
            param_shapes(self.model, layout, stacked=loop == "scanned"), dtype, mesh
        )
        backend = backend_for(platform)
        pool = layout_of(backend, self.model, layout, dtype)
        limits = scheduler_config(sizes)
        state = StepState(
            make_pool(self.model, pool, dtype, limits.num_pages, limits.page_size, mesh),
            make_sampler_state(limits.max_num_seqs, self.model.vocab_size, replicated(mesh)),
        )
        self.kv_token_bytes = state.kv_pool.nbytes // (limits.num_pages * limits.page_size)
        buckets = [Bucket(n, n, True) for n in sizes.engine_rows]
        buckets.append(Bucket(limits.max_num_batched_tokens, limits.max_num_seqs, False))
        options = StepOptions(
            self.model,
            mesh,
            backend,
            loop,
            limits.max_pages_per_seq,
            max_tokens=limits.max_num_batched_tokens,
            dtype=dtype,
        )
        for bucket in buckets:
            reason = why_unsupported(options, layout, bucket, limits.page_size, dtype)
            if reason is not None:
                raise NotImplementedError(reason)
        programs = compile_steps(options, buckets, self.params, state)
        head = head_of(self.params, self.model)
        self._runner = Runner(self.params, head, state, programs)
        scheduler = Scheduler(limits)
        self.engine = Engine(
            processor=input_processor(self.model, limits, scheduler),
            scheduler=scheduler,
            packer=Packer(limits, buckets),
            runner=self,
            metrics=EngineMetrics(),
            overlap=True,
        )
        self.compilations = self.failed_steps = 0
        self.last_batch: PackedBatch | None = None
        self._names: list[str] = []

    def dispatch(self, batch: PackedBatch) -> StepHandle:
        self.last_batch = batch
        return self._runner.dispatch(batch)

    def run(self, batch: PackedBatch) -> StepHandle:
        """Starts one step apart from the engine."""
        handle = self.dispatch(batch)
        self.choose(handle)
        return handle

    def choose(self, handle: StepHandle, allowed: np.ndarray | None = None) -> None:
        self._runner.choose(handle, allowed)

    def reset(self) -> None:
        self.failed_steps += 1
        self._runner.reset()

    def lose_pool(self) -> None:
        """Has the next step fail, and leave nothing to write to."""
        self._runner.state.kv_pool.delete()

    def count_compilation(self) -> None:
        self.compilations += 1

    @property
    def step_weight_bytes(self) -> int:
        """What a decode step reads of the weights: all but the table that rows are taken from."""
        total = sum(leaf.nbytes for leaf in jax.tree.leaves(self.params))
        return total - (0 if self.model.tie_word_embeddings else self.params["embed"].nbytes)

    def add(self, num_tokens: int, max_tokens: int, seed: int | None = None) -> str:
        """Queues a prompt of random token ids, another one each time unless there is a seed."""
        random = np.random.default_rng(len(self._names) if seed is None else seed)
        ids = random.integers(1, self.model.vocab_size, num_tokens)
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        message = GenerateRequest(prompt_token_ids=ids.tolist(), sampling=sampling)
        self._names.append(self.engine.add(message))
        return self._names[-1]

    def until_each_has(self, names: Iterable[str], count: int) -> None:
        """Turns the engine until every request of `names` has got `count` tokens."""
        missing = dict.fromkeys(names, count)
        while missing:
            for update in self.engine.step():
                if update.request_id in missing:
                    missing[update.request_id] -= len(update.token_ids)
                    if missing[update.request_id] <= 0:
                        del missing[update.request_id]

    def clear(self) -> None:
        """Ends all requests, those of a measurement that broke too."""
        for name in self._names:
            self.engine.abort(name)
        while self.engine.has_work:
            self.engine.step()


def run(record: Record, sizes: Sizes, is_small: bool, out: Path) -> None:
    """See `__main__`: records rates by rows, inter-token times, compilations and idle gaps."""
    del is_small, out
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="  %(message)s")
    set_compiler_flags()
    copy = copy_bytes_per_s(sizes)
    begin = time.perf_counter()
    checked = Checked(sizes)
    record.add("built", seconds=time.perf_counter() - begin, copy_gb_per_s=copy / 1e9,
               weight_bytes=checked.step_weight_bytes)  # fmt: skip
    warm_up(checked)
    on_each_compilation(checked.count_compilation)
    for num_rows in sizes.engine_rows:
        with record.guard(f"decode {num_rows} rows"):
            checked.clear()
            record.add(f"decode {num_rows} rows", **decode_figures(checked, num_rows, copy))
    with record.guard("long prompt"):
        checked.clear()
        record.add("long prompt", **long_prompt_figures(checked))
    record.add("after warm-up", compilations=checked.compilations)
    with record.guard("a step that fails"):
        checked.clear()
        record.add("a step that fails", **recovery_figures(checked))


def warm_up(checked: Checked) -> None:
    """Meets everything once that the first request of a process meets."""
    name = checked.add(checked.sizes.token_budget + 1, max_tokens=8)
    checked.until_each_has([name], 4)
    checked.clear()


def decode_figures(checked: Checked, num_rows: int, copy: float) -> dict[str, Any]:
    """Returns rates of `num_rows` decoding requests, as a share of what the copy's bandwidth allows
    for the weights and the keys and values that a step must read."""
    sizes, engine = checked.sizes, checked.engine
    num_steps = sizes.engine_steps
    names = [checked.add(sizes.context, max_output(sizes)) for _ in range(num_rows)]
    checked.until_each_has(names, 4)
    begin, tokens = time.perf_counter(), 0
    for _ in range(num_steps):
        tokens += sum(len(update.token_ids) for update in engine.step())
    seconds = time.perf_counter() - begin
    if tokens != num_rows * num_steps:
        raise ValueError(f"{tokens} tokens from {num_steps} steps of {num_rows} rows")
    live = engine.stats()["live_tokens"] - num_rows * num_steps // 2
    figures = _idle(checked, num_steps, seconds / num_steps)
    must_read = checked.step_weight_bytes + live * checked.kv_token_bytes
    return {
        "tokens_per_s": tokens / seconds,
        "step_ms": seconds / num_steps * 1e3,
        "roofline_share": must_read / copy / (seconds / num_steps),
        "step_bytes": must_read,
        **figures,
    }


def _idle(checked: Checked, num_steps: int, step_s: float) -> dict[str, Any]:
    """Returns the device's idle time per step: from a trace, where the profiler knows the device,
    else as what a step takes longer in the engine than in a queue of equal steps."""
    batch = checked.last_batch
    assert batch is not None, "the engine has run"
    checked.run(batch).result()
    begin = time.perf_counter()
    handles = [checked.run(batch) for _ in range(num_steps)]
    handles[-1].result()
    queued_s = (time.perf_counter() - begin) / num_steps
    gap_us = max(0.0, step_s - queued_s) * 1e6
    figures = {"queued_step_ms": queued_s * 1e3, "gap_us": gap_us, "gap_from": "difference"}
    try:
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                for _ in range(num_steps // 2):
                    checked.engine.step()
            return figures | device_gaps(Path(folder), num_steps // 2) | {"gap_from": "trace"}
    except Exception as error:  # a profiler has more ways to fail than are worth this part
        return figures | {"no_trace": f"{type(error).__name__}: {error}"[:200]}


def long_prompt_figures(checked: Checked) -> dict[str, Any]:
    """Returns inter-token times of decoding requests before and while a long prompt is computed."""
    sizes, engine = checked.sizes, checked.engine
    num_steps = sizes.engine_steps
    num_rows = sizes.engine_rows[-2]  # the long prompt takes a slot too
    names = [checked.add(sizes.context, max_output(sizes)) for _ in range(num_rows)]
    checked.until_each_has(names, 4)

    def turn() -> tuple[float, list[RequestUpdate]]:
        begin = time.perf_counter()
        updates = engine.step()
        return (time.perf_counter() - begin) * 1e3, updates

    alone = [turn()[0] for _ in range(num_steps)]
    long, beside, updates = checked.add(sizes.long_prompt, max_tokens=8), [], []
    begin = time.perf_counter()
    while all(update.request_id != long for update in updates):
        itl_ms, updates = turn()
        beside.append(itl_ms)
    seconds = time.perf_counter() - begin
    return {
        "rows": num_rows,
        "prompt_tokens": sizes.long_prompt,
        "token_budget": sizes.token_budget,
        "itl_ms_alone": float(np.median(alone)),
        "itl_ms_beside_median": float(np.median(beside)),
        "itl_ms_beside_most": max(beside),
        "prompt_tokens_per_s": sizes.long_prompt / seconds,
    }


def max_output(sizes: Sizes) -> int:
    """Tokens that no request reaches: what it gets while the other prompts are computed, twice as
    long as that should take, and the measured steps."""
    prompts = max(sizes.engine_rows) * sizes.context
    return 2 * prompts // sizes.token_budget + 4 * sizes.engine_steps


def scheduler_config(sizes: Sizes) -> SchedulerConfig:
    """Pages for the most rows at their longest, and for the long prompt beside them."""
    longest = sizes.context + max_output(sizes)
    max_model_len = max(longest, sizes.long_prompt + 8, sizes.token_budget + 9)
    pages = max(sizes.engine_rows) * (longest // sizes.page_size + 2)
    return SchedulerConfig(
        max_num_seqs=max(sizes.engine_rows),
        max_num_batched_tokens=sizes.token_budget,
        prefill_chunk=sizes.token_budget,
        page_size=sizes.page_size,
        num_pages=1 + pages + max_model_len // sizes.page_size,
        max_model_len=max_model_len,
        enable_prefix_cache=False,
    )


def input_processor(
    model: ModelConfig, limits: SchedulerConfig, scheduler: Scheduler
) -> InputProcessor:
    """A vocabulary of the model's size: bytes, then a word for each other id."""
    vocabulary = {char: byte for char, byte in BYTE_ALPHABET.items()}
    vocabulary |= {f"<{i}>": i for i in range(len(vocabulary), model.vocab_size)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = Tokenizer(backend)
    return InputProcessor(
        tokenizer,
        chat_template_of(tokenizer),
        ModelLimits("check", model.vocab_size, limits.max_model_len, eos_token_ids=()),
        scheduler.why_too_large,
    )


def random_params(shapes: Any, dtype: jnp.dtype, mesh: Mesh) -> Any:
    """Draws weights on the device, array by array: the host never holds any."""
    keys = (jax.random.key(i) for i in itertools.count())

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def draw(key, shape, axes):
        values = jax.random.normal(key, shape, dtype) * jnp.asarray(WEIGHT_STDDEV, dtype)
        return jax.lax.with_sharding_constraint(values, sharding_of(mesh, axes))

    def make(path, spec: ParamShape):
        if is_norm(path[-1].key):
            sharding = sharding_of(mesh, spec.logical_axes)
            return jnp.ones(spec.shape, jnp.float32, device=sharding)
        return draw(next(keys), spec.shape, spec.logical_axes)

    is_shape = lambda x: isinstance(x, ParamShape)  # noqa: E731
    return jax.tree_util.tree_map_with_path(make, shapes, is_leaf=is_shape)
