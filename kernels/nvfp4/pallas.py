"""The op's kernels: one program per row, 16 values of a group along the last axis of a block."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from polestar_jax.kernels.nvfp4.formats import (
    GROUP,
    e2m1_decode,
    e2m1_encode,
    e4m3_decode,
    e4m3_encode,
    narrowed,
)
from polestar_jax.kernels.plan import power_of_two

MAX_GROUPS = 256  # of a block: 4,096 values, 32 a thread


def _blocks(groups: int) -> tuple[int, int]:
    """Groups of a block, a power of two, and blocks of a row."""
    size = min(MAX_GROUPS, power_of_two(groups))
    return size, -(-groups // size)


def _row(*shape: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, None, *shape), lambda b, r: (b, r) + (0,) * len(shape))


def _sequence(*shape: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, *shape), lambda b, r: (b,) + (0,) * len(shape))


def _scalar(array: Array) -> pl.BlockSpec:
    return pl.BlockSpec(array.shape, lambda b, r: (0,) * array.ndim)


def quantise(
    rows: Array,
    centroids: Array,
    labels: Array,
    tensor: Array,
    inverse: Array,
    *,
    interpret: bool,
) -> tuple[Array, Array]:
    """As `reference.quantise`."""
    b, r, m = rows.shape
    groups = m // GROUP
    size, blocks = _blocks(groups)
    wide = size * blocks
    clusters = centroids.shape[1]
    values, scales = pl.pallas_call(
        partial(_quantise_row, groups),
        grid=(b, r),
        in_specs=[
            _scalar(labels),
            _scalar(tensor),
            _scalar(inverse),
            _row(wide, GROUP),
            _sequence(clusters, wide, GROUP),
        ],
        out_specs=[_row(wide, GROUP // 2), _row(wide)],
        out_shape=[
            jax.ShapeDtypeStruct((b, r, groups, GROUP // 2), jnp.uint8),
            jax.ShapeDtypeStruct((b, r, groups), jnp.uint8),
        ],
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="quantise",
    )(
        labels,
        tensor,
        inverse,
        rows.reshape(b, r, groups, GROUP),
        centroids.reshape(b, clusters, groups, GROUP),
    )
    return values.reshape(b, r, m // 2), scales


def _quantise_row(
    groups: int, labels, tensor, inverse, rows, centroids, values, scales
) -> None:  # fmt: skip
    # labels [B, R]; tensor, inverse [B]; rows [G, 16]; centroids [K, G, 16]; values [G, 8]
    b, r = pl.program_id(0), pl.program_id(1)
    label, s_t, inv = labels[b, r], tensor[b], inverse[b]
    size, blocks = _blocks(groups)
    for block in range(blocks):
        where, inside = _groups(groups, size, block)
        x = plt.load(rows.at[where, :], mask=inside[:, None], other=0).astype(jnp.float32)
        x = x - _own_centroid(centroids, label, where, inside)
        bits = e4m3_encode(jnp.max(jnp.abs(x), axis=1) * inv)
        codes = e2m1_encode(x, (e4m3_decode(bits) * s_t)[:, None])
        pairs = codes.reshape(size, GROUP // 2, 2)
        packed = jnp.sum(pairs << (4 * jnp.arange(2))[None, None, :], axis=2)
        plt.store(values.at[where, :], packed.astype(jnp.uint8), mask=inside[:, None])
        plt.store(scales.at[where], bits.astype(jnp.uint8), mask=inside)


def dequantise(
    values: Array,
    scales: Array,
    tensor: Array,
    centroids: Array,
    labels: Array,
    *,
    dtype: Any,
    interpret: bool,
) -> Array:
    """As `reference.dequantise`."""
    b, r, groups = scales.shape
    size, blocks = _blocks(groups)
    wide = size * blocks
    clusters = centroids.shape[1]
    rows = pl.pallas_call(
        partial(_dequantise_row, groups),
        grid=(b, r),
        in_specs=[
            _scalar(labels),
            _scalar(tensor),
            _row(wide, GROUP // 2),
            _row(wide),
            _sequence(clusters, wide, GROUP),
        ],
        out_specs=_row(wide, GROUP),
        out_shape=jax.ShapeDtypeStruct((b, r, groups, GROUP), dtype),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="dequantise",
    )(
        labels,
        tensor,
        values.reshape(b, r, groups, GROUP // 2),
        scales,
        centroids.reshape(b, clusters, groups, GROUP),
    )
    return rows.reshape(b, r, groups * GROUP)


def _dequantise_row(groups: int, labels, tensor, values, scales, centroids, rows) -> None:
    # labels, tensor [B, R]; values [G, 8]; scales [G]; centroids [K, G, 16]; rows [G, 16]
    b, r = pl.program_id(0), pl.program_id(1)
    label, s_t = labels[b, r], tensor[b, r]
    size, blocks = _blocks(groups)
    for block in range(blocks):
        where, inside = _groups(groups, size, block)
        packed = plt.load(values.at[where, :], mask=inside[:, None], other=0).astype(jnp.int32)
        codes = jnp.stack([packed & 15, packed >> 4], axis=-1).reshape(size, GROUP)
        bits = plt.load(scales.at[where], mask=inside, other=0).astype(jnp.int32)
        x = e2m1_decode(codes) * (e4m3_decode(bits) * s_t)[:, None]
        x = _own_centroid(centroids, label, where, inside) + x
        plt.store(rows.at[where, :], narrowed(x, rows.dtype), mask=inside[:, None])


def _groups(groups: int, size: int, block: int) -> tuple[Any, Array]:
    return pl.ds(block * size, size), block * size + jnp.arange(size) < groups


def _own_centroid(centroids: Any, label: Array, where: Any, inside: Array) -> Array:
    """The row's centroid as float32 [groups, 16]; zero for a negative label."""
    present = inside & (label >= 0)
    index = jnp.maximum(label, 0)
    value = plt.load(centroids.at[index, where, :], mask=present[:, None], other=0)
    return value.astype(jnp.float32)
