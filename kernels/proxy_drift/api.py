"""The public function of the op, the same for every implementation."""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from polestar_jax.kernels.checks import (
    as_int32,
    check_dtype,
    check_previous,
    check_shapes,
    same_floats,
)
from polestar_jax.kernels.dispatch import dispatch
from polestar_jax.kernels.layout import SCORES, unsupported_attention
from polestar_jax.kernels.proxy_drift import pallas, reference


class ProxyDrift(NamedTuple):
    """What one refresh leaves, and what the next one measures its drift against."""

    scores: Array  # [B, H, K, T], scaled; masked keys about -1e30
    normaliser: Array  # float32 [B, H, K], the logarithm of the sum of exp(scores)
    drift: Array | None  # float32 [B, K], mean over heads of KL(now || before)


def proxy_drift(
    q: Array,
    k: Array,
    pad: Array,
    previous: tuple[Array, Array] | None = None,
    *,
    scores_dtype: Any = jnp.float32,
    implementation: str | None = None,
) -> ProxyDrift:
    """softmax(q k^T / sqrt(D)) of cluster centroids over all keys, and its drift.

    Drift (arXiv 2607.14107, cluster drift): mean over heads of max(0, KL(now || before)), with
    1e-12 added to probabilities inside the logarithms. Queries and keys are not rotated.

    Args:
      q: [B, K, H, D] queries of the K centroids.
      k: [B, Hk, T, D] cached keys, not rotated; float32, bfloat16 or float16 like q.
      pad: int32 [B] in [0, T), left pads: keys t < pad[b] are masked.
      previous: scores [B, H, K, T] and normaliser float32 [B, H, K] of the refresh before; None
        computes no drift.
      scores_dtype: in which the scores are kept for the next refresh, float32 or bfloat16.
      implementation: None, "xla", "pallas" or "interpret" (see `kernels.dispatch`).

    Raises:
      PolestarError: shapes or types that do not fit together, or an implementation that can not
        run.
    """
    old_scores, old_normaliser = check_previous("proxy_drift", previous)
    check_shapes(
        "proxy_drift",
        at_least_one="B K H Hk T D",
        q=(q, "B K H D"),
        k=(k, "B Hk T D"),
        pad=(pad, "B"),
        scores=(old_scores, "B H K T"),
        normaliser=(old_normaliser, "B H K"),
    )
    same_floats("proxy_drift", q=q, k=k)
    (pad,) = as_int32("proxy_drift", pad=pad)
    kept = check_dtype("proxy_drift", "scores_dtype", scores_dtype, SCORES)
    scores, normaliser, kl = dispatch(
        "proxy_drift",
        implementation,
        q,
        k,
        pad,
        previous,
        reference=partial(reference.proxy_drift, scores_dtype=kept),
        kernel=partial(pallas.proxy_drift, scores_dtype=kept),
        unsupported=unsupported_attention(q, k),
    )
    return ProxyDrift(scores, normaliser, None if kl is None else jnp.mean(kl, axis=1))
