"""Block rows over the whole cache: blocks of 32, one more row for Dream's shifted prediction."""

from polestar_jax.kernels.shapes import AttentionShape

SHAPES = {
    "llada-8b": AttentionShape(1, 32, 32, 32, 128, 1280),
    "llada-8b-block-64": AttentionShape(1, 64, 32, 32, 128, 1280),
    "llada-8b-long": AttentionShape(1, 32, 32, 32, 128, 4096),
    "llada-8b-batch-16": AttentionShape(16, 32, 32, 32, 128, 256),
    "dream-7b": AttentionShape(1, 33, 28, 4, 128, 1280),
    "dream-7b-batch-4": AttentionShape(4, 33, 28, 4, 128, 512),
    "embedded": AttentionShape(2, 32, 4, 4, 32, 160),
    "odd-length": AttentionShape(2, 32, 4, 2, 128, 301),
    "odd-row": AttentionShape(3, 1, 4, 4, 64, 200),
    "odd-head": AttentionShape(2, 7, 6, 3, 80, 130),
}
