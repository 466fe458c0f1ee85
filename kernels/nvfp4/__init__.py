"""Rows stored as the rest to their cluster's centroid, in four bits a value."""

from polestar_jax.kernels.nvfp4.api import Quantised, dequantise, quantise

__all__ = ["Quantised", "dequantise", "quantise"]
