"""The op on the streaming kernel: no values, no rotation."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from polestar_jax.kernels.layout import heads_first
from polestar_jax.kernels.plan import Plan
from polestar_jax.kernels.stream import Task, stream


def proxy_drift(
    q: Array,
    k: Array,
    pad: Array,
    previous: tuple[Array, Array] | None,
    *,
    scores_dtype: Any,
    interpret: bool,
) -> tuple[Array, Array, Array | None]:
    """As `reference.proxy_drift`."""
    b, c, h, d = q.shape
    hk, t = k.shape[1], k.shape[2]
    g, n = b * hk, h // hk * c
    if previous is not None:
        previous = (previous[0].reshape(g, n, t), previous[1].reshape(g, n))
    got = stream(
        Task(d**-0.5, False, scores_dtype, None if previous is None else "add"),
        heads_first(q, hk),
        k.reshape(g, t, d),
        None,
        jnp.repeat(pad, hk),
        jnp.full((g,), n, jnp.int32),
        None,
        previous,
        plan=Plan.of(g, n, t, k.dtype.itemsize, rotary=False),
        name="proxy_drift",
        interpret=interpret,
    )
    kl = got["kl"].reshape(b, h, c) if previous is not None else None
    return got["scores"].reshape(b, h, c, t), got["normaliser"].reshape(b, h, c), kl
