"""Fast-dLLM's dual cache: everything but the block is frozen between openings."""

import dataclasses

import jax.numpy as jnp
from jax import Array

from polestar_jax.decoding.cache.base import PassOutput, plain_output
from polestar_jax.decoding.cache.opening import OpensInFull
from polestar_jax.decoding.context import Context
from polestar_jax.decoding.passes import run_rows
from polestar_jax.decoding.state import DecodeState


@dataclasses.dataclass(frozen=True)
class DualCache(OpensInFull):
    """A full forward opens each block; later passes run the block's rows only.

    The block's keys and values replace the cached ones in every pass (arXiv 2505.22618).
    """

    def denoise(self, ctx: Context, state: DecodeState, active: Array) -> PassOutput:
        start = ctx.block_start(state.block)
        rows = ctx.lead + ctx.block_length
        result = run_rows(
            ctx, state.tokens, state.cache, start - ctx.lead, rows, start,
            writable=jnp.broadcast_to(active[:, None], (ctx.batch, rows)),
            memory=state.memory, exact=ctx.exact_shift,
        )  # fmt: skip
        return plain_output(ctx, state, result, result.layers, kind=2)
