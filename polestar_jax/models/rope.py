"""Rotary position embedding, rotate-half convention: pair i turns by position * theta^(-2i/D)."""

import jax.numpy as jnp
from jax import Array


def rope_tables(positions: Array, head_dim: int, theta: float) -> tuple[Array, Array]:
    """Cosines and sines, float32 [..., D/2], for int32 positions [...]."""
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    inverse = (1.0 / (theta**exponent)).reshape(*(1,) * positions.ndim, -1)
    angle = positions.astype(jnp.float32)[..., None] * inverse
    return jnp.cos(angle), jnp.sin(angle)


def apply_rope(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate rows x [B, R, N, D] by tables [B, R, D/2]; see `rotate`."""
    return rotate(x, cos[:, :, None], sin[:, :, None])


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate x [..., D] by tables that broadcast to [..., D/2]; in float32, returned in x's dtype.

    The two halves are swapped by reversing an axis of length 2: a concatenation would keep the
    compiler from fusing the rotation into what reads or stores the rows.
    """
    halves = x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2).astype(jnp.float32)
    sign = jnp.asarray([-1.0, 1.0], jnp.float32).reshape(*(1,) * (x.ndim - 1), 2, 1)
    signed = sin[..., None, :] * sign
    turned = halves * cos[..., None, :] + jnp.flip(halves, -2) * signed
    return turned.reshape(x.shape).astype(x.dtype)
