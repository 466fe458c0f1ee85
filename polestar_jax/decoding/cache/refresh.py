"""The sparse refresh: a denoising pass that also recomputes the rows that drifted most.

Layer by layer, an update packet (rows whose hidden input changed) is applied, the block's rows
run, clusters are ranked by the drift of their proxy attention, and the rows of the best ones are
recomputed together with the block's rows, so that both share one read of each weight. The packet
for the next layer is what they became.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from polestar_jax.decoding.cache.base import PassOutput, SuffixPrediction
from polestar_jax.decoding.cache.clusters import LayerClusters, PolestarState, centroid_queries
from polestar_jax.decoding.cache.polestar_settings import PolestarSettings
from polestar_jax.decoding.cache.recompute import (
    Packet,
    last_predictions,
    last_rows,
    recompute,
    rows_at,
    write_packet,
)
from polestar_jax.decoding.commit.base import keep_inactive
from polestar_jax.decoding.context import Context, Rope
from polestar_jax.decoding.ops import attend_cached, proxy_attention
from polestar_jax.decoding.passes import (
    attend_last,
    fetch_layer,
    project_kv,
    put_layer,
    settle_layer,
    update_layer,
)
from polestar_jax.decoding.state import (
    PASS_KINDS,
    AttentionMemory,
    DecodeState,
    LayerCache,
    StoredCache,
)
from polestar_jax.drift.clustering import move_centroids, split_clusters, unit
from polestar_jax.drift.selection import compact, rank_clusters, rows_of_clusters
from polestar_jax.drift.window import Window
from polestar_jax.store import RowStore, read_rows, update_rows
from polestar_jax.store.place import fetch, settle


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RefreshDetails:
    """What a trace records of a refresh; zeros, -1 and NaN in passes without one.

    Attributes:
        refreshed: bool [B, N, T], rows refreshed in each layer.
        drift: float32 [B, N, K], score of each cluster, NaN where the cluster does not exist.
        chosen: int32 [B, N, k], clusters chosen, best first, -1 unused.
        suffix_token, suffix_confidence: int32 and float32 [B, T], last layer's predictions at
            refreshed positions behind the block; -1 and NaN elsewhere.
    """

    refreshed: Array
    drift: Array
    chosen: Array
    suffix_token: Array
    suffix_confidence: Array


@dataclasses.dataclass(frozen=True)
class Selection:
    """Rows to recompute in one layer: `rows` bool [B, W], `chosen` int32 [B, k], `score` [B, K]."""

    rows: Array
    chosen: Array
    score: Array


Choose = Callable[[int, Array, LayerClusters], Selection]


def no_suffix(ctx: Context) -> SuffixPrediction | None:
    """Predictions behind the block of a pass that made none."""
    if ctx.config.commit.suffix_threshold is None:
        return None
    shape = (ctx.batch, ctx.total)
    return SuffixPrediction(
        token=jnp.full(shape, -1, jnp.int32),
        confidence=jnp.full(shape, jnp.nan, jnp.float32),
        candidate=jnp.zeros(shape, bool),
    )


def empty_details(ctx: Context, policy: PolestarSettings) -> RefreshDetails:
    """Record of a pass without refresh."""
    b, n, k = ctx.batch, ctx.model_config.num_layers, policy.num_clusters
    most = max(policy.refresh_clusters, policy.refresh_clusters_last)
    return RefreshDetails(
        refreshed=jnp.zeros((b, n, ctx.total), bool),
        drift=jnp.full((b, n, k), jnp.nan, jnp.float32),
        chosen=jnp.full((b, n, min(most, k)), -1, jnp.int32),
        suffix_token=jnp.full((b, ctx.total), -1, jnp.int32),
        suffix_confidence=jnp.full((b, ctx.total), jnp.nan, jnp.float32),
    )


def chooser(ctx: Context, policy: PolestarSettings, state: DecodeState, window: Window) -> Choose:
    """The policy's own choice of clusters, by its signal."""
    exists = split_clusters(window, policy.num_clusters).exists
    last = ctx.model_config.num_layers - 1

    def choose(layer: int, drift: Array, clusters: LayerClusters) -> Selection:
        score = cluster_score(ctx, policy, state, layer, drift, clusters, window)
        count = policy.refresh_clusters_last if layer == last else policy.refresh_clusters
        chosen = rank_clusters(score, exists, min(count, policy.num_clusters))
        return Selection(
            rows=rows_of_clusters(clusters.labels, chosen),
            chosen=chosen,
            score=jnp.where(exists, score, jnp.nan),
        )

    return choose


