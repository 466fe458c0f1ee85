"""The op in plain JAX: what every back end without the kernel runs."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from polestar_jax.kernels.layout import rotary_tables, rotate, rotate_queries
from polestar_jax.kernels.softmax import kl_divergence, normalise, scaled_scores, weighted_values


def drift_attention(
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    pad: Array,
    previous: tuple[Array, Array] | None,
    *,
    theta: float,
    scores_dtype: Any,
) -> tuple[Array, Array, Array, Array | None]:
    """Attended [B, R, H * D], scores [B, H, R, T], normaliser and KL [B, H, R]."""
    t, d = k.shape[2:]
    q = rotate_queries(q, positions, theta)
    cos, sin = rotary_tables(jnp.arange(t)[None, :] - pad[:, None], d, theta)
    k = rotate(k, (cos[:, None], sin[:, None]))
    scores = scaled_scores(q, k, jnp.arange(t)[None, :] >= pad[:, None])
    probs, normaliser = normalise(scores)
    kl = None
    if previous is not None:
        kl = kl_divergence(scores, normaliser, *previous, floor="clip")
    return weighted_values(probs, v), scores.astype(scores_dtype), normaliser, kl
