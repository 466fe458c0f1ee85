"""The plain forward: every row of every layer, no cache. What `Model.logits` runs."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from polestar_jax.models.attention import attend
from polestar_jax.models.config import ModelConfig
from polestar_jax.models.rope import apply_rope, rope_tables
from polestar_jax.models.transformer import Params, Transformer, abstract_transformer


def forward(config: ModelConfig, params: Params, tokens: Array, key_mask: Array) -> Array:
    """Logits of a whole sequence under bidirectional attention.

    Args:
        tokens: int32 [B, T].
        key_mask: bool [B, T], False at left pads. They are hidden from every row, and positions
            count from the first real token; what comes out at a pad is meaningless.

    Returns:
        float32 [B, T, V], V the legal tokens; row i is what the network puts out at i (Dream
        predicts token i from row i - 1; nothing is shifted here).
    """
    embed: Any = params["embed"]
    graph, _ = abstract_transformer(config, embed[...].dtype)
    model = nnx.merge(graph, params)
    tables = position_tables(config, key_mask)
    x = model.embed_tokens(tokens)
    for layer in range(config.num_layers):
        x = full_layer(model, layer, x, tables, key_mask)
    return model.logits(x)[..., : config.vocab_size]


jitted_forward = partial(jax.jit, static_argnums=0)(forward)


def position_tables(config: ModelConfig, key_mask: Array) -> tuple[Array, Array]:
    """Rotary tables [B, T, D/2] with position 0 at each row's first real token."""
    pads = jnp.sum(~key_mask, axis=1, keepdims=True, dtype=jnp.int32)
    positions = jnp.arange(key_mask.shape[1], dtype=jnp.int32)[None] - pads
    return rope_tables(jnp.maximum(positions, 0), config.head_dim, config.rope_theta)


def full_layer(
    model: Transformer, layer: int, x: Array, tables: tuple[Array, Array], key_mask: Array
) -> Array:
    """One layer for all rows: x [B, T, M] -> [B, T, M]."""
    normed = model.normed(layer, "attn_norm", x)
    k, v = model.key_value(layer, normed)
    q = apply_rope(model.query(layer, normed), *tables)
    keys, values = apply_rope(k, *tables).transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    return model.finish(layer, x, attend(q, keys, values, key_mask))
