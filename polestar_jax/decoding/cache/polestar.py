"""Polestar-Cache: refresh only the rows whose cluster drifted most (arXiv 2607.14107)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from polestar_jax.decoding.cache.base import (
    PassOutput,
    Phase,
    full_writable,
    predict_block,
)
from polestar_jax.decoding.cache.clusters import (
    PolestarState,
    empty_clusters,
    open_clusters,
    random_keys,
    window_uncertainty,
)
from polestar_jax.decoding.cache.polestar_settings import PolestarSettings
from polestar_jax.decoding.cache.refresh import empty_details, no_suffix, refresh_pass
from polestar_jax.decoding.commit.base import keep_inactive
from polestar_jax.decoding.context import Context
from polestar_jax.decoding.passes import RowsResult, empty_layers, run_rows
from polestar_jax.decoding.state import PASS_KINDS, DecodeState
from polestar_jax.drift.window import window_width
from polestar_jax.store import empty_rows, open_rows, resolve
from polestar_jax.store.place import settle

FULL, WINDOWED, CACHED, REFRESH = range(len(PASS_KINDS))


@dataclasses.dataclass(frozen=True)
class PolestarCache(PolestarSettings):
    """Dual cache whose rows near the block are kept fresh where their attention drifts.

    A block's opening clusters the hidden inputs of the rows around it, layer by layer. Once enough
    tokens were committed, a denoising pass also recomputes, in every layer, the rows of the
    clusters whose centroids' attention drifted most; what changed is handed to the next layer.

    Attributes: see `PolestarSettings`.
    """

    def init(self, ctx: Context) -> PolestarState:
        width = window_width(ctx, self.window_before, self.window_after)
        count = ctx.model_config.num_layers
        return PolestarState(
            layers=empty_layers(ctx, raw=True, place=resolve(self.kv_store)),
            clusters=tuple(empty_clusters(ctx, self, width) for _ in range(count)),
            hidden=tuple(
                empty_rows(
                    (ctx.batch, width, ctx.model_config.width),
                    self.num_clusters,
                    ctx.model.dtype,
                    self.hidden_dtype,
                    resolve(self.hidden_store),
                )
                for _ in range(count)
            ),
            embedded=jnp.zeros((ctx.batch, width), jnp.int32),
            uncertainty=jnp.zeros((ctx.batch, width), jnp.float32),
        )

    def phases(self) -> tuple[Phase, ...]:
        phases = [
            Phase("open_full", self._full_due, self.open_full),
            Phase("cached", self._cached_due, self.cached),
            Phase("refresh", self._refresh_due, self.refresh),
        ]
        if any(self.windowed_openings):
            phases.insert(1, Phase("open_windowed", self._windowed_due, self.open_windowed))
        return tuple(phases)

    def _full_due(self, ctx: Context, state: DecodeState, active: Array) -> Array:
        return (state.block_passes == 0) & ~self.opens_windowed(state.block)

    def _windowed_due(self, ctx: Context, state: DecodeState, active: Array) -> Array:
        return (state.block_passes == 0) & self.opens_windowed(state.block)

    def _cached_due(self, ctx: Context, state: DecodeState, active: Array) -> Array:
        return (state.block_passes > 0) & ~jnp.any(self.triggered(state, active))

    def _refresh_due(self, ctx: Context, state: DecodeState, active: Array) -> Array:
        return (state.block_passes > 0) & jnp.any(self.triggered(state, active))

    def open_full(self, ctx: Context, state: DecodeState, active: Array) -> PassOutput:
        """Opening by a forward pass over all rows."""
        start, writable = jnp.int32(0), full_writable(ctx, active)
        return self._open(ctx, state, active, start, ctx.total, writable, FULL)

    def open_windowed(self, ctx: Context, state: DecodeState, active: Array) -> PassOutput:
        """Opening by a forward pass over the window only, attending to all cached rows."""
        window = self.window(ctx, state.block)
        inside = window.inside
        if ctx.model_config.shift_logits:  # the row that predicts the block's first one runs too
            inside |= (window.rows == ctx.block_start(state.block) - 1)[None, :]
        writable = inside & active[:, None]
        return self._open(ctx, state, active, window.start, window.width, writable, WINDOWED)

    def _open(
        self,
        ctx: Context,
        state: DecodeState,
        active: Array,
        start: Array,
        rows: int,
        writable: Array | None,
        kind: int,
    ) -> PassOutput:
        """Run `rows` rows from `start`; fresh caches, clusters and proxy attention."""
        cache: PolestarState = state.cache
        window = self.window(ctx, state.block)
        clusters, stores = list(cache.clusters), list(cache.hidden)
        doubt: list[Array] = []
        keys = random_keys(state) if self.kmeans_init == "random" else None

        def keep_input(layer: int, x: Array, updated: Any) -> Array:
            with jax.named_scope("cluster"):
                hidden = ctx.rows_of(x, window.start - start, window.width)
                fresh = open_clusters(
                    ctx, self, layer, hidden, updated, clusters[layer], window, keys
                )
                # Rows of inactive sequences are overwritten too, so that nothing is read from the
                # store: they mean nothing before the sequence's next opening.
                stores[layer] = open_rows(
                    stores[layer], hidden, fresh.labels, fresh.centroids, ctx.implementation
                )
                clusters[layer] = keep_inactive(active, fresh, clusters[layer])
            if self.signal == "uncertainty" and layer == ctx.model_config.num_layers - 1:
                doubt.append(window_uncertainty(ctx, state, hidden, updated, window))
            if layer < 2:
                return x
            stores[layer - 2], x = settle(stores[layer - 2], stores[layer - 2].place, x)
            return x

        result = run_rows(
            ctx, state.tokens, cache.layers, start, rows, ctx.block_start(state.block),
            writable=writable, want_memory=state.memory is not None, on_input=keep_input,
        )  # fmt: skip
        embedded = ctx.rows_of(state.tokens, window.start, window.width)
        fresh = dataclasses.replace(
            cache,
            layers=(),
            clusters=(),
            hidden=(),
            embedded=embedded,
            uncertainty=doubt[0] if doubt else cache.uncertainty,
        )
        stale = dataclasses.replace(cache, layers=(), clusters=(), hidden=())
        kept = keep_inactive(active, fresh, stale)
        kept = dataclasses.replace(
            kept, layers=result.layers, clusters=tuple(clusters), hidden=tuple(stores)
        )
        return self._output(ctx, state, result, kept, kind)

    def refresh(self, ctx: Context, state: DecodeState, active: Array) -> PassOutput:
        """A denoising pass that also recomputes the rows that drifted most."""
        window = self.window(ctx, state.block)
        return refresh_pass(ctx, self, state, window, active, self.triggered(state, active))

    def cached(self, ctx: Context, state: DecodeState, active: Array) -> PassOutput:
        """The block's rows against the cache, as with the dual cache."""
        cache: PolestarState = state.cache
        start, rows = ctx.block_start(state.block), ctx.lead + ctx.block_length
        result = run_rows(
            ctx, state.tokens, cache.layers, start - ctx.lead, rows, start,
            writable=jnp.broadcast_to(active[:, None], (ctx.batch, rows)),
            memory=state.memory, exact=ctx.exact_shift,
        )  # fmt: skip
        kept = dataclasses.replace(cache, layers=result.layers)
        return self._output(ctx, state, result, kept, CACHED)

    def _output(
        self, ctx: Context, state: DecodeState, result: RowsResult, cache: PolestarState, kind: int
    ) -> PassOutput:
        """Output of a pass without refresh."""
        return PassOutput(
            prediction=predict_block(ctx, state, result.hidden),
            cache=cache,
            kind=jnp.full((ctx.batch,), kind, jnp.int32),
            memory=result.memory,
            drift=result.drift,
            suffix=no_suffix(ctx),
            refreshed_rows=jnp.zeros(ctx.batch, jnp.int32),
            details=empty_details(ctx, self),
        )
