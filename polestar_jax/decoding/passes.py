"""One forward pass over contiguous rows against a cache: every cache policy's building block."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint

from polestar_jax.decoding.context import Context, Rope
from polestar_jax.decoding.ops import attend_cached, attend_measured
from polestar_jax.decoding.state import AttentionMemory, HostCache, LayerCache, StoredCache
from polestar_jax.models.rope import apply_rope
from polestar_jax.store.place import fetch, settle, to_host


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowsResult:
    """Outcome of a pass.

    Attributes:
        hidden: [B, L, M], last layer's output at the rows that predict the block.
        layers: the caches after the pass.
        memory: the last layer's attention of those rows, if it was asked for.
        drift: float32 [B, L] against the memory handed in, if any.
    """

    hidden: Array
    layers: tuple[StoredCache, ...]
    memory: AttentionMemory | None
    drift: Array | None


def empty_layers(ctx: Context, raw: bool = False, place: str = "device") -> tuple[StoredCache, ...]:
    """Zeroed caches for every layer; `raw` asks for the keys before rotation too."""
    c, dtype = ctx.model_config, ctx.model.dtype
    shape = (ctx.batch, c.num_kv_heads, ctx.total, c.head_dim)
    names = ("v", "raw") if ctx.kernels else ("k", "v", "raw") if raw else ("k", "v")

    def one() -> StoredCache:
        if place == "host":
            return HostCache(to_host(jnp.zeros((len(names), *shape), dtype)), names)
        return named_layer({name: jnp.zeros(shape, dtype) for name in names})

    return tuple(one() for _ in range(c.num_layers))


def named_layer(arrays: dict[str, Array]) -> LayerCache:
    """A cache of the given fields."""
    return LayerCache(k=arrays.get("k"), v=arrays["v"], raw=arrays.get("raw"))


def fetch_layer(stored: StoredCache, x: Array) -> tuple[LayerCache, Array]:
    """The cache on the device, and `x`; see `store.place.fetch`."""
    if isinstance(stored, LayerCache):
        return stored, x
    stacked, x = fetch(stored.stacked, "host", x)
    return named_layer({name: stacked[i] for i, name in enumerate(stored.names)}), x


def settle_layer(stored: StoredCache, x: Array) -> tuple[StoredCache, Array]:
    """The written cache and `x`, which waits for it; see `store.place.settle`."""
    return settle(stored, "device" if isinstance(stored, LayerCache) else "host", x)


def put_layer(stored: StoredCache, fresh: LayerCache, start: Array | int, rows: int) -> StoredCache:
    """The stored cache with what changed of it: `rows` rows from `start` of `fresh`.

    To the host only those rows cross. They depend on what was read (see `store.place`), as every
    row that a pass does not write comes from there.
    """
    if isinstance(stored, LayerCache):
        return fresh
    total = fresh.v.shape[2]
    pieces = [(start, rows)]
    if rows == total:
        # A whole array put in the place of the stored one would do, but XLA follows the slices
        # that other passes update back to where the array comes from, and places that on the host.
        pieces = [(0, total // 2), (total // 2, total - total // 2)]
    stacked = stored.stacked
    for first, count in pieces:
        part = [
            lax.dynamic_slice_in_dim(getattr(fresh, name), first, count, axis=2)
            for name in stored.names
        ]
        new = to_host(jnp.stack(part))
        stacked = lax.dynamic_update_slice_in_dim(stacked, new, first, axis=3)
    return HostCache(stacked, stored.names)


def write_rows(cached: Array, rows: Array, start: Array | int, writable: Array | None) -> Array:
    """Put rows [B, R, Hk, D] into cached [B, Hk, T, D] at `start`, where `writable` [B, R]."""
    new = rows.transpose(0, 2, 1, 3)
    if writable is not None:
        old = lax.dynamic_slice_in_dim(cached, start, new.shape[2], axis=2)
        new = jnp.where(writable[:, None, :, None], new, old)
    if new.shape == cached.shape:
        # Otherwise the compiler lets the cache take the layout of `rows` in the loop of full passes
        # and copies every cache on the way in and out of that loop.
        return with_layout_constraint(new, Layout((0, 1, 2, 3)))
    return lax.dynamic_update_slice_in_dim(cached, new, start, axis=2)


def project_kv(ctx: Context, layer: int, normed: Array, rope: Rope) -> tuple[Array, Array, Array]:
    """Rotated keys, values and un-rotated keys [B, R, Hk, D] of normed rows [B, R, M]."""
    raw, v = ctx.model.key_value(layer, normed)
    return apply_rope(raw, rope.cos, rope.sin), v, raw


def update_layer(
    cache: LayerCache, k: Array, v: Array, raw: Array, start: Array | int, writable: Array | None
) -> LayerCache:
    """The cache with fresh rows written at `start`."""
    return LayerCache(
        k=None if cache.k is None else write_rows(cache.k, k, start, writable),
        v=write_rows(cache.v, v, start, writable),
        raw=None if cache.raw is None else write_rows(cache.raw, raw, start, writable),
    )


def run_rows(
    ctx: Context,
    tokens: Array,
    layers: tuple[StoredCache, ...] | None,
    start: Array | int,
    rows: int,
    block_start: Array,
    *,
    writable: Array | None = None,
    memory: AttentionMemory | None = None,
    want_memory: bool = False,
    exact: bool = True,
    on_input: Callable[[int, Array, LayerCache], Array] | None = None,
) -> RowsResult:
    """Run rows [start, start + rows) through every layer; attention over all T keys.

    Each layer first writes the rows' keys and values into its cache (only where `writable`
    [B, rows]), then attends. Without caches (`layers` None, all T rows) the fresh keys and values
    are used and dropped. The last layer computes queries, attention and MLP only for the rows that
    predict the block.

    Args:
        tokens: int32 [B, T].
        memory: previous last-layer attention to measure drift against.
        want_memory: return the last layer's attention even without a previous one.
        exact: how shifted logits are read, see `predicting_rows`.
        on_input: called with (layer, hidden input [B, rows, M], updated cache) of every layer;
            returns the input to go on with.
    """
    model = ctx.model
    rope = ctx.rope(start, rows)
    x = model.embed_tokens(ctx.rows_of(tokens, start, rows))
    last = ctx.model_config.num_layers - 1
    updated: list[StoredCache] = []
    if layers is not None:
        ahead, x = fetch_layer(layers[0], x)
    for layer in range(last + 1):
        if layers is not None:  # caches in host memory come one layer ahead of their use
            here = ahead
            if layer < last:
                ahead, x = fetch_layer(layers[layer + 1], x)
            if layer >= 2:
                updated[layer - 2], x = settle_layer(updated[layer - 2], x)
        normed = model.normed(layer, "attn_norm", x)
        k, v, raw = project_kv(ctx, layer, normed, rope)
        if layers is None:
            heads_first = tuple(a.transpose(0, 2, 1, 3) for a in (k, v, raw))
            cache = LayerCache(heads_first[0], heads_first[1], heads_first[2])
        else:
            cache = lax.optimization_barrier(update_layer(here, k, v, raw, start, writable))
            updated.append(put_layer(layers[layer], cache, start, rows))
        if on_input is not None:
            x = on_input(layer, x, cache)
        if layer < last:
            attended = attend_cached(ctx, model.query(layer, normed), rope, cache)
            x = model.finish(layer, x, attended)
    hidden, fresh, drift = last_layer(
        ctx, x, normed, cache, start, block_start, memory, want_memory, exact
    )
    return RowsResult(hidden, tuple(updated), fresh, drift)


def last_layer(
    ctx: Context,
    x: Array,
    normed: Array,
    cache: LayerCache,
    start: Array | int,
    block_start: Array,
    memory: AttentionMemory | None,
    want_memory: bool,
    exact: bool,
) -> tuple[Array, AttentionMemory | None, Array | None]:
    """The last layer for the rows that predict the block only: (hidden, memory, drift).

    x and normed [B, R, M] are the pass's rows from `start`.
    """
    model, layer = ctx.model, ctx.model_config.num_layers - 1
    x, normed, *rope = (
        predicting_rows(ctx, rows, start, block_start, exact)
        for rows in (x, normed, *ctx.rope(start, x.shape[1]))
    )
    q = model.query(layer, normed)
    attended, fresh, drift = attend_last(ctx, q, Rope(*rope), cache, memory, want_memory)
    return model.finish(layer, x, attended), fresh, drift


def attend_last(
    ctx: Context,
    q: Array,
    rope: Rope,
    cache: LayerCache,
    memory: AttentionMemory | None,
    want_memory: bool,
) -> tuple[Array, AttentionMemory | None, Array | None]:
    """Attention of the last layer's block rows, with its memory and drift where asked for."""
    if memory is None and not want_memory:
        return attend_cached(ctx, q, rope, cache), None, None
    if memory is None:
        memory = empty_memory(ctx)
    return attend_measured(ctx, q, rope, cache, memory)


