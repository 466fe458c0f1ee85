"""Drift of the clusters: attention of centroid queries, without values and positions."""

from polestar_jax.kernels.proxy_drift.api import ProxyDrift, proxy_drift

__all__ = ["ProxyDrift", "proxy_drift"]
