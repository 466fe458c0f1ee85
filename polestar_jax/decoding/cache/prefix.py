"""Fast-dLLM's prefix cache: everything before the block is frozen between openings."""

import dataclasses

import jax.numpy as jnp
from jax import Array, lax

from polestar_jax.decoding.cache.base import PassOutput, plain_output
from polestar_jax.decoding.cache.opening import OpensInFull
from polestar_jax.decoding.context import Context
from polestar_jax.decoding.passes import RowsResult, run_rows
from polestar_jax.decoding.state import DecodeState

MAX_SIZES = 4  # compiled row counts of a later pass; the smallest that fits is run


@dataclasses.dataclass(frozen=True)
class PrefixCache(OpensInFull):
    """A full forward opens each block; later passes run all rows from the block's first on.

    How many rows that is shrinks from block to block. A few row counts are compiled; a pass takes
    the smallest that covers its rows and writes no row before the block, so the result does not
    depend on the choice.
    """

    def denoise(self, ctx: Context, state: DecodeState, active: Array) -> PassOutput:
        blocks, sizes = ctx.config.num_blocks, min(MAX_SIZES, ctx.config.num_blocks)
        counts = sorted({-(-blocks * i // sizes) for i in range(1, sizes + 1)})
        left = blocks - state.block  # blocks that a pass has to run
        first = ctx.block_start(state.block) - ctx.lead

        def run(count: int) -> RowsResult:
            rows = count * ctx.block_length + ctx.lead
            start = ctx.total - rows
            writable = (start + jnp.arange(rows))[None, :] >= first
            return run_rows(
                ctx, state.tokens, state.cache, start, rows, ctx.block_start(state.block),
                writable=writable & active[:, None], memory=state.memory, exact=ctx.exact_shift,
            )  # fmt: skip

        index = jnp.searchsorted(jnp.asarray(counts), left)
        result = lax.switch(index, [lambda c=c: run(c) for c in counts])
        return plain_output(ctx, state, result, result.layers, kind=2)
