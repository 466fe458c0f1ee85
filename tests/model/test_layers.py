"""Every layer against Hugging Face's own, made bidirectional, with weights through safetensors.

Transformers has no LLaDA; its Llama is the same network under other names, with a causal mask.
"""

import checkpoints
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from polestar_jax.models.forward import full_layer, position_tables
from polestar_jax.models.transformer import abstract_transformer
from polestar_jax.weights import load

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

BATCH, LENGTH = 2, 11
PADS = (0, 4)

LLADA_TO_LLAMA = {
    "model.transformer.wte": "model.embed_tokens",
    "model.transformer.ln_f": "model.norm",
    "model.transformer.ff_out": "lm_head",
}
BLOCK_TO_LLAMA = {
    "attn_norm": "input_layernorm", "ff_norm": "post_attention_layernorm",
    "q_proj": "self_attn.q_proj", "k_proj": "self_attn.k_proj", "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj", "ff_proj": "mlp.gate_proj", "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}  # fmt: skip

CASES = {
    "llada": ("llada", {}),
    "llada-tied-qkv-bias": (
        "llada",
        {"weight_tying": True, "include_qkv_bias": True, "rope_theta": 10000.0, "n_kv_heads": 4},
    ),
    "llada-one-kv-head-large-eps": (
        "llada",
        {"n_kv_heads": 1, "rms_norm_eps": 0.5, "n_layers": 3, "embedding_size": 40},
    ),
    "dream": ("dream", {}),
    "dream-tied": ("dream", {"tie_word_embeddings": True, "rope_theta": 500.0}),
}


def hugging_face(raw: dict, family: str):
    """A random torch model of the same sizes, and the tensor names of our family by its own."""
    llada = family == "llada"
    sizes = {
        "vocab_size": raw.get("embedding_size", raw["vocab_size"]),
        "hidden_size": raw["d_model" if llada else "hidden_size"],
        "num_hidden_layers": raw["n_layers" if llada else "num_hidden_layers"],
        "num_attention_heads": raw["n_heads" if llada else "num_attention_heads"],
        "num_key_value_heads": raw["n_kv_heads" if llada else "num_key_value_heads"],
        "intermediate_size": raw["mlp_hidden_size" if llada else "intermediate_size"],
        "rms_norm_eps": raw["rms_norm_eps"],
        "tie_word_embeddings": raw.get("weight_tying" if llada else "tie_word_embeddings", False),
        "rope_theta": raw["rope_theta"],
        "attn_implementation": "eager",
    }
    torch.manual_seed(0)
    if llada:
        bias = raw.get("include_qkv_bias", False)
        config = transformers.LlamaConfig(**sizes, attention_bias=bias)
        model = transformers.LlamaForCausalLM(config)
    else:
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes))
    with torch.no_grad():
        for name, value in model.named_parameters():
            centre = 1.0 if "norm" in name else 0.0
            value.copy_(centre + 0.5 * torch.randn_like(value))
            if name.endswith("o_proj.bias"):  # neither family has one
                value.zero_()
    return model.eval()


def llama_name(tensor: str) -> str:
    """The tensor of Llama that holds what LLaDA calls `tensor`."""
    stem, kind = tensor.rsplit(".", 1)
    if stem in LLADA_TO_LLAMA:
        return f"{LLADA_TO_LLAMA[stem]}.{kind}"
    layer, part = stem.removeprefix("model.transformer.blocks.").split(".")
    return f"model.layers.{layer}.{BLOCK_TO_LLAMA[part]}.{kind}"


@pytest.mark.parametrize("case", CASES)
def test_every_layer_and_the_logits_equal_hugging_face(case, tmp_path):
    family, changes = CASES[case]
    raw = checkpoints.SMALL[family] | changes
    theirs = hugging_face(raw, family)
    inverse = 1 / raw["rope_theta"] ** (np.arange(0, 4, 2) / 4)
    np.testing.assert_allclose(theirs.model.rotary_emb.inv_freq.numpy(), inverse, rtol=1e-6)
    state = {k: v.numpy() for k, v in theirs.state_dict().items()}
    renamed = {
        name: state[llama_name(name) if family == "llada" else name]
        for name in checkpoints.stored_shapes(checkpoints.config(raw))
    }
    ours = load(checkpoints.write(tmp_path / "checkpoint", raw, [renamed]))

    tokens = np.random.default_rng(1).integers(0, raw["vocab_size"], (BATCH, LENGTH))
    key_mask = np.arange(LENGTH)[None] >= np.array(PADS)[:, None]
    inputs, outputs = [], []

    def record(module, args, kwargs, out):
        inputs.append(args[0] if args else kwargs["hidden_states"])
        outputs.append(out[0] if isinstance(out, tuple) else out)

    for layer in theirs.model.layers:
        layer.register_forward_hook(record, with_kwargs=True)
    with torch.no_grad():
        expected = theirs(
            input_ids=torch.from_numpy(tokens),
            attention_mask=torch.where(torch.from_numpy(key_mask), 0.0, -1e30)[
                :, None, None, :
            ].expand(BATCH, 1, LENGTH, LENGTH),
            position_ids=torch.from_numpy(np.cumsum(key_mask, 1) - 1).clamp(min=0),
            use_cache=False,
        ).logits.numpy()

    model = nnx.merge(abstract_transformer(ours.config, ours.dtype)[0], ours.params)
    tables = position_tables(ours.config, jnp.asarray(key_mask))
    assert len(inputs) == ours.config.num_layers
    for layer, (x, y) in enumerate(zip(inputs, outputs)):
        got = full_layer(model, layer, jnp.asarray(x.numpy()), tables, jnp.asarray(key_mask))
        np.testing.assert_allclose(
            np.asarray(got)[key_mask], y.numpy()[key_mask], rtol=1e-4, atol=1e-4
        )
    got = np.asarray(ours.logits(tokens, key_mask))
    legal = expected[..., : raw["vocab_size"]]
    np.testing.assert_allclose(got[key_mask], legal[key_mask], rtol=1e-4, atol=1e-4)
