"""Scores, softmax and divergence in plain JAX, for the references of the ops.

Symbols: B batch, R rows, T keys, H query heads, Hk key/value heads, D head size.
"""

import jax.numpy as jnp
from jax import Array, lax

from polestar_jax.kernels.stream import FLOOR, NEGATIVE


def _precision(dtype: jnp.dtype) -> lax.Precision:
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def scaled_scores(q: Array, k: Array, mask: Array) -> Array:
    """q k^T / sqrt(D), float32 [B, H, R, T]: q [B, R, H, D], k [B, Hk, T, D], mask [B, T]."""
    b, r, h, d = q.shape
    hk, t = k.shape[1], k.shape[2]
    grouped = q.transpose(0, 2, 1, 3).reshape(b, hk, h // hk * r, d)
    scores = lax.dot_general(
        grouped,
        k,
        (((3,), (3,)), ((0, 1), (0, 1))),
        precision=_precision(q.dtype),
        preferred_element_type=jnp.float32,
    ).reshape(b, h, r, t)
    return jnp.where(mask[:, None, None, :], scores * d**-0.5, NEGATIVE)


def normalise(scores: Array) -> tuple[Array, Array]:
    """Softmax over keys, float32 [B, H, R, T], and its log-normaliser [B, H, R]."""
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / total, (top + jnp.log(total))[..., 0]


def weighted_values(probs: Array, v: Array) -> Array:
    """probs [B, H, R, T] times v [B, Hk, T, D] -> [B, R, H * D] in v's dtype."""
    b, h, r, t = probs.shape
    hk, d = v.shape[1], v.shape[3]
    out = lax.dot_general(
        probs.astype(v.dtype).reshape(b, hk, h // hk * r, t),
        v,
        (((3,), (2,)), ((0, 1), (0, 1))),
        precision=_precision(v.dtype),
        preferred_element_type=jnp.float32,
    )
    out = out.astype(v.dtype).reshape(b, h, r, d)
    return out.transpose(0, 2, 1, 3).reshape(b, r, h * d)


def kl_divergence(
    scores: Array, normaliser: Array, old_scores: Array, old_normaliser: Array, floor: str
) -> Array:
    """max(0, KL(now || before)), float32 [B, H, R], from scores [B, H, R, T] and normalisers.

    floor "clip": log max(p, 1e-12) (tokens); "add": log(p + 1e-12) (clusters).
    """
    p = jnp.exp(scores - normaliser[..., None])
    q = jnp.exp(old_scores.astype(jnp.float32) - old_normaliser[..., None])
    if floor == "clip":
        gap = jnp.log(jnp.maximum(p, FLOOR)) - jnp.log(jnp.maximum(q, FLOOR))
    else:
        gap = jnp.log(p + FLOOR) - jnp.log(q + FLOOR)
    return jnp.maximum(jnp.sum(p * gap, axis=-1), 0.0)
