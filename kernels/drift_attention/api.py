"""The public function of the op, the same for every implementation."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from polestar_jax.errors import PolestarError
from polestar_jax.kernels.checks import (
    as_int32,
    check_dtype,
    check_previous,
    check_shapes,
    check_theta,
    same_floats,
)
from polestar_jax.kernels.dispatch import dispatch
from polestar_jax.kernels.drift_attention import pallas, reference
from polestar_jax.kernels.drift_attention.arguments import Arguments, Results
from polestar_jax.kernels.layout import SCORES, check_rotary, unsupported_attention


class DriftAttention(NamedTuple):
    """What one pass leaves: its result, and what the next pass measures its drift against."""

    attended: Array  # [B, R, H * D], the values' dtype
    scores: Array  # [B, H, R, T], scaled; masked keys about -1e30
    normaliser: Array  # float32 [B, H, R], the logarithm of the sum of exp(scores)
    drift: Array | None  # float32 [B, R], mean over heads of KL(now || before)


def drift_attention(
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    pad: Array,
    previous: tuple[Array, Array] | None = None,
    *,
    theta: float,
    scores_dtype: Any = jnp.float32,
    implementation: str | None = None,
) -> DriftAttention:
    """softmax(rope(q) rope(k)^T / sqrt(D)) v over all keys, with the drift of its distribution.

    Drift (arXiv 2607.14107, token drift): mean over heads of max(0, KL(now || before)), where
    probabilities are floored at 1e-12 inside the logarithms.

    Args:
      q: [B, R, H, D] queries, not rotated.
      k: [B, Hk, T, D] cached keys, not rotated; the rows' own keys must have been written.
      v: [B, Hk, T, D] cached values, finite also at pads. Float32, bfloat16 or float16, all three
        the same; D even.
      positions: int32 [B, R] of the queries. Key t of sequence b has position t - pad[b].
      pad: int32 [B] in [0, T), left pads: keys t < pad[b] are masked.
      previous: scores [B, H, R, T] and normaliser float32 [B, H, R] of the pass before; None
        computes no drift.
      theta: base of the rotary frequencies.
      scores_dtype: in which the scores are kept for the next pass, float32 or bfloat16.
      implementation: None, "xla", "pallas" or "interpret" (see `kernels.dispatch`); "mosaic" and
        "mosaic-interpret" name the body written for Hopper (half precision, D 128, T a multiple of
        64, JAX >= 0.12).

    Raises:
      PolestarError: shapes or types that do not fit together, or an implementation that can not
        run.
    """
    old_scores, old_normaliser = check_previous("drift_attention", previous)
    check_shapes(
        "drift_attention",
        at_least_one="B R H Hk T D",
        q=(q, "B R H D"),
        k=(k, "B Hk T D"),
        v=(v, "B Hk T D"),
        positions=(positions, "B R"),
        pad=(pad, "B"),
        scores=(old_scores, "B H R T"),
        normaliser=(old_normaliser, "B H R"),
    )
    same_floats("drift_attention", q=q, k=k, v=v)
    positions, pad = as_int32("drift_attention", positions=positions, pad=pad)
    check_rotary("drift_attention", q)
    check_theta("drift_attention", theta)
    kept = check_dtype("drift_attention", "scores_dtype", scores_dtype, SCORES)
    options = {"theta": theta, "scores_dtype": kept}
    attended, scores, normaliser, kl = dispatch(
        "drift_attention",
        implementation,
        Arguments(q, k, v, positions, pad, previous),
        reference=partial(reference.drift_attention, **options),
        kernel=partial(pallas.drift_attention, **options),
        unsupported=unsupported_attention(q, k),
        mosaic=partial(_mosaic, **options),
    )
    drift = None if kl is None else jnp.mean(kl, axis=1)
    return DriftAttention(attended, scores, normaliser, drift)


def _mosaic(arguments: Arguments, **options: Any) -> Results:
    """Imported on use: not every supported JAX has all of Mosaic GPU."""
    if jax.__version_info__ < (0, 12):
        raise PolestarError(
            f"drift_attention by Mosaic needs JAX 0.12, this is {jax.__version__}; use None"
        )
    from polestar_jax.kernels.drift_attention import mosaic

    return mosaic.drift_attention(arguments, **options)
