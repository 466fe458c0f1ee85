"""The op in plain JAX: what every back end without the kernel runs."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from polestar_jax.kernels.nvfp4.formats import (
    GROUP,
    e2m1_decode,
    e2m1_encode,
    e4m3_decode,
    e4m3_encode,
    narrowed,
)


def own_centroids(centroids: Array, labels: Array) -> Array:
    """Each row's centroid, float32 [B, R, M]; zero for a negative label."""
    taken = jnp.take_along_axis(centroids, jnp.maximum(labels, 0)[..., None], axis=1)
    return jnp.where((labels >= 0)[..., None], taken.astype(jnp.float32), 0.0)


def residual(rows: Array, centroids: Array, labels: Array) -> Array:
    return rows.astype(jnp.float32) - own_centroids(centroids, labels)


def quantise(
    rows: Array, centroids: Array, labels: Array, tensor: Array, inverse: Array
) -> tuple[Array, Array]:
    """Packed values uint8 [B, R, M / 2] and group scales uint8 [B, R, M / 16].

    tensor float32 [B] is the scale of a sequence, inverse = 1 / (6 tensor).
    """
    b, r, m = rows.shape
    x = residual(rows, centroids, labels).reshape(b, r, m // GROUP, GROUP)
    bits = e4m3_encode(jnp.max(jnp.abs(x), axis=-1) * inverse[:, None, None])
    scale = e4m3_decode(bits) * tensor[:, None, None]
    pairs = e2m1_encode(x, scale[..., None]).reshape(b, r, m // 2, 2)
    packed = pairs[..., 0] | (pairs[..., 1] << 4)
    return packed.astype(jnp.uint8), bits.astype(jnp.uint8)


def dequantise(
    values: Array, scales: Array, tensor: Array, centroids: Array, labels: Array, *, dtype: Any
) -> Array:
    # tensor float32 [B, R]
    b, r, half = values.shape
    codes = values.astype(jnp.int32)
    codes = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(b, r, half * 2 // GROUP, GROUP)
    scale = e4m3_decode(scales.astype(jnp.int32)) * tensor[..., None]
    x = (e2m1_decode(codes) * scale[..., None]).reshape(b, r, half * 2)
    return narrowed(own_centroids(centroids, labels) + x, dtype)
