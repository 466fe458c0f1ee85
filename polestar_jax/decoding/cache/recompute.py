"""Finishing a layer of a sparse refresh: the pass's rows and the selected ones in one product."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array, lax

from polestar_jax.attention import attend
from polestar_jax.decoding.cache.base import SuffixPrediction, block_positions
from polestar_jax.decoding.cache.clusters import LayerClusters
from polestar_jax.decoding.context import Context
from polestar_jax.decoding.passes import predicting_rows, project_kv
from polestar_jax.decoding.predict import Prediction, predict
from polestar_jax.decoding.state import DecodeState, LayerCache
from polestar_jax.drift.selection import compact, spread
from polestar_jax.drift.window import Window
from polestar_jax.rope import apply_rope

if TYPE_CHECKING:
    from polestar_jax.decoding.cache.polestar import PolestarCache

Rope = tuple[Array, ...]  # cosines and sines of the rows at hand


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packet:
    """Rows of a layer's input that changed, in window coordinates.

    changed bool [B, W]; hidden [B, W, M] and `kv` (keys, values, raw keys [B, W, Hk, D]) mean
    something where changed.
    """

    changed: Array
    hidden: Array
    kv: tuple[Array, Array, Array]


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


def with_selected(
    ctx: Context,
    layer: int,
    x: Array,
    attended: Array,
    clusters: LayerClusters,
    cached: LayerCache,
    window: Window,
    index: Array,
) -> tuple[Array, Array, Array]:
    """Finish a layer for the pass's rows and the selected ones at once.

    x [B, R, M] and attended [B, R, H * D] are the pass's rows; index int32 [B, S] the selected
    window rows. Returns outputs [B, R + S, M] and the selected rows' rotary tables.
    """
    model = ctx.model
    rows = jnp.take_along_axis(clusters.hidden, index[..., None], axis=1)
    cos, sin = (
        jnp.take_along_axis(a, index[..., None], axis=1)
        for a in ctx.rope(window.start, window.width)
    )
    q = apply_rope(model.query(layer, model.normed(layer, "attn_norm", rows)), cos, sin)
    selected = attend(q, cached.k, cached.v, ctx.key_mask)
    out = model.finish(
        layer,
        jnp.concatenate([x, rows], axis=1),
        jnp.concatenate([attended, selected], axis=1),
    )
    return out, cos, sin


def switch_rows(
    counts: tuple[int, ...], selected: Array, branch: Callable[[Array], tuple]
) -> tuple:
    """Run `branch(index [B, S])` with the smallest compiled row count S that holds all rows."""
    most = jnp.max(jnp.sum(selected, axis=-1))
    which = jnp.searchsorted(jnp.asarray(counts), most)
    return lax.switch(which, [lambda c=c: branch(compact(selected, c)[0]) for c in counts])


def recompute(
    ctx: Context,
    policy: "PolestarCache",
    layer: int,
    x: Array,
    attended: Array,
    clusters: LayerClusters,
    selected: Array,
    cached: LayerCache,
    window: Window,
    rope: Rope,
) -> tuple[Array, tuple[Array, Array, Array], Packet]:
    """Finish `layer` for the pass's rows and the selected ones, and start the next layer.

    Returns the pass's rows [B, R, M] for the next layer, their keys, values and raw keys there,
    and the packet of selected rows.
    """
    rows = x.shape[1]

    def branch(index: Array) -> tuple:
        out, cos, sin = with_selected(ctx, layer, x, attended, clusters, cached, window, index)
        cos, sin = (jnp.concatenate(pair, axis=1) for pair in zip(rope, (cos, sin)))
        fresh = project_kv(ctx, layer + 1, ctx.model.normed(layer + 1, "attn_norm", out), cos, sin)
        changed, *changed_kv = (spread(selected, a[:, rows:]) for a in (out, *fresh))
        own_kv = tuple(a[:, :rows] for a in fresh)
        return out[:, :rows], own_kv, changed, tuple(changed_kv)

    x, kv, changed, changed_kv = switch_rows(policy.row_counts(ctx), selected, branch)
    return x, kv, Packet(selected, changed, changed_kv)


def last_predictions(
    ctx: Context,
    policy: "PolestarCache",
    state: DecodeState,
    x: Array,
    attended: Array,
    clusters: LayerClusters,
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

    def read(hidden: Array, positions: Array) -> Prediction:
        return predict(ctx.model, ctx.config, hidden, state.keys, state.nfe, positions)

    if ctx.config.commit.suffix_threshold is None:
        return read(ctx.model.finish(layer, x, attended), own), None
    if predicts_next(ctx):
        own = jnp.concatenate([own, jnp.full((ctx.batch, 1), end)], axis=1)

    def branch(index: Array) -> tuple:
        out, _, _ = with_selected(ctx, layer, x, attended, clusters, cached, window, index)
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
