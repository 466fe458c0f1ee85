"""Cluster drift of both implementations against a float64 oracle."""

from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polestar_jax.kernels.proxy_drift import proxy_drift
from polestar_jax.kernels.proxy_drift.shapes import SHAPES
from polestar_jax.kernels.shapes import AttentionShape
from tests.kernels import oracle
from tests.kernels.common import (
    IMPLEMENTATIONS,
    MANY,
    attention_inputs,
    before,
    clean,
    close,
    drift_tolerance,
    named,
    score_tolerance,
)

FAST = {("odd-length", "float32"), ("odd-head", "bfloat16")}


def check(shape, dtype, implementation, seed=0):
    q, k, _, _, pad, rng = attention_inputs(shape, dtype, seed)
    old, previous = before(q, k, pad, rng)
    got = jax.jit(partial(proxy_drift, implementation=implementation))(q, k, pad, previous)
    want = oracle.scores(q, clean(k), pad)
    allowed = score_tolerance(dtype, shape.head_dim, shape.length)
    close(got.scores, want, allowed, "scores")
    close(got.normaliser, oracle.softmax(want)[1], allowed, "normaliser")
    drift = oracle.cluster_drift(want, old)
    close(got.drift, drift, drift_tolerance(drift, allowed), "drift")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("name", "dtype"), named(SHAPES, FAST))
def test_outputs_match_the_oracle_at_every_named_shape(name, dtype, implementation):
    check(SHAPES[name], dtype, implementation)


@pytest.mark.slow
@MANY
@given(
    shape=st.builds(
        lambda batch, rows, kv, group, half, length: AttentionShape(
            batch, min(rows, length), kv * group, kv, 2 * half, length
        ),
        st.integers(1, 3),
        st.integers(1, 40),
        st.integers(1, 3),
        st.integers(1, 3),
        st.integers(1, 64),
        st.integers(1, 400),
    ),
    seed=st.integers(0, 999),
    dtype=st.sampled_from(("float32", "bfloat16")),
    implementation=st.sampled_from(IMPLEMENTATIONS),
)
def test_outputs_match_the_oracle_at_many_shapes(shape, seed, dtype, implementation):
    check(shape, dtype, implementation, seed)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_probabilities_inside_logarithms_have_the_floor_added(implementation):
    """log(p + 1e-12), as for a key that once had no weight at all."""
    shape = AttentionShape(1, 1, 1, 1, 64, 40)
    q, k, _, _, _, rng = attention_inputs(shape, "float32")
    pad, k = np.zeros(1, np.int32), np.nan_to_num(k)
    now = oracle.scores(q, k, pad)
    old = now + 0.1 * rng.normal(size=now.shape)
    old[..., 7] = -27.0  # a probability near the floor: adding it and clipping at it differ
    previous = (old.astype(np.float32), oracle.softmax(old)[1].astype(np.float32))
    got = proxy_drift(q, k, pad, previous, implementation=implementation)
    close(got.drift, oracle.cluster_drift(now, old), 1e-5)
    p = oracle.softmax(now)[0][0, 0, 0, 7]
    assert abs(oracle.cluster_drift(now, old) - oracle.token_drift(now, old))[0, 0] > 0.01 * p


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_refresh_that_changes_nothing_has_no_drift(implementation):
    q, k, _, _, pad, _ = attention_inputs(SHAPES["odd-cluster"], "bfloat16")
    run = jax.jit(partial(proxy_drift, implementation=implementation))
    first = run(q, k, pad)
    assert first.drift is None
    again = run(q, k, pad, (first.scores, first.normaliser))
    assert np.asarray(again.drift).max() <= 2e-6