def cluster_score(
    ctx: Context,
    policy: PolestarSettings,
    state: DecodeState,
    layer: int,
    drift: Array,
    clusters: LayerClusters,
    window: Window,
) -> Array:
    """What clusters are ranked by, float32 [B, K]: `drift` (KL) or one of the ablations."""
    if policy.signal == "kl":
        return drift
    if policy.signal == "cosine":
        return 1.0 - jnp.sum(unit(clusters.centroids) * unit(clusters.anchor), axis=-1)
    if policy.signal == "uncertainty":
        member = clusters.labels[:, None, :] == jnp.arange(policy.num_clusters)[None, :, None]
        tokens = ctx.rows_of(state.tokens, window.start, window.width)
        masked = tokens == ctx.model_config.mask_token
        doubt = jnp.where(masked, state.cache.uncertainty, 0.0)  # committed tokens are certain
        total = jnp.sum(jnp.where(member, doubt[:, None, :], 0.0), axis=-1)
        return total / jnp.maximum(clusters.counts, 1.0)

    def draw(key: Array, passes: Array) -> Array:
        key = jax.random.fold_in(jax.random.fold_in(key, 2**31 + 2), passes)
        return jax.random.uniform(jax.random.fold_in(key, layer), (policy.num_clusters,))

    return jax.vmap(draw)(state.keys, state.nfe)


def apply_packet(
    ctx: Context, clusters: LayerClusters, store: RowStore, data: Array, old: Array, packet: Packet
) -> tuple[LayerClusters, RowStore, Array]:
    """Centroids, stored rows and hidden inputs [B, W, M] after the packet's rows changed.

    `data` and `old` are the store's contents, as fetched and as read. Where rows lose precision
    in the store, this pass goes on with the exact ones, and the centroids move by what is stored:
    so the errors of repeated refreshes cancel instead of adding up.
    """
    new = packet.dense(packet.hidden)
    store, kept = update_rows(
        store, data, old, new, packet.changed, clusters.labels, ctx.implementation
    )
    centroids = move_centroids(
        clusters.centroids, clusters.counts, clusters.labels, packet.changed, kept, old
    )
    hidden = jnp.where(packet.changed[..., None], new, old)
    return dataclasses.replace(clusters, centroids=centroids), store, hidden


def suffix_packet(
    ctx: Context, state: DecodeState, window: Window, trigger: Array
) -> tuple[Packet, Array]:
    """Layer 0's packet of tokens committed behind the block, and the tokens [B, W] it embeds."""
    tokens = ctx.rows_of(state.tokens, window.start, window.width)
    changed = (tokens != state.cache.embedded) & window.members & trigger[:, None]
    hidden = ctx.model.embed_tokens(tokens)
    rope = ctx.rope(window.start, window.width)
    kv = project_kv(ctx, 0, ctx.model.normed(0, "attn_norm", hidden), rope)
    embedded = jnp.where(changed, tokens, state.cache.embedded)
    index = compact(changed, window.width)
    hidden, *slots = (rows_at(a, index) for a in (hidden, *kv))
    return Packet(changed, index, hidden, tuple(slots)), embedded


