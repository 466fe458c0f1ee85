"""Finishing a layer of a sparse refresh: the pass's rows and the selected ones in one product."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from polestar_jax.decoding.cache.base import SuffixPrediction, block_positions
from polestar_jax.decoding.cache.polestar_settings import PolestarSettings
from polestar_jax.decoding.context import Context, Rope
from polestar_jax.decoding.ops import attend_cached, gather_hidden, scatter_rows
from polestar_jax.decoding.passes import predicting_rows, project_kv, update_layer
from polestar_jax.decoding.predict import Prediction, predict
from polestar_jax.decoding.state import DecodeState, LayerCache
from polestar_jax.drift.selection import compact, spread
from polestar_jax.drift.window import Window


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packet:
    """Rows of a layer's input that changed; S slots, of which the first `count` are used.

    Attributes:
        changed: bool [B, W], in window coordinates.
        index: int32 [B, S], the window row in each slot.
        hidden: [B, S, M], the layer's new input there.
        kv: rotated keys, values and raw keys there, [B, S, Hk, D] each.
    """

    changed: Array
    index: Array
    hidden: Array
    kv: tuple[Array, ...]

    @property
    def count(self) -> Array:
        """int32 [B]."""
        return jnp.sum(self.changed, axis=-1, dtype=jnp.int32)

    def dense(self, rows: Array) -> Array:
        """Slots [B, S, ...] at their window rows, [B, W, ...]; defined where `changed`."""
        return spread(self.changed, rows)


def last_rows(ctx: Context, x: Array, start: Array, block_start: Array) -> Array:
    """Rows of the last layer from a pass's rows x [B, R, ...]: those that predict the block.

    Where logits are shifted and the suffix may be committed, the block's last row comes behind
    them: it predicts the first position after the block.
    """
    picked = predicting_rows(ctx, x, start, block_start, ctx.exact_shift)
    return jnp.concatenate([picked, x[:, -1:]], axis=1) if predicts_next(ctx) else picked


def predicts_next(ctx: Context) -> bool:
    """Whether the block's last row is read for the first position behind the block."""
    shifted = ctx.model_config.shift_logits
    return shifted and ctx.config.commit.suffix_threshold is not None


def write_packet(ctx: Context, cache: LayerCache, packet: Packet, start: Array) -> LayerCache:
    """The cache with the packet's keys and values at its rows, `start` + window index."""
    if ctx.kernels:
        _, v, raw = packet.kv
        return scatter_rows(ctx, cache, raw, v, packet.index + start, packet.count)
    # One contiguous window is read, patched and written: cheaper than a scatter on a CPU.
    k, v, raw = (packet.dense(a) for a in packet.kv)
    return update_layer(cache, k, v, raw, start, packet.changed)


def with_selected(
    ctx: Context,
    layer: int,
    x: Array,
    attended: Array,
    hidden: Array,
    cached: LayerCache,
    window: Window,
    index: Array,
    count: Array,
) -> tuple[Array, Rope]:
    """Finish a layer for the pass's rows and the selected ones at once.

    x [B, R, M] and attended [B, R, H * D] are the pass's rows, hidden [B, W, M] the layer's inputs
    at the window rows; index int32 [B, S] the selected ones, of which the first count [B] exist.
    Returns outputs [B, R + S, M] and the
    selected rows' rotary tables.
    """
    model = ctx.model
    rows = gather_hidden(ctx, hidden, index, count)
    rope = Rope(*(rows_at(a, index) for a in ctx.rope(window.start, window.width)))
    q = model.query(layer, model.normed(layer, "attn_norm", rows))
    selected = attend_cached(ctx, q, rope, cached, count)
    out = model.finish(
        layer,
        jnp.concatenate([x, rows], axis=1),
        jnp.concatenate([attended, selected], axis=1),
    )
    return out, rope


def rows_at(x: Array, index: Array) -> Array:
    """x [B, W, ...] at index int32 [B, S]: [B, S, ...]."""
    return jnp.take_along_axis(x, index.reshape(*index.shape, *([1] * (x.ndim - 2))), axis=1)


def switch_rows(
    counts: tuple[int, ...], selected: Array, branch: Callable[[Array, Array], tuple]
) -> tuple:
    """Run `branch(index [B, S], count [B])` with the smallest compiled S that holds all rows."""
    count = jnp.sum(selected, axis=-1, dtype=jnp.int32)
    which = jnp.searchsorted(jnp.asarray(counts), jnp.max(count))
    return lax.switch(which, [lambda c=c: branch(compact(selected, c), count) for c in counts])


