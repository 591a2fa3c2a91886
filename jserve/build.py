"""Puts an engine together: the one composition root, which alone knows every part."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any, cast, get_args

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jserve.checkpoint.mapping import load_params
from jserve.checkpoint.resolve import open_checkpoint
from jserve.checkpoint.source import Checkpoint
from jserve.config import EngineConfig, RunnerSettings, parse_classes, scheduler_config
from jserve.engine.async_engine import AsyncEngine
from jserve.engine.engine import Engine
from jserve.engine.input_processor import InputProcessor
from jserve.engine.metrics import EngineMetrics
from jserve.engine.prompt_input import ModelLimits
from jserve.engine.request_log import RequestLog
from jserve.engine.step_log import StepLog
from jserve.engine.vllm_metrics import VllmMetrics
from jserve.errors import CheckpointError, ConfigError
from jserve.models.config import ModelConfig
from jserve.models.decoder import BEST_LOOP, LayerLoop, head_of
from jserve.models.families import model_config_from_hf
from jserve.models.head_layout import HeadLayout, head_layout
from jserve.models.quantize import Quantization
from jserve.runner import kv_scales
from jserve.runner.compile import (
    compile_page_copies,
    compile_steps,
    enable_compilation_cache,
    give_back_memory,
    keep_freed_memory,
    on_each_compilation,
)
from jserve.runner.kv_cache import (
    KV_DTYPES,
    choose_num_pages,
    layout_of,
    make_pool,
    page_size_for,
)
from jserve.runner.mesh import make_mesh, replicated, sharding_of
from jserve.runner.platform import set_compiler_flags
from jserve.runner.profiler import Profiler
from jserve.runner.runner import Runner
from jserve.runner.step import StepOptions, StepState, make_sampler_state, why_unsupported
from jserve.runner.swap import SwapSpace
from jserve.text.chat import chat_template_of, with_chat_template
from jserve.text.gguf_tokenizer import tokenizer_from_gguf
from jserve.text.grammar import GrammarCompiler
from jserve.text.tokenizer import Tokenizer, load_tokenizer
from pallas_kernels.dispatch import Backend, backend_for
from pallas_kernels.kv_layout import PoolLayout, bytes_per_page
from scheduler.bucket import INVARIANT_GROUP, Bucket, make_buckets, make_invariant_buckets
from scheduler.config import SchedulerConfig
from scheduler.packer import Packer
from scheduler.scheduler import Scheduler
from scheduler.step_time import FittedStepTime

log = logging.getLogger(__name__)


def build_async_engine(config: EngineConfig) -> AsyncEngine:
    """Returns a warm engine in a thread of its own. Raises what `build_engine` does."""
    profiler = Profiler(config.server.profile_dir) if config.server.profile_dir else None
    limits = config.server
    return AsyncEngine(
        build_engine(config),
        step_timeout_s=limits.step_timeout_s,
        max_unread_updates=limits.max_unread_updates,
        profiler=profiler,
    )


def build_engine(config: EngineConfig) -> Engine:
    """Returns an engine with its weights loaded and every step compiled.

    Raises:
      ConfigError: the settings contradict each other, the model or the devices.
      CheckpointError: the model is missing, damaged or of an unsupported kind.
    """
    begin = time.perf_counter()
    logs = _open_logs(config)
    config = _with_small_steps(config) if config.runner.invariant else config
    _set_up_jax(config)
    checkpoint = open_checkpoint(config.model.model, config.model.cache_dir)
    model = _model_config(config, checkpoint)
    tokenizer = _tokenizer_of(checkpoint, config.model.chat_template)
    mesh = make_mesh(config.parallel.tensor_parallel_size)
    layout = head_layout(model, mesh.size)
    platform = jax.default_backend()
    dtype = _dtype(config.model.dtype, platform)
    backend = _backend(platform, config.runner)
    loop = _layer_loop(config.runner.layer_loop, platform)
    params = load_params(
        *(checkpoint, model, layout, dtype, lambda axes: sharding_of(mesh, axes)),
        stacked=loop == "scanned",
        quantization=cast(Quantization, config.model.quantization),
    )
    loaded = time.perf_counter()
    kv_dtype = KV_DTYPES.get(config.cache.kv_cache_dtype, dtype)
    pool = layout_of(backend, model, layout, kv_dtype)
    limits = _scheduler_config(config, model, pool, kv_dtype, platform)
    buckets = _buckets(config, limits)
    options = StepOptions(
        *(model, mesh, backend, loop, limits.max_pages_per_seq),
        max_tokens=max(bucket.num_tokens for bucket in buckets),
        dtype=dtype,
        processed_logprobs=config.runner.logprobs_mode == "processed",
        invariant=config.runner.invariant,
    )
    _check_attention(options, layout, buckets, limits.page_size, kv_dtype)
    if kv_dtype == jnp.int8:
        ids = tokenizer.encode(kv_scales.TEXT)
        params["kv_scales"] = kv_scales.int8_scales(params, options, layout, limits.page_size, ids)
    state = StepState(
        make_pool(model, pool, kv_dtype, limits.num_pages, limits.page_size, mesh),
        make_sampler_state(limits.max_num_seqs, model.vocab_size, replicated(mesh)),
    )
    _log_memory(params, state, limits)
    programs = compile_steps(options, buckets, params, state)
    swap, state = _swap_space(state, limits.num_host_pages, mesh)
    step_time = FittedStepTime(buckets)
    scheduler = Scheduler(limits, step_time, swap.seconds_per_page if swap else 0.0)
    metrics = _metrics(config, limits, kv_dtype)
    engine = Engine(
        processor=_input_processor(config, checkpoint, model, tokenizer, scheduler),
        scheduler=scheduler,
        packer=Packer(limits, buckets),
        runner=Runner(params, head_of(params, model), state, programs, swap),
        metrics=metrics,
        overlap=config.scheduler.overlap,
        jump_forward=config.runner.jump_forward,
        **logs,
    )
    on_each_compilation(metrics.on_compilation)
    give_back_memory()
    _log_times(begin, loaded)
    return engine


def _open_logs(config: EngineConfig) -> dict[str, Any]:
    """Opens the engine's logs, so that a bad path is known before minutes are spent."""
    settings, logs = config.log, dict[str, Any]()
    if settings.step_log:
        logs["step_log"] = StepLog(settings.step_log)
    if settings.request_log:
        logs["request_log"] = RequestLog(
            settings.request_log,
            with_prompts=settings.request_log_prompts,
            classes=parse_classes(config.scheduler.request_classes),
        )
    return logs


