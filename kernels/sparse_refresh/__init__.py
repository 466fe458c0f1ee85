"""Refresh of selected rows: fetch them, attend, and write their keys and values back in place."""

from polestar_jax.kernels.sparse_refresh.api import (
    attend_rows,
    gather_cache,
    gather_rows,
    scatter_cache,
    scatter_rows,
)

__all__ = ["attend_rows", "gather_cache", "gather_rows", "scatter_cache", "scatter_rows"]
