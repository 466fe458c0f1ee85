"""Array layouts around the attention kernels: packing of heads, rotary tables, what they take."""

import jax.numpy as jnp
from jax import Array

MAX_HEAD_DIM = 128  # larger heads spill registers
FLOATS = ("float32", "bfloat16", "float16")


def rotary_tables(positions: Array, head_dim: int, theta: float) -> tuple[Array, Array]:
    """Cosines and sines, float32 [..., D/2], of int32 positions [...]; angle p * theta^(-2i/D)."""
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    frequencies = (1.0 / theta**exponent).reshape(*(1,) * positions.ndim, -1)
    angle = positions.astype(jnp.float32)[..., None] * frequencies
    return jnp.cos(angle), jnp.sin(angle)


def key_tables(length: int, head_dim: int, theta: float) -> tuple[Array, Array]:
    """Tables for keys, float32 [2T, D/2]: row T + p is position p, from -T to T - 1.

    Left pads shift positions, so a tile of keys may start before position 0; its first index must
    not be negative.
    """
    return rotary_tables(jnp.arange(-length, length), head_dim, theta)


def rotate(x: Array, tables: tuple[Array, Array]) -> Array:
    """Rotate pairs (i, i + D/2) of x [..., D] by tables broadcastable to [..., D/2], in float32.

    The halves are swapped by reversing an axis of length 2, which the compiler fuses into what
    reads the result; a concatenation it would write to memory first.
    """
    cos, sin = (table[..., None, :] for table in tables)
    halves = x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2).astype(jnp.float32)
    signed = sin * jnp.asarray([[-1.0], [1.0]], jnp.float32)
    return (halves * cos + jnp.flip(halves, -2) * signed).reshape(x.shape).astype(x.dtype)


def rotate_queries(q: Array, positions: Array, theta: float) -> Array:
    """q [B, R, H, D] at int32 positions [B, R]."""
    cos, sin = rotary_tables(positions, q.shape[-1], theta)
    return rotate(q, (cos[:, :, None], sin[:, :, None]))


def heads_first(q: Array, kv_heads: int) -> Array:
    """[B, R, H, D] -> [B * Hk, (H/Hk) * R, D]: the rows that share a key head, head by head."""
    b, r, h, d = q.shape
    return q.transpose(0, 2, 1, 3).reshape(b * kv_heads, (h // kv_heads) * r, d)


def rows_first(q: Array, kv_heads: int) -> Array:
    """[B, R, H, D] -> [B * Hk, R * (H/Hk), D]: row by row, so that absent rows are last."""
    b, r, h, d = q.shape
    grouped = q.reshape(b, r, kv_heads, h // kv_heads, d).transpose(0, 2, 1, 3, 4)
    return grouped.reshape(b * kv_heads, r * (h // kv_heads), d)


def unsupported_attention(q: Array, k: Array) -> str | None:
    """Why the attention kernels can not take these arrays, or None."""
    if str(q.dtype) not in FLOATS or k.dtype != q.dtype:
        return f"queries {q.dtype} with keys {k.dtype} (one of {', '.join(FLOATS)}, the same)"
    if q.shape[-1] > MAX_HEAD_DIM or q.shape[-1] % 2:
        return f"head size {q.shape[-1]} (even, at most {MAX_HEAD_DIM})"
    return None
