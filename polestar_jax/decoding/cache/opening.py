"""What Fast-dLLM's two caches share: a full forward pass opens each block."""

import abc
import dataclasses

from jax import Array

from polestar_jax.decoding.cache.base import (
    CachePolicy,
    PassOutput,
    Phase,
    full_writable,
    opened,
    opening_due,
    plain_output,
)
from polestar_jax.decoding.context import Context
from polestar_jax.decoding.passes import empty_layers, run_rows
from polestar_jax.decoding.state import DecodeState, StoredCache


@dataclasses.dataclass(frozen=True)
class OpensInFull(CachePolicy):
    """A full forward opens each block and caches every row; `denoise` is the later passes."""

    def init(self, ctx: Context) -> tuple[StoredCache, ...]:
        return empty_layers(ctx)

    def phases(self) -> tuple[Phase, ...]:
        return (Phase("open", opening_due, self.open), Phase("denoise", opened, self.denoise))

    def open(self, ctx: Context, state: DecodeState, active: Array) -> PassOutput:
        result = run_rows(
            ctx, state.tokens, state.cache, 0, ctx.total, ctx.block_start(state.block),
            writable=full_writable(ctx, active), want_memory=state.memory is not None,
        )  # fmt: skip
        return plain_output(ctx, state, result, result.layers, kind=0)

    @abc.abstractmethod
    def denoise(self, ctx: Context, state: DecodeState, active: Array) -> PassOutput:
        """A pass of the block after its opening."""