def _set_up_jax(config: EngineConfig) -> None:
    set_compiler_flags()
    keep_freed_memory()
    if config.parallel.emulated_cpu_devices:
        try:
            jax.config.update("jax_num_cpu_devices", config.parallel.emulated_cpu_devices)
        except RuntimeError as error:
            raise ConfigError(
                "emulated_cpu_devices must be set before this process uses jax; start a new one"
            ) from error
    if config.runner.enable_compilation_cache:
        folder = Path(config.model.cache_dir).expanduser() / "compiled"
        try:
            enable_compilation_cache(folder)
        except OSError as error:
            raise ConfigError(
                f"cannot keep compiled programs in {folder} ({error.strerror}); choose another "
                "--cache_dir, or --noenable_compilation_cache"
            ) from error


def _model_config(config: EngineConfig, checkpoint: Checkpoint) -> ModelConfig:
    try:
        model = model_config_from_hf(checkpoint.config, checkpoint.generation_config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{checkpoint.source}: the config has a value of the wrong kind: {error}"
        ) from error
    # Dynamic rope scales with the longest length that is served.
    return replace(model, max_position=_max_model_len(config, model))


def _tokenizer_of(checkpoint: Checkpoint, chat_template: str) -> Tokenizer:
    if checkpoint.gguf_metadata is not None:
        tokenizer = tokenizer_from_gguf(checkpoint.gguf_metadata)
    elif checkpoint.tokenizer_folder is not None:
        tokenizer = load_tokenizer(checkpoint.tokenizer_folder)
    else:
        raise CheckpointError(f"{checkpoint.source}: has no tokenizer files")
    return with_chat_template(tokenizer, chat_template)


