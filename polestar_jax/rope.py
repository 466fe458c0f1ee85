"""Rotary position embedding, rotate-half convention: pair i turns by position * theta^(-2i/D)."""

import jax.numpy as jnp
from jax import Array


def rope_tables(positions: Array, head_dim: int, theta: float) -> tuple[Array, Array]:
    """Cosines and sines, float32 [..., D/2], for int32 positions [...]."""
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    inverse = 1.0 / (theta**exponent)
    angle = positions.astype(jnp.float32)[..., None] * inverse
    return jnp.cos(angle), jnp.sin(angle)


def apply_rope(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate x [B, R, N, D] by tables [B, R, D/2]; computed in float32, returned in x's dtype."""
    half = x.shape[-1] // 2
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
