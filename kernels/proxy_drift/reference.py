"""The op in plain JAX: what every back end without the kernel runs."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from polestar_jax.models.attention import kl_divergence, normalise, scaled_scores


def proxy_drift(
    q: Array,
    k: Array,
    pad: Array,
    previous: tuple[Array, Array] | None,
    *,
    scores_dtype: Any,
) -> tuple[Array, Array, Array | None]:
    """Scores [B, H, K, T], normaliser and KL [B, H, K]."""
    scores = scaled_scores(q, k, jnp.arange(k.shape[2])[None, :] >= pad[:, None])
    _, normaliser = normalise(scores)
    kl = None
    if previous is not None:
        kl = kl_divergence(scores, normaliser, *previous, floor="add")
    return scores.astype(scores_dtype), normaliser, kl
