"""Polestar-Cache: refresh only the rows whose cluster drifted most (arXiv 2607.14107)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from polestar_jax.checks import check_choice, check_integer
from polestar_jax.decoding.cache.base import (
    CachePolicy,
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
from polestar_jax.decoding.cache.refresh import (
    empty_details,
    no_suffix,
    refresh_pass,
)
from polestar_jax.decoding.commit.base import keep_inactive
from polestar_jax.decoding.context import Context
from polestar_jax.decoding.passes import RowsResult, empty_layers, run_rows
from polestar_jax.decoding.state import PASS_KINDS, DecodeState
from polestar_jax.drift.selection import capacities
from polestar_jax.drift.window import Window, make_window, window_width
from polestar_jax.errors import PolestarError
from polestar_jax.store import empty_rows, open_rows, resolve
from polestar_jax.store.place import PLACES, check_place, settle
from polestar_jax.store.rows import HIDDEN_DTYPES

FULL, WINDOWED, CACHED, REFRESH = range(len(PASS_KINDS))


@dataclasses.dataclass(frozen=True)
class PolestarCache(CachePolicy):
    """Dual cache whose rows near the block are kept fresh where their attention drifts.

    A block's opening clusters the hidden inputs of the rows around it, layer by layer. Once enough
    tokens were committed, a denoising pass also recomputes, in every layer, the rows of the
    clusters whose centroids' attention drifted most; what changed is handed to the next layer.

    Attributes:
        window_before, window_after: blocks before and behind the current one whose rows are
            clustered and may be refreshed.
        num_clusters: clusters per layer; at least 2.
        refresh_clusters, refresh_clusters_last: clusters refreshed per pass; in the last layer.
        kmeans_iters, kmeans_init: rounds of k-means; "strided" (deterministic) or "random" seeds.
        trigger_last, trigger_total: a pass refreshes when the one before committed more than
            `trigger_last` tokens, or more than `trigger_total` came since the last refresh.
        windowed_openings: whether block b opens with a pass over the window only, repeated
            cyclically; block 0 always opens with a full pass.
        signal: what clusters are ranked by: "kl" of their proxy attention (the method), "cosine"
            distance their centroid moved, "uncertainty" of their masked rows, or "random".
        reembed_suffix_commits: also refresh layer 0's input of tokens committed behind the block
            (the released code leaves the mask's embedding there until the next opening).
        capacities: row counts a refresh is compiled for; the smallest that fits is run, so they
            change the cost and never the result. None chooses up to four.
        hidden_store: where the hidden inputs of the window's rows are kept between passes:
            "device", or "host" for pinned host memory, from where refreshes fetch them one layer
            ahead. Changes no result.
        hidden_dtype: None keeps them in the model's dtype, "nvfp4" in 4.5 bits a value as the
            rest to their cluster's centroid, which changes results a little.
        kv_store: where all keys and values are kept, "device" or "host". From the host every pass
            fetches all of them, one layer ahead: for contexts that do not fit otherwise. Changes
            no result.
        host_fallback: where the back end has no pinned host memory, keep on the device what was
            meant for it instead of raising an error.
    """

    window_before: int = 2
    window_after: int = 1
    num_clusters: int = 8
    refresh_clusters: int = 4
    refresh_clusters_last: int = 1
    kmeans_iters: int = 5
    kmeans_init: str = "strided"
    trigger_last: int = 1
    trigger_total: int = 2
    windowed_openings: tuple[bool, ...] = (False, False, False, True)
    signal: str = "kl"
    reembed_suffix_commits: bool = False
    capacities: tuple[int, ...] | None = None
    hidden_store: str = "device"
    hidden_dtype: str | None = None
    kv_store: str = "device"
    host_fallback: bool = False

    def __post_init__(self) -> None:
        for name, least in (
            ("window_before", 0), ("window_after", 0), ("num_clusters", 2),
            ("refresh_clusters", 1), ("refresh_clusters_last", 1), ("kmeans_iters", 1),
            ("trigger_last", 0), ("trigger_total", 0),
        ):  # fmt: skip
            check_integer(name, getattr(self, name), least)
        if self.window_before + self.window_after == 0:
            raise PolestarError(
                "window_before and window_after are both 0: nothing could be refreshed; use "
                "DualCache, or a window of at least one block"
            )
        check_choice("kmeans_init", self.kmeans_init, ("strided", "random"))
        check_choice("signal", self.signal, ("kl", "cosine", "uncertainty", "random"))
        if self.hidden_dtype not in HIDDEN_DTYPES:
            raise PolestarError(
                "hidden_dtype must be None (the model's dtype) or 'nvfp4', "
                f"got {self.hidden_dtype!r}"
            )
        if not isinstance(self.host_fallback, bool):
            raise PolestarError(f"host_fallback must be True or False, got {self.host_fallback!r}")
        for name in ("hidden_store", "kv_store"):
            check_choice(name, getattr(self, name), PLACES)
            check_place(name, getattr(self, name), self.host_fallback)
        pattern = tuple(self.windowed_openings)
        if not pattern or not all(isinstance(x, bool) for x in pattern):
            raise PolestarError(
                f"windowed_openings must be a non-empty tuple of booleans, got {pattern!r}"
            )
        object.__setattr__(self, "windowed_openings", pattern)
        if not isinstance(self.reembed_suffix_commits, bool):
            raise PolestarError(
                f"reembed_suffix_commits must be True or False, got {self.reembed_suffix_commits!r}"
            )
        if self.capacities is not None:
            sizes = tuple(self.capacities)
            if not sizes:
                raise PolestarError("capacities must name at least one row count, got none")
            for size in sizes:
                check_integer("capacities", size, 1)
            object.__setattr__(self, "capacities", tuple(sorted(set(sizes))))

    def row_counts(self, ctx: Context) -> tuple[int, ...]:
        """Compiled row counts; the largest always holds every window row."""
        length = ctx.block_length
        most = min((self.window_before + self.window_after) * length, ctx.total - length)
        most = max(most, 1)
        if self.capacities is None:
            return capacities(most)
        return tuple(sorted({*(c for c in self.capacities if c < most), most}))

    def window(self, ctx: Context, block: Array) -> Window:
        return make_window(ctx, block, self.window_before, self.window_after)

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

    def opens_windowed(self, block: Array) -> Array:
        """bool scalar: whether the block opens with a pass over the window only."""
        pattern = jnp.asarray(self.windowed_openings)
        return pattern[block % len(self.windowed_openings)] & (block > 0)

    def triggered(self, state: DecodeState, active: Array) -> Array:
        """bool [B]: sequences whose next pass refreshes."""
        enough = state.since_refresh > self.trigger_total
        return active & ((state.last_commits > self.trigger_last) | enough)

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
