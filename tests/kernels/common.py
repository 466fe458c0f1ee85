"""Inputs, tolerances and the choice of what runs in the fast stage."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, settings

from polestar_jax.kernels.cases import small
from polestar_jax.models.attention import NEGATIVE
from tests.kernels import oracle

IMPLEMENTATIONS = ("xla", "interpret")
THETA = 10000.0
EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-8}


def named(shapes, fast):
    """Every (name, dtype); those in `fast`, a set of such pairs, in the fast stage.

    Models of 8 billion parameters are decoded in bfloat16. Their other sizes in float32, which
    take the interpreter minutes, are left to the exhaustive run.
    """

    def marks(name, dtype):
        if (name, dtype) in fast:
            return []
        extra = dtype == "float32" and not small(name)
        return [pytest.mark.slow, pytest.mark.exhaustive] if extra else [pytest.mark.slow]

    return [
        pytest.param(name, dtype, marks=marks(name, dtype)) for name in shapes for dtype in EPSILON
    ]


def score_tolerance(dtype, head_dim, length):
    """Of a score of unit-normal vectors: rounding of D products, and of the largest angle."""
    return 4 * EPSILON[dtype] * np.sqrt(head_dim) + 2 * EPSILON["float32"] * length


def attention_inputs(shape, dtype, seed=0):
    """Unit-normal q, k, v with random left pads; what lies under a pad is poisoned in k."""
    rng = np.random.default_rng(seed)

    def normal(*size):
        return rng.normal(size=size).astype(jnp.dtype(dtype))

    q = normal(shape.batch, shape.rows, shape.heads, shape.head_dim)
    k = normal(shape.batch, shape.kv_heads, shape.length, shape.head_dim)
    v = normal(shape.batch, shape.kv_heads, shape.length, shape.head_dim)
    pad = rng.integers(0, max(1, shape.length // 2), shape.batch).astype(np.int32)
    pad[0] = 0 if shape.batch > 1 else pad[0]
    rows = np.stack([rng.choice(shape.length, shape.rows, False) for _ in range(shape.batch)])
    positions = np.maximum(np.sort(rows, axis=1) - pad[:, None], 0).astype(np.int32)
    for b, some in enumerate(pad):
        k[b, :, :some] = np.nan
    return q, k, v, positions, pad, rng


def clean(x):
    """Poison removed, for the oracle."""
    return np.nan_to_num(x.astype(np.float64), nan=0.0)


def before(q, k, pad, rng, positions=None, theta=None):
    """Scores of an earlier pass with slightly other queries, as the op would have kept them."""
    other = q.astype(np.float64) + 0.3 * rng.normal(size=q.shape)
    s = oracle.scores(other, clean(k), pad, positions, theta)
    kept = np.where(s == oracle.NEGATIVE, NEGATIVE, s).astype(np.float32)
    return s, (kept, oracle.softmax(s)[1].astype(np.float32))


def drift_tolerance(drift, allowed):
    """Scores off by e change a divergence by about e * sqrt(2 KL) + e^2; its terms cancel."""
    return allowed * np.sqrt(2 * drift.max()) + allowed**2 + 32 * EPSILON["float32"]


# Shrinking a failure would compile for minutes.
FEW = settings(
    max_examples=2, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate)
)
MANY = settings(FEW, max_examples=12, derandomize=False)


def close(got, want, tolerance, what=""):
    """Everything written, and nowhere further off than `tolerance`."""
    got = np.asarray(got).astype(np.float64)
    assert got.shape == want.shape
    assert np.isfinite(got).all(), f"{what}: {np.count_nonzero(~np.isfinite(got))} not written"
    masked = want <= 0.99 * NEGATIVE
    assert (got[masked] <= 0.99 * NEGATIVE).all(), f"{what}: a masked key has a score"
    error = np.abs(got - want)[~masked].max(initial=0.0)
    assert error <= tolerance, f"{what}: off by {error:.3g}, allowed {tolerance:.3g}"
