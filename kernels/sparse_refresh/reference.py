"""The op in plain JAX: what every back end without the kernels runs."""

import jax.numpy as jnp
from jax import Array

from polestar_jax.kernels.layout import rotate_keys, rotate_queries
from polestar_jax.models.attention import attend


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
    """Attention of the rows, [B, R, H * D], zeros from count[b] on."""
    keys, mask = rotate_keys(k, pad, theta)
    out = attend(rotate_queries(q, positions, theta), keys, v, mask)
    if count is None:
        return out
    present = (jnp.arange(q.shape[1])[None, :] < count[:, None])[:, :, None]
    return jnp.where(present, out, jnp.zeros((), out.dtype))
