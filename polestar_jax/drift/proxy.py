"""Proxy attention: what each cluster's centroid attends to, and how far that drifted."""

import jax.numpy as jnp
from jax import Array

from polestar_jax.attention import attention_scores, normalise

PROBABILITY_FLOOR = 1e-12


def proxy_drift(
    queries: Array, raw_keys: Array, mask: Array, previous: Array, previous_normaliser: Array
) -> tuple[Array, Array, Array]:
    """Attention of centroid queries and its KL drift since the previous refresh or opening.

    No rotary positions: a centroid has none (paper, cluster drift).

    Args:
        queries: [B, K, H, D] of the normed centroids.
        raw_keys: un-rotated keys [B, Hk, T, D].
        mask: bool [B, T], keys that count.
        previous, previous_normaliser: float32 [B, H, K, T] scores and [B, H, K].

    Returns:
        scores [B, H, K, T], log-normaliser [B, H, K], drift [B, K]: mean over heads of
        max(0, sum p (log(p + 1e-12) - log(q + 1e-12))).
    """
    scores, normaliser = proxy_scores(queries, raw_keys, mask)
    p = jnp.exp(scores - normaliser[..., None])
    q = jnp.exp(previous.astype(jnp.float32) - previous_normaliser[..., None])
    terms = p * (jnp.log(p + PROBABILITY_FLOOR) - jnp.log(q + PROBABILITY_FLOOR))
    drift = jnp.mean(jnp.maximum(jnp.sum(terms, axis=-1), 0.0), axis=1)
    return scores, normaliser, drift


def proxy_scores(queries: Array, raw_keys: Array, mask: Array) -> tuple[Array, Array]:
    """Scores [B, H, K, T] and log-normaliser [B, H, K] of the centroid queries."""
    scores = attention_scores(queries, raw_keys, mask)
    return scores, normalise(scores)[1]
