"""Fetching rows, attending and writing them back, against NumPy; counts vary per sequence."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polestar_jax.kernels.shapes import RefreshShape
from polestar_jax.kernels.sparse_refresh import (
    attend_rows,
    gather_cache,
    gather_rows,
    scatter_cache,
    scatter_rows,
)
from polestar_jax.kernels.sparse_refresh.shapes import OPENINGS, SHAPES
from tests.kernels import oracle
from tests.kernels.common import (
    IMPLEMENTATIONS,
    MANY,
    THETA,
    attention_inputs,
    clean,
    close,
    named,
    score_tolerance,
)

FAST = {("odd-head", "float32"), ("odd-row", "bfloat16")}


def inputs(shape, dtype, seed=0):
    q, k, v, positions, pad, rng = attention_inputs(shape, dtype, seed)
    rows = np.stack([rng.permutation(shape.length)[: shape.rows] for _ in range(shape.batch)])
    count = np.array(shape.counts, np.int32)
    for b, some in enumerate(count):  # what does not exist may hold anything
        rows[b, some:] = rng.choice([-1, 10**6, 0], shape.rows - some)
    hidden = rng.normal(size=(shape.batch, shape.length, shape.width)).astype(jnp.dtype(dtype))
    return (
        q,
        np.where(np.isnan(k), 0, k).astype(k.dtype),
        v,
        positions,
        pad,
        rows.astype(np.int32),
        count,
        hidden,
        rng,
    )


def check_moves(shape, dtype, implementation, seed=0):
    _, k, v, _, _, rows, count, hidden, rng = inputs(shape, dtype, seed)

    def same(got, want):
        np.testing.assert_array_equal(np.asarray(got), want)

    def run(op, *args):
        return jax.jit(partial(op, implementation=implementation))(*args)

    packed = oracle.gather(hidden[:, None], rows, count)[:, :, 0]
    same(run(gather_rows, hidden, rows, count), packed)
    got = run(gather_cache, k, v, rows, count)
    same(got[0], oracle.gather(k, rows, count))
    same(got[1], oracle.gather(v, rows, count))
    new = rng.normal(size=packed.shape).astype(hidden.dtype)
    want = oracle.scatter(hidden[:, None], new[:, :, None], rows, count)[:, 0]
    same(run(scatter_rows, hidden, new, rows, count), want)
    new_k, new_v = (rng.normal(size=got[0].shape).astype(k.dtype) for _ in range(2))
    k2, v2 = run(scatter_cache, k, v, new_k, new_v, rows, count)
    same(k2, oracle.scatter(k, new_k, rows, count))
    same(v2, oracle.scatter(v, new_v, rows, count))


def check_attention(shape, dtype, implementation, seed=0):
    q, k, v, positions, pad, _, count, _, _ = inputs(shape, dtype, seed)
    if implementation == "interpret":
        for b, some in enumerate(pad):
            k[b, :, :some] = v[b, :, :some] = np.nan  # the kernel does not even read pads
    for b, some in enumerate(count):
        q[b, some:] = np.nan  # nor rows that do not exist
    run = jax.jit(partial(attend_rows, theta=THETA, implementation=implementation))
    got = run(q, k, v, positions, pad, count)
    p, _ = oracle.softmax(oracle.scores(clean(q), clean(k), pad, positions, THETA))
    want = oracle.attended(p, clean(v))
    want[np.arange(shape.rows)[None, :] >= count[:, None]] = 0
    allowed = score_tolerance(dtype, shape.head_dim, shape.length)
    close(got, want, allowed * np.abs(want).max(), "attended")
    assert not np.asarray(got)[np.arange(shape.rows)[None, :] >= count[:, None]].any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("name", "dtype"), named(SHAPES, FAST))
def test_rows_are_moved_exactly_at_every_named_shape(name, dtype, implementation):
    check_moves(SHAPES[name], dtype, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("name", "dtype"), named(SHAPES | OPENINGS, FAST))
def test_attention_of_rows_matches_the_oracle_at_every_named_shape(name, dtype, implementation):
    check_attention((SHAPES | OPENINGS)[name], dtype, implementation)


@st.composite
def refresh_shapes(draw):
    batch, length, kv = (draw(st.integers(1, n)) for n in (3, 200, 3))
    rows = draw(st.integers(1, min(40, length)))
    counts = tuple(draw(st.integers(0, rows)) for _ in range(batch))
    heads, dim = kv * draw(st.integers(1, 3)), 2 * draw(st.integers(1, 64))
    width = draw(st.integers(1, 5000))
    return RefreshShape(batch, rows, heads, kv, dim, length, width=width, counts=counts)


@pytest.mark.slow
@MANY
@given(
    shape=refresh_shapes(),
    seed=st.integers(0, 999),
    dtype=st.sampled_from(("float32", "bfloat16")),
    implementation=st.sampled_from(IMPLEMENTATIONS),
)
def test_rows_are_moved_and_attended_at_many_shapes(shape, seed, dtype, implementation):
    check_moves(shape, dtype, implementation, seed)
    check_attention(shape, dtype, implementation, seed)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_left_pads_change_a_row_by_no_more_than_rounding(implementation):
    """Positions count from the first token, so tiles differ but angles do not."""
    shape = RefreshShape(1, 4, 2, 1, 64, 96, width=16, counts=(4,))
    q, k, v, positions, _, *_ = inputs(shape, "bfloat16")
    run = jax.jit(partial(attend_rows, theta=THETA, implementation=implementation))
    alone = run(q, k, v, positions, np.zeros(1, np.int32), np.array([4], np.int32))
    shift = 32
    k, v = (np.pad(x, ((0, 0), (0, 0), (shift, 0), (0, 0))) for x in (k, v))
    padded = run(q, k, v, positions, np.array([shift], np.int32), np.array([4], np.int32))
    error = np.abs(np.asarray(alone - padded, np.float32)).max()
    assert error <= 2.0**-7 * np.abs(np.asarray(alone, np.float32)).max()


def test_many_rows_are_attended_in_tiles_with_the_same_result():
    """More rows than the reference keeps scores of at a time, as in a full opening pass."""
    shape = RefreshShape(1, 600, 2, 1, 32, 600, width=16, counts=(600,))
    check_attention(shape, "float32", "xla")