def empty_memory(ctx: Context) -> AttentionMemory:
    """A memory of no pass: its drift means nothing."""
    shape = (ctx.batch, ctx.model_config.num_heads, ctx.block_length, ctx.total)
    return AttentionMemory(jnp.zeros(shape, jnp.float32), jnp.zeros(shape[:3], jnp.float32))


def predicting_rows(
    ctx: Context, x: Array, start: Array | int, block_start: Array, exact: bool
) -> Array:
    """Pick from a pass's rows x [B, R, ...] (from `start`) the L rows that predict the block.

    Without shift these are the block's own rows. With the exact shift, position j is predicted by
    row j - 1, except that the first row of an empty prompt keeps its own logits. Otherwise the
    shift stays inside the block: its first row predicts itself, as in the authors' release.
    """
    length = ctx.block_length
    if not ctx.model_config.shift_logits:
        return x if x.shape[1] == length else ctx.rows_of(x, block_start - start, length)
    if not exact:
        x = ctx.rows_of(x, block_start - start, length)
        return jnp.concatenate([x[:, :1], x[:, : length - 1]], axis=1)
    if x.shape[1] != length + 1:
        x = ctx.rows_of(x, block_start - 1 - start, length + 1)
    alone = (ctx.pad == block_start).reshape(-1, *([1] * (x.ndim - 1)))
    first = jnp.where(alone, x[:, 1:2], x[:, :1])
    return jnp.concatenate([first, x[:, 1:length]], axis=1)
