"""What holds for every test: the CPU, and numbers that never change type behind our back."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
