"""Reads `tests/golden`: checkpoints as flat weights, recordings as arrays, the index."""

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from oracle.transformer import Array, Net

ROOT = Path(__file__).parents[1] / "golden"

LLADA = {
    "attn_norm": "attn_norm.weight", "q": "q_proj.weight", "k": "k_proj.weight",
    "v": "v_proj.weight", "o": "attn_out.weight", "mlp_norm": "ff_norm.weight",
    "gate": "ff_proj.weight", "up": "up_proj.weight", "down": "ff_out.weight",
}  # fmt: skip
DREAM = {
    "attn_norm": "input_layernorm.weight", "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight", "v": "self_attn.v_proj.weight",
    "q_bias": "self_attn.q_proj.bias", "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias", "o": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight", "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight", "down": "mlp.down_proj.weight",
}  # fmt: skip


def index() -> dict[str, dict[str, Any]]:
    """File -> checkpoint, NFE, settings."""
    return json.loads((ROOT / "index.json").read_text())


def recording(name: str) -> dict[str, Array]:
    with np.load(ROOT / name) as file:
        arrays = {key: file[key] for key in file.files}
    if "centroids_pass" in arrays:  # kept for some passes only: NaN for the others
        kept = arrays["centroids_after"]
        full = np.full((len(arrays["pass_kind"]), *kept.shape[1:]), np.nan, kept.dtype)
        full[arrays["centroids_pass"]] = kept
        arrays["centroids_after"] = full
    return arrays


@functools.cache
def tensors(checkpoint: str) -> dict[str, Array]:
    """All tensors of a checkpoint, by their original names."""
    found = {}
    for shard in sorted((ROOT / checkpoint).glob("*.safetensors")):
        found |= load_file(shard)
    return found


def flat_weights(checkpoint: str) -> dict[str, Array]:
    """The oracle's names, matrices [in, out], in float32."""
    raw = tensors(checkpoint)
    llada = checkpoint.startswith("llada")
    prefix = "model.transformer." if llada else "model."
    ends = (
        ("wte.weight", "ln_f.weight", "ff_out.weight")
        if llada
        else ("embed_tokens.weight", "norm.weight", "")
    )
    flat = {"embed": raw[prefix + ends[0]], "norm": raw[prefix + ends[1]]}
    flat["head"] = (raw[prefix + ends[2]] if llada else raw["lm_head.weight"]).T
    for layer in range(4):
        for ours, theirs in (LLADA if llada else DREAM).items():
            stem = f"blocks.{layer}" if llada else f"layers.{layer}"
            value = raw[f"{prefix}{stem}.{theirs}"]
            flat[f"layers.{layer}.{ours}"] = value.T if value.ndim == 2 else value
    return flat


def net(checkpoint: str, dtype: Any = np.float64) -> Net:
    """The oracle with a recorded checkpoint."""
    c = json.loads((ROOT / checkpoint / "config.json").read_text())
    llada = checkpoint.startswith("llada")
    heads, width = (
        (c["n_heads"], c["d_model"]) if llada else (c["num_attention_heads"], c["hidden_size"])
    )
    sizes = SimpleNamespace(
        num_layers=c["n_layers"] if llada else c["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=(c["n_kv_heads"] or heads) if llada else c["num_key_value_heads"],
        head_dim=width // heads,
        rope_theta=c["rope_theta"],
        norm_eps=c["rms_norm_eps"],
        vocab_size=c["vocab_size"],
        mask_token=c["mask_token_id"],
        eos_token=c["eos_token_id"],
        shift_logits=not llada,
    )
    return Net(sizes, flat_weights(checkpoint), dtype)
