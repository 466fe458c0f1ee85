"""The hot operations of a pass: Pallas kernels on NVIDIA GPUs, plain JAX everywhere else.

With kernels a layer's cache holds keys before rotation only (the kernels rotate what they read);
without, it holds rotated keys, and those before rotation where a policy asks for them.
"""

import jax.numpy as jnp
from jax import Array

from polestar_jax.decoding.context import Context, Rope
from polestar_jax.decoding.state import AttentionMemory, LayerCache
from polestar_jax.kernels import drift_attention as drift_attention_op
from polestar_jax.kernels import proxy_drift as proxy_drift_op
from polestar_jax.kernels import sparse_refresh
from polestar_jax.models.attention import attend, attend_with_drift
from polestar_jax.models.rope import apply_rope


def attend_cached(
    ctx: Context, q: Array, rope: Rope, cache: LayerCache, count: Array | None = None
) -> Array:
    """Attention of un-rotated queries [B, R, H, D] over all cached rows -> [B, R, H * D].

    Of sequence b only the first count[b] rows matter (None: all).
    """
    if ctx.kernels:
        assert cache.raw is not None
        return sparse_refresh.attend_rows(
            q, cache.raw, cache.v, rope.positions, ctx.pad, count,
            theta=ctx.model_config.rope_theta, implementation=ctx.implementation,
        )  # fmt: skip
    assert cache.k is not None
    return attend(apply_rope(q, rope.cos, rope.sin), cache.k, cache.v, ctx.key_mask)


def attend_measured(
    ctx: Context, q: Array, rope: Rope, cache: LayerCache, memory: AttentionMemory
) -> tuple[Array, AttentionMemory, Array]:
    """As `attend_cached`, with the attention's memory and its drift [B, R] against `memory`."""
    if ctx.kernels:
        assert cache.raw is not None
        result = drift_attention_op.drift_attention(
            q, cache.raw, cache.v, rope.positions, ctx.pad, (memory.scores, memory.normaliser),
            theta=ctx.model_config.rope_theta, implementation=ctx.implementation,
        )  # fmt: skip
        assert result.drift is not None
        return result.attended, AttentionMemory(result.scores, result.normaliser), result.drift
    assert cache.k is not None
    attended, scores, normaliser, kl = attend_with_drift(
        apply_rope(q, rope.cos, rope.sin), cache.k, cache.v, ctx.key_mask,
        (memory.scores, memory.normaliser),
    )  # fmt: skip
    assert kl is not None
    return attended, AttentionMemory(scores, normaliser), jnp.mean(kl, axis=1)


def proxy_attention(
    ctx: Context, queries: Array, cache: LayerCache, previous: tuple[Array, Array] | None
) -> tuple[Array, Array, Array | None]:
    """Proxy attention of centroid queries [B, K, H, D] and its drift since `previous`.

    Returns scores [B, H, K, T], log-normaliser [B, H, K] and drift [B, K] (None without
    `previous`). No rotary positions: a centroid has none (arXiv 2607.14107, cluster drift).
    """
    assert cache.raw is not None
    result = proxy_drift_op.proxy_drift(
        queries, cache.raw, ctx.pad, previous, implementation=ctx.implementation
    )
    return result.scores, result.normaliser, result.drift


def gather_hidden(ctx: Context, hidden: Array, index: Array, count: Array) -> Array:
    """Rows of hidden [B, W, M] at index int32 [B, S]; rows from count[b] on are zero."""
    return sparse_refresh.gather_rows(hidden, index, count, implementation=ctx.implementation)


def scatter_rows(
    ctx: Context, cache: LayerCache, raw: Array, v: Array, rows: Array, count: Array
) -> LayerCache:
    """Keys and values [B, S, Hk, D] written in place at rows int32 [B, S], up to count [B]."""
    assert cache.raw is not None
    new_raw, new_v = sparse_refresh.scatter_cache(
        cache.raw, cache.v, raw, v, rows, count, implementation=ctx.implementation
    )
    return LayerCache(k=None, v=new_v, raw=new_raw)
