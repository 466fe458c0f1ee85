"""Polestar-Cache's settings, and the rules that follow from them alone."""

import dataclasses

import jax.numpy as jnp
from jax import Array

from polestar_jax.checks import check_choice, check_integer
from polestar_jax.decoding.cache.base import CachePolicy
from polestar_jax.decoding.context import Context
from polestar_jax.decoding.state import DecodeState
from polestar_jax.drift.selection import capacities
from polestar_jax.drift.window import Window, make_window
from polestar_jax.errors import PolestarError
from polestar_jax.kernels.dispatch import target_platform
from polestar_jax.store.place import PLACES, check_place
from polestar_jax.store.rows import HIDDEN_DTYPES

# Up to so many rows a GPU's pass takes as long as reading the weights does. An A100 does 312e12
# half-precision operations while it reads 2.0e12 bytes; a weight has two bytes and takes two
# operations per row. Later cards allow more rows.
FREE_ROWS = 156


@dataclasses.dataclass(frozen=True)
class PolestarSettings(CachePolicy):
    """What is clustered, when and how much is refreshed, and where it is stored.

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
            change the cost and never the result. None chooses: the largest alone on a GPU while
            the weights' transfer hides the rows' arithmetic, else up to four.
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
            return capacities(most, 1 if rows_are_free(ctx, most) else 4)
        return tuple(sorted({*(c for c in self.capacities if c < most), most}))

    def window(self, ctx: Context, block: Array) -> Window:
        return make_window(ctx, block, self.window_before, self.window_after)

    def opens_windowed(self, block: Array) -> Array:
        """bool scalar: whether the block opens with a pass over the window only."""
        pattern = jnp.asarray(self.windowed_openings)
        return pattern[block % len(self.windowed_openings)] & (block > 0)

    def triggered(self, state: DecodeState, active: Array) -> Array:
        """bool [B]: sequences whose next pass refreshes."""
        enough = state.since_refresh > self.trigger_total
        return active & ((state.last_commits > self.trigger_last) | enough)


def rows_are_free(ctx: Context, most: int) -> bool:
    """Whether a pass costs the same however few of `most` rows it also recomputes.

    Then several row counts would only cost: each layer would let the host choose between them,
    and the program would hold its products once for each.
    """
    rows = ctx.batch * (ctx.lead + ctx.block_length + most)
    return target_platform() in ("gpu", "cuda") and rows <= FREE_ROWS