def recompute(
    ctx: Context,
    policy: PolestarSettings,
    layer: int,
    x: Array,
    attended: Array,
    hidden: Array,
    selected: Array,
    cached: LayerCache,
    window: Window,
    rope: Rope,
) -> tuple[Array, tuple[Array, Array, Array], Packet]:
    """Finish `layer` for the pass's rows and the selected ones, and start the next layer.

    Returns the pass's rows [B, R, M] for the next layer, their keys, values and raw keys there,
    and the packet of selected rows.
    """
    rows, counts = x.shape[1], policy.row_counts(ctx)

    def branch(index: Array, count: Array) -> tuple:
        out, own = with_selected(ctx, layer, x, attended, hidden, cached, window, index, count)
        both = Rope(*(jnp.concatenate(pair, axis=1) for pair in zip(rope, own)))
        fresh = project_kv(ctx, layer + 1, ctx.model.normed(layer + 1, "attn_norm", out), both)
        # Every branch hands on as many slots as the largest.
        slots = tuple(_pad_rows(a[:, rows:], counts[-1]) for a in (out, *fresh))
        return out[:, :rows], tuple(a[:, :rows] for a in fresh), slots

    x, kv, (out, *slots) = switch_rows(counts, selected, branch)
    return x, kv, Packet(selected, compact(selected, counts[-1]), out, tuple(slots))


def _pad_rows(x: Array, rows: int) -> Array:
    return jnp.pad(x, ((0, 0), (0, rows - x.shape[1]), *([(0, 0)] * (x.ndim - 2))))


def last_predictions(
    ctx: Context,
    policy: PolestarSettings,
    state: DecodeState,
    x: Array,
    attended: Array,
    hidden: Array,
    selected: Array,
    cached: LayerCache,
    window: Window,
    trigger: Array,
) -> tuple[Prediction, SuffixPrediction | None]:
    """Finish the last layer and predict the block and, where wanted, the refreshed rows.

    x [B, R, M], attended [B, R, H * D]: rows from `last_rows`.
    """
    layer, length = ctx.model_config.num_layers - 1, ctx.block_length
    shift = int(ctx.model_config.shift_logits)
    end = (state.block + 1) * length  # generation position behind the block
    own = block_positions(ctx, state)

    def read(rows: Array, positions: Array) -> Prediction:
        return predict(ctx.model, ctx.config, rows, state.keys, state.nfe, positions)

    if ctx.config.commit.suffix_threshold is None:
        return read(ctx.model.finish(layer, x, attended), own), None
    if predicts_next(ctx):
        own = jnp.concatenate([own, jnp.full((ctx.batch, 1), end)], axis=1)

    def branch(index: Array, count: Array) -> tuple:
        out, _ = with_selected(ctx, layer, x, attended, hidden, cached, window, index, count)
        positions = jnp.maximum(window.rows[index] + shift - ctx.prompt, 0)
        both = read(out, jnp.concatenate([own, positions], axis=1))
        rows = x.shape[1]
        behind = (spread(selected, a[:, rows:]) for a in (both.token, both.confidence))
        return jax.tree.map(lambda a: a[:, :rows], both), tuple(behind)

    block, (token, confidence) = switch_rows(policy.row_counts(ctx), selected, branch)
    candidate = selected & window.suffix
    token = jnp.where(selected, token, -1)
    confidence = jnp.where(selected, confidence, jnp.nan)
    # One spare column: a shifted model's last row would predict the position behind the canvas.
    at = window.start + shift
    suffix = SuffixPrediction(
        token=lax.dynamic_update_slice_in_dim(_columns(ctx, -1, jnp.int32), token, at, axis=1),
        confidence=lax.dynamic_update_slice_in_dim(
            _columns(ctx, jnp.nan, jnp.float32), confidence, at, axis=1
        ),
        candidate=lax.dynamic_update_slice_in_dim(
            _columns(ctx, False, bool), candidate, at, axis=1
        ),
    )
    if predicts_next(ctx):
        here = (jnp.arange(ctx.total + 1) == ctx.prompt + end)[None, :] & trigger[:, None]
        suffix = SuffixPrediction(
            token=jnp.where(here, block.token[:, length:], suffix.token),
            confidence=jnp.where(here, block.confidence[:, length:], suffix.confidence),
            candidate=suffix.candidate | here,
        )
    return (
        jax.tree.map(lambda a: a[:, :length], block),
        jax.tree.map(lambda a: a[:, : ctx.total], suffix),
    )


def _columns(ctx: Context, fill: float, dtype: type) -> Array:
    return jnp.full((ctx.batch, ctx.total + 1), fill, dtype)
