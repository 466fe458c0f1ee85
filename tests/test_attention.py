"""Attention in tiles of query rows is attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polestar_jax.models.attention import QUERY_TILE, attend


def oracle(q, k, v, mask):
    """The same in float64 NumPy, over all rows at once; key head h // group for query head h."""
    group = q.shape[2] // k.shape[1]
    k, v = (np.repeat(np.asarray(a, np.float64), group, axis=1) for a in (k, v))
    scores = np.einsum("brhd,bhtd->bhrt", np.asarray(q, np.float64), k) * q.shape[-1] ** -0.5
    scores = np.where(np.asarray(mask)[:, None, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhrt,bhtd->brhd", weights, v).reshape(*q.shape[:2], -1)


@pytest.mark.parametrize(
    "rows", [1, QUERY_TILE, QUERY_TILE * 3 // 2, QUERY_TILE * 3 // 2 + 1, 2 * QUERY_TILE, 333]
)
def test_tiles_of_query_rows_do_not_change_the_result(rows):
    keys = jax.random.split(jax.random.key(rows), 3)
    q = jax.random.normal(keys[0], (2, rows, 4, 8))
    k, v = (jax.random.normal(key, (2, 2, 40, 8)) for key in keys[1:])
    mask = jnp.arange(40)[None, :] >= jnp.asarray([0, 7])[:, None]
    got = jax.jit(attend)(q, k, v, mask)
    np.testing.assert_allclose(got, oracle(q, k, v, mask), rtol=1e-5, atol=1e-5)