def _input_processor(
    config: EngineConfig,
    checkpoint: Checkpoint,
    model: ModelConfig,
    tokenizer: Tokenizer,
    scheduler: Scheduler,
) -> InputProcessor:
    eos_token_ids = tuple({*model.eos_token_ids, *tokenizer.eos_token_ids})
    limits = config.grammar
    grammars = GrammarCompiler(
        tokenizer,
        model.vocab_size,
        eos_token_ids,
        max_bytes=limits.max_grammar_bytes,
        timeout_s=limits.grammar_timeout_s,
        cache_size=limits.grammar_cache_size,
    )
    if eos_token_ids:  # it takes up to a second, and few need it at once
        Thread(target=grammars.warm_up, name="jserve-vocabulary", daemon=True).start()
    return InputProcessor(
        tokenizer,
        chat_template_of(tokenizer),
        ModelLimits(
            name=_served_name(config),
            vocab_size=model.vocab_size,
            max_model_len=scheduler.config.max_model_len,
            eos_token_ids=eos_token_ids,
            hidden_size=model.hidden_size,
            model_type=str(checkpoint.config.get("model_type", "")),
            architectures=tuple(map(str, checkpoint.config.get("architectures") or ())),
            max_num_seqs=scheduler.config.max_num_seqs,
            page_size=scheduler.config.page_size,
        ),
        scheduler.why_too_large,
        classes=scheduler.config.classes,
        queue_timeout_s=config.scheduler.queue_timeout_s,
        new_matcher=lambda structured: grammars.compile(structured).matcher(),
        knows_grammar=grammars.is_known,
    )


def _served_name(config: EngineConfig) -> str:
    return config.model.served_model_name or config.model.model


def _metrics(config: EngineConfig, limits: SchedulerConfig, kv_dtype: jnp.dtype) -> EngineMetrics:
    metrics = EngineMetrics()
    if config.server.vllm_metrics:
        num_pages = limits.num_pages - 1
        cache_config = {
            "block_size": limits.page_size,
            "num_gpu_blocks": num_pages,
            "num_cpu_blocks": limits.num_host_pages,
            "cache_dtype": kv_dtype,
            "enable_prefix_caching": limits.enable_prefix_cache,
            "gpu_memory_utilization": config.cache.kv_memory_fraction,
            "kv_cache_size_tokens": num_pages * limits.page_size,
        }
        metrics.registry.register(VllmMetrics(metrics.registry, _served_name(config), cache_config))
    return metrics


def _with_small_steps(config: EngineConfig) -> EngineConfig:
    """All steps of an invariant engine cost what the largest does: it need not be larger than
    decoding all requests takes."""
    given = config.scheduler
    enough = max(given.max_num_seqs, INVARIANT_GROUP)
    fewer = replace(given, max_num_batched_tokens=min(given.max_num_batched_tokens, enough))
    return replace(config, scheduler=fewer)


def _backend(platform: str, settings: RunnerSettings) -> Backend:
    try:
        backend = backend_for(platform, settings.attention_backend)
    except ValueError as error:
        raise ConfigError(f"attention_backend: {error}") from error
    if settings.invariant and backend is not Backend.XLA:
        raise ConfigError(
            f"invariant: attention by {backend.value} may depend on what shares a step; add "
            "--attention_backend=xla"
        )
    return backend


