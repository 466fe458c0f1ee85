"""Attention in plain JAX: what every back end without the kernels runs, and their references.

Bidirectional, grouped-query aware, of some rows over all cached keys. Symbols: B batch, R query
rows, T keys, H query heads, Hk key/value heads, D head size.
"""

import jax.numpy as jnp
from jax import Array, lax

from polestar_jax.models.transformer import precision_of

QUERY_TILE = 128  # rows of scores that exist at once; a full pass never holds [H, T, T]
FLOOR = 1e-12  # under probabilities inside a drift's logarithms
LOG_FLOOR = -27.631021115928547  # its logarithm
NEGATIVE = -1e30  # score of a masked key: finite, so that differences stay defined


def scaled_scores(q: Array, k: Array, mask: Array) -> Array:
    """q k^T / sqrt(D), float32 [B, H, R, T]: q [B, R, H, D], k [B, Hk, T, D], mask [B, T]."""
    b, r, h, d = q.shape
    hk, t = k.shape[1], k.shape[2]
    scores = lax.dot_general(
        q.transpose(0, 2, 1, 3).reshape(b, hk, h // hk * r, d),
        k,
        (((3,), (3,)), ((0, 1), (0, 1))),
        precision=precision_of(q.dtype),
        preferred_element_type=jnp.float32,
    ).reshape(b, h, r, t)
    return jnp.where(mask[:, None, None, :], scores * d**-0.5, NEGATIVE)


def weighted_values(probs: Array, v: Array) -> Array:
    """probs [B, H, R, T] times v [B, Hk, T, D] -> [B, R, H * D] in v's dtype."""
    b, h, r, t = probs.shape
    hk, d = v.shape[1], v.shape[3]
    out = lax.dot_general(
        probs.astype(v.dtype).reshape(b, hk, h // hk * r, t),
        v,
        (((3,), (2,)), ((0, 1), (0, 1))),
        precision=precision_of(v.dtype),
    )
    return out.reshape(b, h, r, d).transpose(0, 2, 1, 3).reshape(b, r, h * d)


def normalise(scores: Array) -> tuple[Array, Array]:
    """Softmax over keys and its log-normaliser: ([B, H, R, T], [B, H, R]), float32."""
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / total, (top + jnp.log(total))[..., 0]


def attend(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """softmax(q k^T / sqrt D) v: q [B, R, H, D], k and v [B, Hk, T, D] -> [B, R, H * D].

    Many query rows are taken in tiles, so that at most [B, H, 1.5 QUERY_TILE, T] scores exist.
    """
    b, rows, h, d = q.shape
    if 2 * rows <= 3 * QUERY_TILE:
        return weighted_values(normalise(scaled_scores(q, k, mask))[0], v)
    tiles = -(-rows // QUERY_TILE)
    size = -(-rows // (16 * tiles)) * 16  # as little padding as tensor cores allow
    padded = jnp.pad(q.reshape(b, rows, h * d), ((0, 0), (0, tiles * size - rows), (0, 0)))

    def one(index: Array, out: Array) -> Array:
        # Queries are replaced by their results, tile by tile: no second array of that size.
        tile = lax.dynamic_slice_in_dim(out, index * size, size, axis=1)
        scores = scaled_scores(tile.reshape(b, size, h, d), k, mask)
        attended = weighted_values(normalise(scores)[0], v).astype(q.dtype)
        return lax.dynamic_update_slice_in_dim(out, attended, index * size, axis=1)

    return lax.fori_loop(0, tiles, one, padded)[:, :rows]


def kl_divergence(
    scores: Array, normaliser: Array, old_scores: Array, old_normaliser: Array, floor: str
) -> Array:
    """max(0, KL(now || before)), float32 [B, H, R], from scores [B, H, R, T] and normalisers.

    floor "clip": logarithms are log max(p, 1e-12) (tokens); "add": log(p + 1e-12) (clusters).
    """
    log_p = scores - normaliser[..., None]
    log_q = old_scores.astype(jnp.float32) - old_normaliser[..., None]
    p = jnp.exp(log_p)
    if floor == "clip":
        gap = jnp.maximum(log_p, LOG_FLOOR) - jnp.maximum(log_q, LOG_FLOOR)
    else:
        gap = jnp.log(p + FLOOR) - jnp.log(jnp.exp(log_q) + FLOOR)
    return jnp.maximum(jnp.sum(p * gap, axis=-1), 0.0)


def attend_with_drift(
    q: Array, k: Array, v: Array, mask: Array, previous: tuple[Array, Array] | None
) -> tuple[Array, Array, Array, Array | None]:
    """Attention and its divergence from the previous pass (arXiv 2607.14107, token drift).

    Args as `attend`, plus the previous pass's scores [B, H, R, T] and log-normaliser [B, H, R].
    Returns (attended [B, R, H * D], scores, log-normaliser, KL [B, H, R] or None).
    """
    scores = scaled_scores(q, k, mask)
    probs, normaliser = normalise(scores)
    kl = None
    if previous is not None:
        kl = kl_divergence(scores, normaliser, *previous, floor="clip")
    return weighted_values(probs, v), scores, normaliser, kl
