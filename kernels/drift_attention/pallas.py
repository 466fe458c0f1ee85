"""The op on the streaming kernel: packing in, unpacking out."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from polestar_jax.kernels.layout import heads_first, key_tables, rotate_queries
from polestar_jax.kernels.plan import Plan
from polestar_jax.kernels.stream import Task, stream


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
    interpret: bool,
) -> tuple[Array, Array, Array, Array | None]:
    """As `reference.drift_attention`; K and V are read once, in their own layout."""
    b, r, h, d = q.shape
    hk, t = k.shape[1], k.shape[2]
    g, n = b * hk, h // hk * r
    if previous is not None:
        previous = (previous[0].reshape(g, n, t), previous[1].reshape(g, n))
    got = stream(
        Task(d**-0.5, True, scores_dtype, None if previous is None else "clip"),
        heads_first(rotate_queries(q, positions, theta), hk),
        k.reshape(g, t, d),
        v.reshape(g, t, d),
        jnp.repeat(pad, hk),
        jnp.full((g,), n, jnp.int32),
        key_tables(t, d, theta),
        previous,
        plan=Plan.of(g, n, t, k.dtype.itemsize, rotary=True),
        name="drift_attention",
        interpret=interpret,
    )
    attended = got["out"].reshape(b, h, r, d).transpose(0, 2, 1, 3).reshape(b, r, h * d)
    kl = got["kl"].reshape(b, h, r) if previous is not None else None
    return (
        attended,
        got["scores"].reshape(b, h, r, t),
        got["normaliser"].reshape(b, h, r),
        kl,
    )
