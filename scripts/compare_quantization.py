#!/usr/bin/env python
"""What int8 weights and 8-bit KV pages do to a model's logits, against float32.

    python scripts/compare_quantization.py --model=smollm2-135m --text=kjv.txt \
        --golden=tests/data/golden/smollm2_135m.json

Per setting, over windows spread along the text: the mean and the 99th percentile of the KL
divergence of its next-token distributions from the exact ones (nats), how often both have the same
likeliest token, and the ratio of perplexities. Of the golden prompts' greedy tokens: how many are
the exact model's at their place, and how many come before the first that is not.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from jserve.checkpoint.mapping import load_params
from jserve.checkpoint.resolve import open_checkpoint
from jserve.config import DEFAULT_CACHE_DIR
from jserve.llm import LLM
from jserve.models.config import ModelConfig
from jserve.models.decoder import decoder_apply, head_of, logits
from jserve.models.families import model_config_from_hf
from jserve.models.head_layout import head_layout
from jserve.models.quantize import Quantization
from jserve.runner.kv_cache import KV_DTYPES, layout_of, make_pool
from jserve.runner.kv_scales import TEXT, int8_scales
from jserve.runner.mesh import make_mesh
from jserve.runner.step import StepOptions, StepTokens, make_attend
from jserve.sampling_params import SamplingParams
from jserve.text.gguf_tokenizer import tokenizer_from_gguf
from jserve.text.tokenizer import Tokenizer, load_tokenizer
from pallas_kernels.dispatch import Backend
from scheduler.bucket import Bucket

_MODEL = flags.DEFINE_string("model", "smollm2-135m", "A known model or a path.")
_TEXT = flags.DEFINE_string("text", None, "A UTF-8 file.", required=True)
_GOLDEN = flags.DEFINE_string("golden", None, "Golden cases; without them none are answered.")
_NUM_WINDOWS = flags.DEFINE_integer("num_windows", 8, "Windows to compare.", lower_bound=1)

WINDOW, PAGE_SIZE, CHUNK = 512, 16, 64
NUM_PAGES = WINDOW // PAGE_SIZE
EXACT = ("none", "auto")
SETTINGS = [("w8a8", "auto"), ("none", "int8"), ("none", "fp8"), ("w8a8", "int8")]
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


class Rounded(NamedTuple):
    """A model under one setting."""

    hidden: Callable[[jax.Array], jax.Array]  # ids i32[WINDOW] -> [D, WINDOW]
    head: Any


class Source:
    """A checkpoint, opened."""

    def __init__(self) -> None:
        self.checkpoint = open_checkpoint(_MODEL.value, DEFAULT_CACHE_DIR)
        self.model: ModelConfig = model_config_from_hf(
            self.checkpoint.config, self.checkpoint.generation_config
        )
        self.tokenizer: Tokenizer = (
            tokenizer_from_gguf(self.checkpoint.gguf_metadata)
            if self.checkpoint.gguf_metadata is not None
            else load_tokenizer(cast(Path, self.checkpoint.tokenizer_folder))
        )

    def rounded(self, quantization: str, kv_cache_dtype: str) -> Rounded:
        """Loads the model and returns it with pages of their own, as an engine has them."""
        model, heads, float32 = self.model, head_layout(self.model), jnp.dtype(jnp.float32)
        params = load_params(
            *(self.checkpoint, model, heads, float32),
            quantization=cast(Quantization, quantization),
        )
        options = StepOptions(
            *(model, make_mesh(1), Backend.XLA, "switched", NUM_PAGES),
            max_tokens=WINDOW,
            dtype=float32,
        )
        if kv_cache_dtype == "int8":
            ids = self.tokenizer.encode(TEXT)
            params["kv_scales"] = int8_scales(params, options, heads, PAGE_SIZE, ids)
        kv_dtype = KV_DTYPES.get(kv_cache_dtype, float32)
        layout = layout_of(Backend.XLA, model, heads, kv_dtype)
        pool = make_pool(model, layout, kv_dtype, NUM_PAGES + 1, PAGE_SIZE, options.mesh)
        row = {
            "kv_lens": jnp.asarray([WINDOW], jnp.int32),
            "page_indices": jnp.arange(1, NUM_PAGES + 1, dtype=jnp.int32)[None],
            "cu_q_lens": jnp.asarray([0, WINDOW], jnp.int32),
            "distribution": jnp.asarray([0, 1, 1], jnp.int32),
        }

        @jax.jit
        def hidden(params, pool, ids):
            attend = make_attend(options, Bucket(WINDOW, 1, False), row, params.get("kv_scales"))
            tokens = StepTokens(ids, jnp.arange(WINDOW, dtype=jnp.int32))
            return decoder_apply(params, model, tokens, pool, attend, "switched")[0]

        return Rounded(partial(hidden, params, pool), head_of(params, model))

    def windows(self) -> list[np.ndarray]:
        tokenizer, text = self.tokenizer, Path(_TEXT.value).read_text(encoding="utf-8")
        ids = tokenizer.encode(text, add_special_tokens=False)
        bos = [tokenizer.bos_token_id] if tokenizer.add_bos else []
        step = WINDOW - len(bos)
        starts = np.linspace(0, len(ids) // step - 1, _NUM_WINDOWS.value).astype(int) * step
        return [np.asarray(bos + ids[i : i + step], np.int32) for i in starts]


def make_compare(model: ModelConfig) -> Callable[..., Any]:
    """compare(exact head and hidden, head and hidden, targets i32[WINDOW]) -> per token: KL, what
    is added to its negative log-probability, and whether the likeliest is the same."""

    def of_chunk(exact_head, head, chunk):
        exact_hidden, hidden, targets = chunk
        exact = jax.nn.log_softmax(logits(exact_head, model, exact_hidden))
        found = jax.nn.log_softmax(logits(head, model, hidden))
        added = jnp.take_along_axis(exact - found, targets[:, None], axis=1)[:, 0]
        kl = jnp.sum(jnp.exp(exact) * (exact - found), axis=1)
        return kl, added, jnp.argmax(exact, axis=1) == jnp.argmax(found, axis=1)

    @jax.jit
    def compare(exact_head, exact_hidden, head, hidden, targets):
        def chunks(x):  # [D, WINDOW] -> [WINDOW / CHUNK, D, CHUNK]
            return x.reshape(x.shape[0], -1, CHUNK).swapaxes(0, 1)

        parts = chunks(exact_hidden), chunks(hidden), targets.reshape(-1, CHUNK)
        return jax.lax.map(partial(of_chunk, exact_head, head), parts)

    return compare


def compare_logits(source: Source) -> None:
    exact, windows, compare = source.rounded(*EXACT), source.windows(), make_compare(source.model)
    for setting in SETTINGS:
        found, results = source.rounded(*setting), []
        for ids in windows:
            result = compare(
                *(exact.head, exact.hidden(ids), found.head, found.hidden(ids)), np.roll(ids, -1)
            )
            results.append([np.ravel(x)[:-1] for x in result])  # after the last token comes nothing
        kl, added, same = (np.concatenate(x) for x in zip(*results, strict=True))
        print(
            f"weights {setting[0]:4} KV {setting[1]:4}: KL {kl.mean():.5f}, 99% "
            f"{np.quantile(kl, 0.99):.4f}; same likeliest {same.mean():.2%}; "
            f"perplexity x {np.exp(added.mean()):.5f}",
            flush=True,
        )


def compare_greedy(cases: list[dict[str, Any]]) -> None:
    prompts = [case["prompt_ids"] for case in cases]
    exact = np.asarray([case["output_ids"][: GREEDY.max_tokens] for case in cases])
    for quantization, kv_cache_dtype in [EXACT, *SETTINGS]:
        with LLM(
            model=_MODEL.value,
            dtype="float32",
            max_model_len=2048,
            max_num_seqs=8,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
        ) as llm:
            found = np.asarray([o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY)])
        same = found == exact
        before = np.cumprod(same, axis=1).sum(axis=1)
        print(
            f"weights {quantization:4} KV {kv_cache_dtype:4}: {same.mean():.1%} of the greedy "
            f"tokens at their place, {before.mean():.1f} of 64 before the first other",
            flush=True,
        )


def main(_: list[str]) -> None:
    compare_logits(Source())
    if _GOLDEN.value:
        compare_greedy(json.loads(Path(_GOLDEN.value).read_text())["cases"])


if __name__ == "__main__":
    app.run(main)
