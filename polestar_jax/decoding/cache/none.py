"""No cache: every pass computes the whole sequence."""

import dataclasses

from jax import Array

from polestar_jax.decoding.cache.base import CachePolicy, PassOutput, Phase, always, plain_output
from polestar_jax.decoding.context import Context
from polestar_jax.decoding.passes import run_rows
from polestar_jax.decoding.state import DecodeState


@dataclasses.dataclass(frozen=True)
class NoCache(CachePolicy):
    """Every pass is a full forward; the exact baseline that caches approximate."""

    def phases(self) -> tuple[Phase, ...]:
        return (Phase("full", always, self.full),)

    def full(self, ctx: Context, state: DecodeState, active: Array) -> PassOutput:
        result = run_rows(
            ctx, state.tokens, None, 0, ctx.total, ctx.block_start(state.block), memory=state.memory
        )
        return plain_output(ctx, state, result, (), kind=0)
