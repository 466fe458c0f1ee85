"""Centroids of 8 clusters; up to 64 where every window row is a cluster of its own."""

from polestar_jax.kernels.shapes import AttentionShape

SHAPES = {
    "llada-8b": AttentionShape(1, 8, 32, 32, 128, 1280),
    "llada-8b-64-clusters": AttentionShape(1, 64, 32, 32, 128, 1280),
    "llada-8b-batch-16": AttentionShape(16, 8, 32, 32, 128, 256),
    "dream-7b": AttentionShape(1, 8, 28, 4, 128, 1280),
    "embedded": AttentionShape(2, 8, 4, 4, 32, 160),
    "odd-length": AttentionShape(2, 5, 4, 2, 64, 301),
    "odd-cluster": AttentionShape(3, 1, 4, 4, 128, 65),
    "odd-head": AttentionShape(2, 7, 6, 3, 80, 130),
}
