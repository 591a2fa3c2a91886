"""Makes the tiny reference models of tests/data/models with Hugging Face transformers.

Run by hand, in an environment of its own (torch 2.13.0, transformers 5.24.0, safetensors); the
results are committed, so neither the tests nor the project need torch. Each model is a folder:
  config.json, model.safetensors   as transformers saves them; bfloat16 weights, random
  reference.npz                    per prompt i: ids_i i32[n], logits_i f32[n, V] for every
                                   position, computed in float32, and num_prompt_i: ids from there
                                   on are the model's own greedy choices
rope_tables.json holds inverse frequencies and attention factors of many rope settings.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

SMALL = dict(
    vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
GEMMA = dict(SMALL, head_dim=16, sliding_window=16, query_pre_attn_scalar=24)
ORIGINAL = 32  # tokens that the rope models were "trained" on; prompts lie below and above
SHORT_AND_LONG = (20, 70)
ROPE = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL,
        "beta_fast": 8.0, "beta_slow": 1.0,
    },
}  # fmt: skip
YARN_MSCALE = {
    "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": ORIGINAL,
    "mscale": 0.7, "mscale_all_dim": 0.4,
}  # fmt: skip
TABLES = [
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 2.0},
    ROPE["llama3"] | {"original_max_position_embeddings": 8192},
    ROPE["llama3"] | {"low_freq_factor": 2.0, "high_freq_factor": 8.0},
    ROPE["yarn"],
    {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096},
    {"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 4096},
    YARN_MSCALE,
    YARN_MSCALE | {"attention_factor": 1.25},
]


def randomize(model: torch.nn.Module, residual_scale: float) -> None:
    """Draws weights that make logits depend on everything: biases, norms, attention patterns.

    Values are rounded to bfloat16, so that a file of half the size holds them exactly.
    residual_scale multiplies what a layer adds to the residual stream.
    """
    generator = torch.Generator().manual_seed(7)
    gemma = "gemma" in model.config.model_type
    for name, param in model.named_parameters():
        values = torch.randn(param.shape, generator=generator)
        if "norm" in name:
            values = values * 0.2 + (0.0 if gemma else 1.0)
        elif "embed_tokens" in name:
            values = values * (0.3 if model.config.tie_word_embeddings else 1.0)
        elif name.endswith("bias"):
            values = values * 0.5
        else:
            values = values * 1.5 / param.shape[1] ** 0.5
        if any(part in name for part in ("o_proj", "down_proj")):
            values = values * residual_scale
        with torch.no_grad():
            param.copy_(values.to(torch.bfloat16).to(torch.float32))


def logits_of(model: torch.nn.Module, ids: list[int]) -> np.ndarray:
    """Returns f32[n, V]: one uncached pass over all of `ids`."""
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0].numpy()


def reference(folder: Path, prompt_lens: tuple[int, ...], num_greedy: int) -> dict[str, np.ndarray]:
    """Runs prompts of these lengths, each on a freshly loaded model, as dynamic rope has state."""
    arrays: dict[str, np.ndarray] = {}
    for i, prompt_len in enumerate(prompt_lens):
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        ids = np.random.default_rng(100 + i).integers(3, 128, prompt_len).tolist()
        for _ in range(num_greedy):
            ids.append(int(logits_of(model, ids)[-1].argmax()))
        arrays[f"ids_{i}"] = np.array(ids, np.int32)
        arrays[f"logits_{i}"] = logits_of(model, ids)
        arrays[f"num_prompt_{i}"] = np.array(prompt_len, np.int32)
    return arrays


def make(
    out: Path,
    name: str,
    kind: str,
    config: dict[str, Any],
    *,
    prompt_lens: tuple[int, ...] = (1, 7, 40),
    num_greedy: int = 8,
    residual_scale: float = 1.0,
    stale_lm_head: bool = False,
    hub_style: dict[str, Any] | None = None,
) -> None:
    """Writes one folder. `hub_style` replaces rope_parameters by the keys of older config files."""
    folder = out / name
    transformers.set_seed(0)
    config_class = "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config"
    model = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, config_class)(**config)
    )
    randomize(model, residual_scale)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    weights_file, config_file = folder / "model.safetensors", folder / "config.json"
    if hub_style is not None:
        saved = json.loads(config_file.read_text())
        saved.pop("rope_parameters")
        saved.pop("layer_types", None)
        config_file.write_text(json.dumps(saved | hub_style, indent=2, sort_keys=True) + "\n")
    np.savez_compressed(folder / "reference.npz", **reference(folder, prompt_lens, num_greedy))
    if stale_lm_head:
        weights = load_file(weights_file)
        generator = torch.Generator().manual_seed(8)
        stale = torch.randn(weights["model.embed_tokens.weight"].shape, generator=generator)
        weights["lm_head.weight"] = stale.to(torch.bfloat16)
        save_file(weights, weights_file, metadata={"format": "pt"})
    print(f"{name}: {sum(f.stat().st_size for f in folder.iterdir()) // 1024} kB")


def make_llamas(out: Path) -> None:
    untied = SMALL | {"tie_word_embeddings": False}
    tied = SMALL | {"tie_word_embeddings": True}
    make(out, "llama", "Llama", untied)
    make(out, "llama_tied", "Llama", tied)
    make(out, "llama_tied_stale_lm_head", "Llama", tied, stale_lm_head=True)
    make(out, "llama_biases", "Llama", untied | {"attention_bias": True, "mlp_bias": True})
    make(
        out, "llama_head_dim", "Llama",
        untied | {"hidden_size": 96, "head_dim": 32, "num_hidden_layers": 1},
    )  # fmt: skip
    make(out, "llama_large_activations", "Llama", untied, residual_scale=2.0**17)
    for kind, rope in ROPE.items():  # copied below, as transformers writes into what it gets
        make(
            out, f"llama_rope_{kind}", "Llama",
            untied | {"max_position_embeddings": ORIGINAL, "rope_parameters": dict(rope)},
            prompt_lens=SHORT_AND_LONG,
            num_greedy=0,  # under dynamic rope each longer pass has other frequencies
            hub_style={"rope_theta": 10000.0, "rope_scaling": dict(rope)},
        )  # fmt: skip


def make_others(out: Path) -> None:
    make(
        out, "mistral_window", "Mistral", SMALL | {"sliding_window": 16},
        prompt_lens=(12, 16, 17, 64),
    )  # fmt: skip
    make(out, "qwen2", "Qwen2", SMALL | {"use_sliding_window": False})
    windows = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    make(out, "qwen2_window", "Qwen2", SMALL | windows)
    # 40 is no multiple of 6 heads, so head_dim cannot be guessed
    make(
        out, "qwen3", "Qwen3",
        SMALL | {"hidden_size": 40, "num_attention_heads": 6, "head_dim": 16},
    )  # fmt: skip
    make(
        out, "gemma2", "Gemma2",
        GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    )  # fmt: skip
    gemma3 = GEMMA | {"num_hidden_layers": 7, "intermediate_size": 32, "num_key_value_heads": 1}
    kinds = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(7)]
    hub_keys = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6}
    make(out, "gemma3", "Gemma3", gemma3, hub_style=hub_keys | {"rope_scaling": None})
    local = {"rope_type": "default", "rope_theta": 1e4}
    scaled = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    ropes = {"sliding_attention": local, "full_attention": scaled}
    make(out, "gemma3_scaled", "Gemma3", gemma3 | {"layer_types": kinds, "rope_parameters": ropes})


def make_rope_tables(path: Path) -> None:
    """Writes what transformers computes for each of TABLES, for 64 wide heads and theta 500000."""
    cases = []
    for rope in TABLES:
        max_position = ORIGINAL if rope["rope_type"] == "dynamic" else 131072
        config = transformers.LlamaConfig(
            **SMALL
            | {"head_dim": 64, "max_position_embeddings": max_position}
            | {"rope_parameters": rope | {"rope_theta": 500000.0}}
        )
        seq_len = 100 if rope["rope_type"] == "dynamic" else None
        inv_freq, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu", seq_len=seq_len)
        cases.append({"rope": rope, "inv_freq": inv_freq.tolist(), "attention_factor": factor})
    path.write_text(json.dumps(cases) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("tests/data/models"))
    out = parser.parse_args().output
    torch.set_num_threads(1)
    make_llamas(out)
    make_others(out)
    make_rope_tables(out / "rope_tables.json")


if __name__ == "__main__":
    main()
