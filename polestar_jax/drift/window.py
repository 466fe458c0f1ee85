"""The local window around a block: which rows are clustered and may be refreshed.

All per-row quantities of the method live in window coordinates: W consecutive rows that contain
the window wherever the block lies. At the ends of the sequence the W rows are shifted inwards, so
they may hold rows outside the window; masks say which count.
"""

import dataclasses

import jax.numpy as jnp
from jax import Array

from polestar_jax.decoding.context import Context


@dataclasses.dataclass(frozen=True)
class Window:
    """W rows around the current block.

    Attributes:
        start: int32, first row.
        width: W, static.
        rows: int32 [W], row numbers.
        inside: bool [B, W], rows of the window, block included, left pads excluded.
        prefix, suffix: bool [B, W], the window's rows before and behind the block.
        first: int32 [B], first row of the prefix part.
    """

    start: Array
    width: int
    rows: Array
    inside: Array
    prefix: Array
    suffix: Array
    first: Array

    @property
    def members(self) -> Array:
        """bool [B, W]: rows that are clustered (the window without the block)."""
        return self.prefix | self.suffix


def window_width(ctx: Context, before: int, after: int) -> int:
    """W: enough rows for `before` blocks, the block and `after` blocks, at most all."""
    shift = int(ctx.model_config.shift_logits)  # the row before the block predicts its first
    return min(ctx.total, (before + 1 + after) * ctx.block_length + shift)


def make_window(ctx: Context, block: Array, before: int, after: int) -> Window:
    """Window of `before` blocks before and `after` behind the block."""
    length, width = ctx.block_length, window_width(ctx, before, after)
    start_block = ctx.block_start(block)
    end_block = start_block + length
    shift = int(ctx.model_config.shift_logits)
    start = jnp.clip(start_block - before * length - shift, 0, ctx.total - width)
    rows = start + jnp.arange(width)
    first = jnp.maximum(ctx.pad, start_block - before * length)
    end = jnp.minimum(ctx.total, end_block + after * length)
    inside = (rows[None, :] >= first[:, None]) & (rows < end)[None, :]
    return Window(
        start=start,
        width=width,
        rows=rows,
        inside=inside,
        prefix=inside & (rows < start_block)[None, :],
        suffix=inside & (rows >= end_block)[None, :],
        first=first,
    )
