"""The op on the streaming kernel: packing in, unpacking out."""

from typing import Any

import jax.numpy as jnp

from polestar_jax.kernels.drift_attention.arguments import Arguments, Results, unpacked
from polestar_jax.kernels.layout import heads_first, key_tables, rotate_queries
from polestar_jax.kernels.plan import Plan
from polestar_jax.kernels.stream import Task, stream


def drift_attention(
    arguments: Arguments, *, theta: float, scores_dtype: Any, interpret: bool
) -> Results:
    """Keys and values are read once, in their own layout."""
    q, k, v, positions, pad, previous = arguments
    hk, d = k.shape[1], k.shape[3]
    g, n, t = arguments.packed
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
    return unpacked(got, arguments)
