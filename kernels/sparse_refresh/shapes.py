"""Rows of the selected clusters: 0 to 96 of a window of 128."""

from polestar_jax.kernels.shapes import RefreshShape

SHAPES = {
    "llada-8b": RefreshShape(1, 96, 32, 32, 128, 1280, width=4096, counts=(71,)),
    "llada-8b-batch-4": RefreshShape(4, 64, 32, 32, 128, 512, width=4096, counts=(64, 0, 9, 33)),
    "dream-7b": RefreshShape(1, 96, 28, 4, 128, 1280, width=3584, counts=(50,)),
    "dream-7b-batch-4": RefreshShape(4, 48, 28, 4, 128, 512, width=3584, counts=(0, 48, 1, 17)),
    "embedded": RefreshShape(2, 48, 4, 4, 32, 160, width=128, counts=(48, 3)),
    "odd-length": RefreshShape(2, 17, 6, 3, 64, 301, width=272, counts=(17, 16)),
    "odd-head": RefreshShape(3, 5, 6, 3, 80, 130, width=480, counts=(2, 0, 5)),
    "odd-row": RefreshShape(1, 1, 4, 2, 128, 77, width=48, counts=(1,)),
}
# Attention of an opening pass: all rows at once. Nothing is gathered or written back there.
OPENINGS = {
    "llada-8b-opening": RefreshShape(1, 1280, 32, 32, 128, 1280, width=4096, counts=(1280,)),
    "dream-7b-opening": RefreshShape(1, 1280, 28, 4, 128, 1280, width=3584, counts=(1280,)),
}
