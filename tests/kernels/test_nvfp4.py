"""Four-bit residuals: formats against ml_dtypes, ops against a NumPy oracle."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polestar_jax.errors import PolestarError
from polestar_jax.kernels.nvfp4 import dequantise, formats, quantise
from polestar_jax.kernels.nvfp4.shapes import SHAPES
from polestar_jax.kernels.shapes import StoreShape
from tests.kernels.common import IMPLEMENTATIONS, MANY, close, named

FAST = {("odd-row", "bfloat16"), ("odd-width", "float32")}


def inputs(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    size = (shape.batch, shape.clusters, shape.width)
    centroids = (3 * rng.normal(size=size)).astype(jnp.dtype(dtype))
    labels = rng.integers(-1, shape.clusters, (shape.batch, shape.rows)).astype(np.int32)
    own = np.take_along_axis(centroids, np.maximum(labels, 0)[..., None], 1).astype(np.float64)
    own[labels < 0] = 0
    # Widely different groups, one of them exactly on its centroid.
    spread = 10.0 ** rng.uniform(-3, 1, (*labels.shape, shape.width // 16, 1))
    rest = spread * rng.normal(size=(*labels.shape, shape.width // 16, 16))
    rest[:, :, 0] *= rng.integers(0, 2, labels.shape)[..., None]
    rows = (own + rest.reshape(own.shape)).astype(jnp.dtype(dtype))
    return rows, centroids, labels, own


def expected(rows, own, tensor):
    """Values and scales by the formulas for a tensor scale, with ml_dtypes doing the rounding."""
    x = rows.astype(np.float32) - own.astype(np.float32)
    groups = x.reshape(*x.shape[:2], -1, 16)
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = np.where(tensor > 0, np.float32(1) / (np.float32(6) * tensor), np.float32(0))
        scale = (np.abs(groups).max(-1) * inverse[:, None, None]).astype(ml_dtypes.float8_e4m3fn)
        step = scale.astype(np.float32) * tensor[:, None, None]
        values = np.where(step[..., None] > 0, groups / step[..., None], 0)
    codes = np.clip(values, -6, 6).astype(ml_dtypes.float4_e2m1fn)
    return codes, scale


def check(shape, dtype, implementation, seed=0):
    rows, centroids, labels, own = inputs(shape, dtype, seed)
    got = jax.jit(partial(quantise, implementation=implementation))(rows, centroids, labels)
    rest = rows.astype(np.float32) - own.astype(np.float32)
    tensor = np.abs(rest).max(axis=(1, 2)) * np.float32(1 / (6 * 448))
    np.testing.assert_array_equal(got.tensor, tensor)
    codes, scale = expected(rows, own, tensor)
    np.testing.assert_array_equal(np.asarray(got.scales), scale.view(np.uint8))
    packed = np.asarray(got.values).reshape(*codes.shape[:3], 8)
    nibbles = np.stack([packed & 15, packed >> 4], -1).reshape(codes.shape).astype(np.uint8)
    ours = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    theirs = codes.astype(np.float32)
    # A quotient may round onto a tie that the product is not on; nothing else may differ.
    assert np.mean(ours != theirs) < 1e-4
    close(ours, theirs.astype(np.float64), 1.0, "values")
    run = jax.jit(partial(dequantise, implementation=implementation, dtype=rows.dtype))
    back = run(got, centroids, labels)
    assert back.dtype == jnp.dtype(dtype)
    step = scale.astype(np.float32) * tensor[:, None, None]  # rounded alike everywhere
    rest = (ours * step[..., None].astype(np.float64)).reshape(own.shape)
    want = own + rest
    # Where the compiler fuses product and sum into one instruction the product is not rounded;
    # so the result lies within both roundings, and that of the rows' own dtype.
    half = float(jnp.finfo(dtype).eps) / 2 if dtype == "bfloat16" else 0.0
    allowed = 2.0**-24 * (np.abs(rest) + np.abs(want)) + half * np.abs(want)
    error = np.abs(np.asarray(back).astype(np.float64) - want)
    assert (error <= 1.01 * allowed).all(), (error / np.maximum(allowed, 1e-30)).max()
    # Half a step of the coarsest spacing (2 between 4 and 6), plus the rounding of the scale.
    error = np.abs(np.asarray(back).astype(np.float64) - rows.astype(np.float64))
    error = error.reshape(codes.shape).max(-1)
    top = np.abs(rows.astype(np.float64) - own).reshape(codes.shape).max(-1)
    rounding = np.abs(want).max() * float(jnp.finfo(dtype).eps)
    assert (error <= top / 6 * 1.07 + tensor[:, None, None] * 2**-10 * 6 + rounding).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("name", "dtype"), named(SHAPES, FAST))
def test_rows_are_stored_by_the_formulas_at_every_named_shape(name, dtype, implementation):
    check(SHAPES[name], dtype, implementation)


@pytest.mark.slow
@MANY
@given(
    shape=st.builds(
        lambda batch, rows, groups, clusters: StoreShape(batch, rows, 16 * groups, clusters),
        st.integers(1, 3),
        st.integers(1, 20),
        st.integers(1, 600),
        st.integers(1, 9),
    ),
    seed=st.integers(0, 999),
    dtype=st.sampled_from(("float32", "bfloat16")),
    implementation=st.sampled_from(IMPLEMENTATIONS),
)
def test_rows_are_stored_by_the_formulas_at_many_shapes(shape, seed, dtype, implementation):
    check(shape, dtype, implementation, seed)


def test_scales_round_like_ml_dtypes():
    every = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ties = (every[1:] + every[:-1]) / 2
    x = np.concatenate([every, ties, np.nextafter(ties, 0), np.nextafter(ties, 1e9)])
    want = x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    encode = jax.jit(formats.e4m3_encode)
    np.testing.assert_array_equal(encode(x), want)
    np.testing.assert_array_equal(
        jax.jit(formats.e4m3_decode)(np.arange(127, dtype=np.int32)), every
    )
    assert int(encode(np.full(x.shape, 1e9, np.float32))[0]) == 126  # clamps to 448


def test_values_round_like_ml_dtypes():
    every = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    magnitudes = every[:8]
    ties = (magnitudes[1:] + magnitudes[:-1]) / 2
    x = np.concatenate([magnitudes, ties, np.nextafter(ties, 0), np.nextafter(ties, 1e9)])
    x = np.concatenate([x, -x])
    got = np.asarray(jax.jit(formats.e2m1_encode)(x, np.float32(1))).astype(np.uint8)
    want = x.astype(ml_dtypes.float4_e2m1fn)
    np.testing.assert_array_equal(
        got.view(ml_dtypes.float4_e2m1fn).astype(np.float32), want.astype(np.float32)
    )
    decoded = np.asarray(jax.jit(formats.e2m1_decode)(np.arange(16, dtype=np.int32)))
    np.testing.assert_array_equal(decoded, every)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_on_their_centroids_come_back_exactly(implementation):
    centroids = np.random.default_rng(0).normal(size=(1, 2, 64)).astype(np.float32)
    labels = np.array([[1, 0, 1]], np.int32)
    rows = centroids[:, labels[0]]
    stored = jax.jit(partial(quantise, implementation=implementation))(rows, centroids, labels)
    assert float(stored.tensor[0]) == 0
    back = jax.jit(partial(dequantise, implementation=implementation))(stored, centroids, labels)
    np.testing.assert_array_equal(back, rows)


def test_widths_that_are_no_groups_are_refused():
    rows = np.zeros((1, 2, 40), np.float32)
    with pytest.raises(PolestarError, match="multiple of 16, got 40"):
        quantise(rows, rows, np.zeros((1, 2), np.int32))
