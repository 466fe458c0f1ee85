"""Polestar-Cache's state: hidden inputs, clusters and proxy attention of the window, per layer."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from polestar_jax.decoding.cache.polestar_settings import PolestarSettings
from polestar_jax.decoding.context import Context
from polestar_jax.decoding.ops import attend_cached, proxy_attention
from polestar_jax.decoding.predict import predict
from polestar_jax.decoding.state import DecodeState, LayerCache, StoredCache
from polestar_jax.drift.clustering import kmeans, random_rows, split_clusters, strided_rows
from polestar_jax.drift.window import Window
from polestar_jax.store import RowStore

KMEANS_STREAM = 2**31 + 1  # folded into a sequence's key: apart from its sampling noise


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerClusters:
    """One layer's view of the window. W window rows, K clusters.

    Attributes:
        labels: int32 [B, W], -1 outside the window's parts.
        centroids: float32 [B, K, M].
        counts: float32 [B, K], members; 0 for empty and absent clusters.
        scores, normaliser: float32 [B, H, K, T] and [B, H, K], proxy attention of the last refresh
            or opening.
        anchor: float32 [B, K, M], centroids of that moment (signal "cosine"; else no columns).
    """

    labels: Array
    centroids: Array
    counts: Array
    scores: Array
    normaliser: Array
    anchor: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PolestarState:
    """Caches and clusters of all layers.

    Attributes:
        layers: keys (rotated and raw) and values of all T rows.
        clusters: see `LayerClusters`.
        hidden: each layer's inputs at the window rows.
        embedded: int32 [B, W], tokens whose embeddings layer 0's hidden inputs hold.
        uncertainty: float32 [B, W], 1 - confidence of each row's last prediction; kept only for
            the signal "uncertainty".
    """

    layers: tuple[StoredCache, ...]
    clusters: tuple[LayerClusters, ...]
    hidden: tuple[RowStore, ...]
    embedded: Array
    uncertainty: Array


def empty_clusters(ctx: Context, policy: PolestarSettings, width: int) -> LayerClusters:
    """Zeroed state of one layer."""
    b, k, m = ctx.batch, policy.num_clusters, ctx.model_config.width
    heads = ctx.model_config.num_heads
    return LayerClusters(
        labels=jnp.full((b, width), -1, jnp.int32),
        centroids=jnp.zeros((b, k, m), jnp.float32),
        counts=jnp.zeros((b, k), jnp.float32),
        scores=jnp.zeros((b, heads, k, ctx.total), jnp.float32),
        normaliser=jnp.zeros((b, heads, k), jnp.float32),
        anchor=jnp.zeros((b, k, m if policy.signal == "cosine" else 0), jnp.float32),
    )


def random_keys(state: DecodeState) -> Array:
    """Keys [B] for random k-means seeds, apart from those of sampling."""
    stream = jax.vmap(lambda k, n: jax.random.fold_in(jax.random.fold_in(k, KMEANS_STREAM), n))
    return stream(state.keys, state.nfe)


def centroid_queries(ctx: Context, layer: int, centroids: Array) -> Array:
    """Normed centroids [B, K, M], as rows for the query projection."""
    return ctx.model.normed(layer, "attn_norm", centroids.astype(ctx.model.dtype))


def open_clusters(
    ctx: Context,
    policy: PolestarSettings,
    layer: int,
    hidden: Array,
    cache: LayerCache,
    old: LayerClusters,
    window: Window,
    keys: Array | None,
) -> LayerClusters:
    """Cluster the layer's hidden inputs [B, W, M] afresh and record the proxy attention."""
    parts = split_clusters(window, policy.num_clusters)
    if keys is None:
        initial = strided_rows(parts)
    else:
        layer_keys = jax.vmap(lambda key: jax.random.fold_in(key, layer))(keys)
        initial = random_rows(parts, window, layer_keys)
    labels, centroids, counts = kmeans(hidden, parts, initial, policy.kmeans_iters)
    queries = ctx.model.query(layer, centroid_queries(ctx, layer, centroids))
    scores, normaliser, _ = proxy_attention(ctx, queries, cache, None)
    return LayerClusters(
        labels=labels,
        centroids=centroids,
        counts=counts,
        scores=scores,
        normaliser=normaliser,
        anchor=centroids[..., : old.anchor.shape[-1]],
    )


def window_uncertainty(
    ctx: Context, state: DecodeState, hidden: Array, cache: LayerCache, window: Window
) -> Array:
    """1 - confidence of every window row's prediction, float32 [B, W], at an opening.

    Runs the last layer on the window's inputs `hidden` [B, W, M]. Where logits are shifted, row
    i - 1 predicts position i; the first row, whose predecessor did not run, counts as uncertain.
    """
    layer, shift = ctx.model_config.num_layers - 1, int(ctx.model_config.shift_logits)
    normed = ctx.model.normed(layer, "attn_norm", hidden)
    rope = ctx.rope(window.start, window.width)
    attended = attend_cached(ctx, ctx.model.query(layer, normed), rope, cache)
    out = ctx.model.finish(layer, hidden, attended)
    positions = jnp.maximum(window.rows + shift - ctx.prompt, 0)
    positions = jnp.broadcast_to(positions, (ctx.batch, window.width))
    prediction = predict(ctx.model, ctx.config, out, state.keys, state.nfe, positions)
    doubt = 1.0 - prediction.confidence
    return jnp.roll(doubt, shift, axis=1).at[:, :shift].set(1.0)
