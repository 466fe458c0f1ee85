"""Array layouts around the attention kernels: packing of heads, rotary tables, what they take."""

import jax.numpy as jnp
from jax import Array

from polestar_jax.errors import PolestarError
from polestar_jax.models.rope import apply_rope, rope_tables, rotate

MAX_HEAD_DIM = 128  # larger heads spill registers
FLOATS = ("float32", "bfloat16", "float16")
SCORES = ("float32", "bfloat16")  # masked keys are -1e30, beyond float16


def key_tables(length: int, head_dim: int, theta: float) -> tuple[Array, Array]:
    """Tables for keys, float32 [2T, D/2]: row T + p is position p, from -T to T - 1.

    Left pads shift positions, so a tile of keys may start before position 0; its first index must
    not be negative.
    """
    return rope_tables(jnp.arange(-length, length), head_dim, theta)


def rotate_queries(q: Array, positions: Array, theta: float) -> Array:
    """q [B, R, H, D] at int32 positions [B, R]."""
    return apply_rope(q, *rope_tables(positions, q.shape[-1], theta))


def rotate_keys(k: Array, pad: Array, theta: float) -> tuple[Array, Array]:
    """Cached keys [B, Hk, T, D] at the positions t - pad int32 [B], and bool [B, T]: no pad."""
    positions = jnp.arange(k.shape[2])[None, :] - pad[:, None]
    cos, sin = rope_tables(positions, k.shape[3], theta)
    return rotate(k, cos[:, None], sin[:, None]), positions >= 0


def heads_first(q: Array, kv_heads: int) -> Array:
    """[B, R, H, D] -> [B * Hk, (H/Hk) * R, D]: the rows that share a key head, head by head."""
    b, r, h, d = q.shape
    return q.transpose(0, 2, 1, 3).reshape(b * kv_heads, (h // kv_heads) * r, d)


def rows_first(q: Array, kv_heads: int) -> Array:
    """[B, R, H, D] -> [B * Hk, R * (H/Hk), D]: row by row, so that absent rows are last."""
    b, r, h, d = q.shape
    grouped = q.reshape(b, r, kv_heads, h // kv_heads, d).transpose(0, 2, 1, 3, 4)
    return grouped.reshape(b * kv_heads, r * (h // kv_heads), d)


def check_rotary(op: str, q: Array) -> None:
    """Raise where a head can not be rotated: its values go in pairs."""
    if q.shape[-1] % 2:
        raise PolestarError(f"{op}: rotary positions need an even head size, got {q.shape[-1]}")


def unsupported_attention(q: Array, k: Array) -> str | None:
    """Why the attention kernels can not take these arrays, or None."""
    if str(q.dtype) not in FLOATS or k.dtype != q.dtype:
        return f"queries {q.dtype} with keys {k.dtype} (one of {', '.join(FLOATS)}, the same)"
    if q.size == 0:
        return "arrays without elements"
    if q.shape[-1] > MAX_HEAD_DIM or q.shape[-1] % 2:
        return f"head size {q.shape[-1]} (even, at most {MAX_HEAD_DIM})"
    return None