def refresh_pass(
    ctx: Context,
    policy: PolestarSettings,
    state: DecodeState,
    window: Window,
    active: Array,
    trigger: Array,
    choose: Choose | None = None,
) -> PassOutput:
    """A denoising pass with sparse refresh for the sequences in `trigger` (bool [B]).

    `choose` replaces the policy's selection of rows (tests feed recorded ones).
    """
    model, last = ctx.model, ctx.model_config.num_layers - 1
    cache: PolestarState = state.cache
    choose = chooser(ctx, policy, state, window) if choose is None else choose
    start, rows = ctx.block_start(state.block) - ctx.lead, ctx.lead + ctx.block_length
    writable = jnp.broadcast_to(active[:, None], (ctx.batch, rows))
    rope: Rope = ctx.rope(start, rows)
    x = model.embed_tokens(ctx.rows_of(state.tokens, start, rows))
    kv = project_kv(ctx, 0, model.normed(0, "attn_norm", x), rope)
    packet: Packet | None = None
    embedded = cache.embedded
    if policy.reembed_suffix_commits:
        packet, embedded = suffix_packet(ctx, state, window, trigger)
    layers: list[StoredCache] = []
    stores: list[RowStore] = []
    clusters, selections = [], []
    ahead, x = fetch_next(cache, 0, x)
    for layer in range(last + 1):
        # What lies in host memory comes one layer ahead of its use.
        cached, data = ahead
        if layer < last:
            ahead, x = fetch_next(cache, layer + 1, x)
        if layer >= 2:
            layers[layer - 2], x = settle_layer(layers[layer - 2], x)
            stores[layer - 2], x = settle(stores[layer - 2], stores[layer - 2].place, x)
        own, store = cache.clusters[layer], cache.hidden[layer]
        hidden = read_rows(store, data, own.labels, model.dtype, ctx.implementation)
        if packet is not None:
            own, store, hidden = apply_packet(ctx, own, store, data, hidden, packet)
            cached = write_packet(ctx, cached, packet, window.start)
        cached = update_layer(cached, *kv, start, writable)
        if layer == last:
            block_start = ctx.block_start(state.block)
            x = last_rows(ctx, x, start, block_start)
            rope = Rope(*(last_rows(ctx, a, start, block_start) for a in rope))
        q, proxy = block_and_proxy_queries(ctx, layer, x, own.centroids)
        own, selection = select_rows(ctx, choose, layer, proxy, own, cached, trigger)
        if layer == 0 and packet is not None:
            selection = dataclasses.replace(selection, rows=selection.rows | packet.changed)
        layers.append(put_layer(cache.layers[layer], cached, window.start, window.width))
        stores.append(store)
        clusters.append(own)
        selections.append(selection)
        if layer < last:
            attended = attend_cached(ctx, q, rope, cached)
            x, kv, packet = recompute(
                ctx, policy, layer, x, attended, hidden, selection.rows, cached, window, rope
            )
    attended, memory, drift = attend_last_rows(ctx, q, rope, cached, state)
    prediction, suffix = last_predictions(
        ctx, policy, state, x, attended, hidden, selection.rows, cached, window, trigger
    )
    if suffix is None:  # the last layer's rows are read by the suffix rule alone
        selections[-1] = dataclasses.replace(selection, rows=jnp.zeros_like(selection.rows))
    return PassOutput(
        prediction=prediction,
        cache=PolestarState(
            layers=tuple(layers),
            clusters=tuple(clusters),
            hidden=tuple(stores),
            embedded=embedded,
            uncertainty=_uncertainty(ctx, cache.uncertainty, suffix, window),
        ),
        kind=jnp.where(trigger, PASS_KINDS.index("refresh"), PASS_KINDS.index("cached")),
        memory=memory,
        drift=drift,
        suffix=suffix,
        refreshed_rows=sum(
            (jnp.sum(s.rows, axis=-1, dtype=jnp.int32) for s in selections),
            jnp.zeros(ctx.batch, jnp.int32),
        ),
        details=_details(ctx, policy, selections, suffix, window, trigger),
    )


