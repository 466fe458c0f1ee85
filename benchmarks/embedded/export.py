"""Write trained parameters as a Hugging Face LLaDA checkpoint."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import save_file

from benchmarks.embedded.network import Stacked
from benchmarks.embedded.plan import Plan
from benchmarks.embedded.vocabulary import save_tokenizer

_OUTER = {"embed": "wte", "norm": "ln_f", "head": "ff_out"}
_LAYER = {
    "attn_norm": "attn_norm",
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "attn_out",
    "mlp_norm": "ff_norm",
    "gate": "ff_proj",
    "up": "up_proj",
    "down": "ff_out",
}


def torch_tensors(params: Stacked) -> dict[str, np.ndarray]:
    """LLaDA's tensor names, matrices [out, in], float16."""
    tensors = {}
    for name, value in jax.device_get(params).items():
        if name in _OUTER:
            tensor = value.T if name == "head" else value
            tensors[f"model.transformer.{_OUTER[name]}.weight"] = tensor
            continue
        for layer, tensor in enumerate(value):
            full = f"model.transformer.blocks.{layer}.{_LAYER[name]}.weight"
            tensors[full] = tensor.T
    return {name: np.ascontiguousarray(t, dtype=np.float16) for name, t in tensors.items()}


def export(plan: Plan, params: Stacked, folder: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer's files into `folder`.

    They are made in a temporary sibling and then moved, the weights last.
    """
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        save_tokenizer(temporary)
        (temporary / "config.json").write_text(json.dumps(plan.hf_config(), indent=2) + "\n")
        save_file(
            torch_tensors(params), str(temporary / "model.safetensors"), metadata={"format": "pt"}
        )
        for path in sorted(temporary.iterdir()):
            path.chmod(0o644)
            path.replace(folder / path.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
