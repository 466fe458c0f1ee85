"""Window rows of LLaDA-8B (4,096 wide) and Dream-7B (3,584), and small odd ones."""

from polestar_jax.kernels.shapes import StoreShape

SHAPES = {
    "llada-8b": StoreShape(1, 128, 4096, 8),
    "llada-8b-batch-4": StoreShape(4, 32, 4096, 8),
    "dream-7b": StoreShape(1, 128, 3584, 8),
    "embedded": StoreShape(2, 48, 128, 8),
    "odd-width": StoreShape(3, 5, 4112, 3),
    "odd-row": StoreShape(2, 1, 16, 1),
}
