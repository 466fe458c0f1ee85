"""Attention of some rows over all cached keys, and its drift since the previous pass."""

from polestar_jax.kernels.drift_attention.api import DriftAttention, drift_attention

__all__ = ["DriftAttention", "drift_attention"]
