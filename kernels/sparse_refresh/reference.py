"""The op in plain JAX: what every back end without the kernels runs."""

import jax.numpy as jnp
from jax import Array, lax

from polestar_jax.kernels.layout import rotary_tables, rotate, rotate_queries
from polestar_jax.kernels.softmax import normalise, scaled_scores, weighted_values

QUERY_TILE = 256  # rows whose scores exist at once


def gather(sources: tuple[Array, ...], rows: Array, count: Array) -> tuple[Array, ...]:
    """Rows of each source [B, Hk, T, D] -> [B, R, Hk, D], zeros from count[b] on."""
    present = (jnp.arange(rows.shape[1])[None, :] < count[:, None])[:, :, None, None]
    index = jnp.where(present[:, :, 0, 0], rows, 0)[:, None, :, None]

    def one(source: Array) -> Array:
        taken = jnp.take_along_axis(source, index, axis=2).transpose(0, 2, 1, 3)
        return jnp.where(present, taken, jnp.zeros((), source.dtype))

    return tuple(one(source) for source in sources)


def scatter(
    targets: tuple[Array, ...], new: tuple[Array, ...], rows: Array, count: Array
) -> tuple[Array, ...]:
    """Targets [B, Hk, T, D] with rows replaced by new [B, R, Hk, D], up to count[b]."""
    batch = jnp.arange(rows.shape[0])[:, None]

    def one(target: Array, value: Array) -> Array:
        # Rows that do not exist are sent outside, where the update is dropped.
        present = jnp.arange(rows.shape[1])[None, :] < count[:, None]
        index = jnp.where(present, rows, target.shape[2])
        return target.at[batch, :, index].set(value, mode="drop", unique_indices=False)

    return tuple(one(target, value) for target, value in zip(targets, new))


def attend_rows(
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    pad: Array,
    count: Array | None,
    *,
    theta: float,
) -> Array:
    """Attention of the rows, [B, R, H * D], at most `QUERY_TILE` rows of scores at a time."""
    b, r, h, d = q.shape
    t = k.shape[2]
    q = rotate_queries(q, positions, theta)
    cos, sin = rotary_tables(jnp.arange(t)[None, :] - pad[:, None], d, theta)
    k = rotate(k, (cos[:, None], sin[:, None]))
    mask = jnp.arange(t)[None, :] >= pad[:, None]

    def attended(tile: Array) -> Array:
        return weighted_values(normalise(scaled_scores(tile, k, mask))[0], v)

    if r <= 2 * QUERY_TILE:
        out = attended(q)
    else:
        tiles = -(-r // QUERY_TILE)
        q = jnp.pad(q, ((0, 0), (0, tiles * QUERY_TILE - r), (0, 0), (0, 0)))
        q = q.reshape(b, tiles, QUERY_TILE, h, d).transpose(1, 0, 2, 3, 4)
        out = lax.map(attended, q).transpose(1, 0, 2, 3).reshape(b, tiles * QUERY_TILE, h * d)
        out = out[:, :r]
    if count is None:
        return out
    present = (jnp.arange(r)[None, :] < count[:, None])[:, :, None]
    return jnp.where(present, out, jnp.zeros((), out.dtype))
