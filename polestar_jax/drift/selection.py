"""Which clusters are refreshed, and their rows as fixed-size lists."""

import jax.numpy as jnp
from jax import Array

RANK_TIE_ABSOLUTE, RANK_TIE_RELATIVE = 1e-6, 1e-5


def rank_clusters(scores: Array, exists: Array, count: int) -> Array:
    """The `count` clusters with the largest scores, int32 [B, count], -1 where none is left.

    Repeatedly takes the lowest cluster whose score is at least m - (1e-6 + 1e-5 m), m the current
    maximum, so that ties do not hang on rounding.
    """
    chosen = []
    left = exists
    for _ in range(count):
        top = jnp.max(jnp.where(left, scores, -jnp.inf), axis=-1, keepdims=True)
        slack = RANK_TIE_ABSOLUTE + RANK_TIE_RELATIVE * top
        good = left & (scores >= top - slack)
        pick = jnp.where(jnp.any(good, axis=-1), jnp.argmax(good, axis=-1), -1).astype(jnp.int32)
        chosen.append(pick)
        left = left & (jnp.arange(scores.shape[1])[None, :] != pick[:, None])
    return jnp.stack(chosen, axis=-1)


def rows_of_clusters(labels: Array, chosen: Array) -> Array:
    """bool [B, W]: rows whose label (int32 [B, W]) is among the chosen clusters [B, k]."""
    hit = (labels[:, :, None] == chosen[:, None, :]) & (chosen[:, None, :] >= 0)
    return jnp.any(hit, axis=-1)


def compact(selected: Array, capacity: int) -> Array:
    """Selected rows (bool [B, W]) as a list of window indices in order, int32 [B, capacity].

    Unused slots repeat index 0. The caller makes sure that `capacity` suffices.
    """
    slot = jnp.where(selected, jnp.cumsum(selected, axis=-1) - 1, -1)
    at = slot[:, None, :] == jnp.arange(capacity)[None, :, None]
    return jnp.argmax(at, axis=-1).astype(jnp.int32)


def spread(selected: Array, rows: Array) -> Array:
    """The inverse: rows [B, capacity, ...] put at their window positions, [B, W, ...].

    Positions that are not selected hold nothing meaningful.
    """
    slot = jnp.clip(jnp.cumsum(selected, axis=-1) - 1, 0, rows.shape[1] - 1)
    slot = slot.reshape(*slot.shape, *([1] * (rows.ndim - 2)))
    return jnp.take_along_axis(rows, slot, axis=1)


def capacities(most: int, sizes: int = 4, least: int = 16) -> tuple[int, ...]:
    """Row counts a refresh is compiled for, up to `most`: multiples of most / sizes, >= `least`."""
    step = max(least, -(-most // sizes))
    return tuple(sorted({min(most, step * i) for i in range(1, -(-most // step) + 1)}))
