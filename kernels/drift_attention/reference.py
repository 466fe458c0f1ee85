"""The op in plain JAX: what every back end without the kernel runs."""

from typing import Any

from polestar_jax.kernels.drift_attention.arguments import Arguments, Results
from polestar_jax.kernels.layout import rotate_keys, rotate_queries
from polestar_jax.models.attention import attend_with_drift


def drift_attention(arguments: Arguments, *, theta: float, scores_dtype: Any) -> Results:
    """Keys are rotated as a whole, and all scores exist at once."""
    q, k, v, positions, pad, previous = arguments
    keys, mask = rotate_keys(k, pad, theta)
    attended, scores, normaliser, kl = attend_with_drift(
        rotate_queries(q, positions, theta), keys, v, mask, previous
    )
    return Results(attended, scores.astype(scores_dtype), normaliser, kl)