def _check_attention(
    options: StepOptions,
    layout: HeadLayout,
    buckets: list[Bucket],
    page_size: int,
    kv_dtype: jnp.dtype,
) -> None:
    for bucket in buckets:
        reason = why_unsupported(options, layout, bucket, page_size, kv_dtype)
        if reason:
            raise ConfigError(f"{bucket.num_tokens} tokens in {bucket.num_rows} rows: {reason}")


def _dtype(name: str, platform: str) -> jnp.dtype:
    if name == "auto":
        name = "float32" if platform == "cpu" else "bfloat16"
    return jnp.dtype(name)


def _layer_loop(name: str, platform: str) -> LayerLoop:
    if name == "auto":
        return BEST_LOOP[platform]
    if name not in get_args(LayerLoop):
        raise ConfigError(f"layer_loop={name!r}; use auto, unrolled, switched or scanned")
    return cast(LayerLoop, name)


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """The longest request to serve: as asked, if the model's positions reach so far."""
    wanted = config.model.max_model_len
    rope = model.rope
    most = model.max_position
    if rope.kind == "dynamic":  # the one extension that the trained length does not include
        most = int(most * rope.factor)
    if wanted > most:
        raise ConfigError(f"max_model_len={wanted} is more than the model was made for: {most}")
    return wanted or model.max_position


def _buckets(config: EngineConfig, limits: SchedulerConfig) -> list[Bucket]:
    make = make_invariant_buckets if config.runner.invariant else make_buckets
    return make(limits.max_num_seqs, limits.max_num_batched_tokens)


def _scheduler_config(
    config: EngineConfig, model: ModelConfig, layout: PoolLayout, kv_dtype: jnp.dtype, platform: str
) -> SchedulerConfig:
    """The scheduler's limits, from the settings, the model and the device's memory."""
    max_model_len = model.max_position
    page_size = page_size_for(config.cache, platform)
    num_pages = choose_num_pages(
        config.cache,
        model,
        layout,
        kv_dtype,
        page_size=page_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=max_model_len,
        device=jax.devices()[0],
    )
    page_bytes = bytes_per_page(model.num_layers, page_size, layout, kv_dtype)
    capacity = (num_pages - 1) * page_size
    if capacity < max_model_len:
        log.warning("the KV pool holds %d tokens, less than %d", capacity, max_model_len)
        if not config.model.max_model_len:
            max_model_len = capacity
    return scheduler_config(
        config,
        page_size=page_size,
        num_pages=num_pages,
        max_model_len=max_model_len,
        num_host_pages=_num_host_pages(config, page_bytes),
    )


def _num_host_pages(config: EngineConfig, page_bytes: int) -> int:
    """The pages that the swap space holds, with each device's `page_bytes` of them."""
    space = config.cache.swap_space_bytes
    whole_page = page_bytes * config.parallel.tensor_parallel_size
    if 0 < space < whole_page:
        raise ConfigError(
            f"swap_space_bytes={space} holds no KV page; give {whole_page} or more, or 0 for none"
        )
    return space // whole_page


def _swap_space(
    state: StepState, num_host_pages: int, mesh: Mesh
) -> tuple[SwapSpace | None, StepState]:
    """Host memory for pages, warm, if there is to be any; and the state with its pool again."""
    if not num_host_pages:
        return None, state
    programs = compile_page_copies(mesh, state.kv_pool)
    swap = SwapSpace(mesh, state.kv_pool, *programs, num_host_pages)
    return swap, state._replace(kv_pool=swap.warm_up(state.kv_pool))


def _log_times(begin: float, loaded: float) -> None:
    now = time.perf_counter()
    times = now - begin, loaded - begin, now - loaded
    log.info("engine built in %.2f s: weights %.2f s, the rest %.2f s", *times)


def _log_memory(params, state: StepState, limits: SchedulerConfig) -> None:
    log.info(
        "weights %.1f MiB, KV pool %.1f MiB: %d pages of %d tokens",
        sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / 2**20,
        state.kv_pool.nbytes / 2**20,
        limits.num_pages - 1,
        limits.page_size,
    )