def fetch_next(
    cache: PolestarState, layer: int, x: Array
) -> tuple[tuple[LayerCache, Array], Array]:
    """The layer's cache and stored rows on the device, and `x`; see `store.place.fetch`."""
    cached, x = fetch_layer(cache.layers[layer], x)
    store = cache.hidden[layer]
    data, x = fetch(store.data, store.place, x)
    return (cached, data), x


def block_and_proxy_queries(
    ctx: Context, layer: int, x: Array, centroids: Array
) -> tuple[Array, Array]:
    """Un-rotated queries of the rows x [B, R, M] and of the centroids, in one product."""
    normed = ctx.model.normed(layer, "attn_norm", x)
    both = jnp.concatenate([normed, centroid_queries(ctx, layer, centroids)], axis=1)
    queries = ctx.model.query(layer, both)
    return queries[:, : x.shape[1]], queries[:, x.shape[1] :]


def select_rows(
    ctx: Context,
    choose: Choose,
    layer: int,
    proxy: Array,
    clusters: LayerClusters,
    cached: LayerCache,
    trigger: Array,
) -> tuple[LayerClusters, Selection]:
    """Measure the clusters' drift, choose rows, and remember the proxy attention."""
    previous = (clusters.scores, clusters.normaliser)
    scores, normaliser, drift = proxy_attention(ctx, proxy, cached, previous)
    assert drift is not None
    selection = choose(layer, drift, clusters)
    seen = dataclasses.replace(
        clusters,
        scores=scores,
        normaliser=normaliser,
        anchor=clusters.centroids[..., : clusters.anchor.shape[-1]],
    )
    selection = dataclasses.replace(selection, rows=selection.rows & trigger[:, None])
    return keep_inactive(trigger, seen, clusters), selection


def attend_last_rows(
    ctx: Context, q: Array, rope: Rope, cached: LayerCache, state: DecodeState
) -> tuple[Array, AttentionMemory | None, Array | None]:
    """Attention of the rows from `last_rows`; memory and drift of those that predict the block."""
    length = ctx.block_length
    own = Rope(*(a[:, :length] for a in rope))
    attended, memory, drift = attend_last(ctx, q[:, :length], own, cached, state.memory, False)
    if q.shape[1] > length:
        rest = Rope(*(a[:, length:] for a in rope))
        behind = attend_cached(ctx, q[:, length:], rest, cached)
        attended = jnp.concatenate([attended, behind], axis=1)
    return attended, memory, drift


def _uncertainty(
    ctx: Context, old: Array, suffix: SuffixPrediction | None, window: Window
) -> Array:
    """1 - confidence [B, W], renewed where the pass predicted."""
    if suffix is None:
        return old
    confidence = ctx.rows_of(suffix.confidence, window.start, window.width)
    return jnp.where(jnp.isnan(confidence), old, 1.0 - confidence)


def _details(
    ctx: Context,
    policy: PolestarSettings,
    selections: list[Selection],
    suffix: SuffixPrediction | None,
    window: Window,
    trigger: Array,
) -> RefreshDetails:
    empty = empty_details(ctx, policy)
    width = empty.chosen.shape[-1]
    chosen = [
        jnp.pad(s.chosen, ((0, 0), (0, width - s.chosen.shape[1])), constant_values=-1)
        for s in selections
    ]
    refreshed = jnp.stack([s.rows for s in selections], axis=1)
    full = RefreshDetails(
        refreshed=lax.dynamic_update_slice_in_dim(empty.refreshed, refreshed, window.start, axis=2),
        drift=jnp.stack([s.score for s in selections], axis=1),
        chosen=jnp.stack(chosen, axis=1),
        suffix_token=empty.suffix_token if suffix is None else suffix.token,
        suffix_confidence=empty.suffix_confidence if suffix is None else suffix.confidence,
    )
    return keep_inactive(trigger, full, empty)
