"""The state of a decoding: one frozen pytree, threaded through every pass.

Symbols: B sequences, T = P + G positions (P the left-padded prompt bucket), G generation length,
L block length, H query heads, N layers.
"""

import dataclasses
from typing import Any

import jax
from jax import Array

CAUSES = ("confidence", "drift", "suffix", "eos")  # `cause` is 1 + index; 0: not committed yet
PASS_KINDS = ("full", "windowed", "cached", "refresh")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """Rotated keys `k`, values and keys before rotation `raw` of one layer, [B, Hk, T, D].

    `k` or `raw` is None where the program has no use for it.
    """

    k: Array | None
    v: Array
    raw: Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HostCache:
    """A layer's cache in pinned host memory: one array, so that a layer crosses in one copy.

    `stacked` is [S, B, Hk, T, D], the fields `names` of `LayerCache` in this order.
    """

    stacked: Array
    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})


StoredCache = LayerCache | HostCache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionMemory:
    """Last-layer attention of the pass before: what drift is measured against.

    `scores` float32 [B, H, R, T] and log-normaliser `normaliser` [B, H, R] of the R rows that
    predict the block.
    """

    scores: Array
    normaliser: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Everything a pass reads and writes.

    Attributes:
        tokens: int32 [B, T], left-padded prompts and the canvas.
        pad: int32 [B], left pads of each sequence.
        keys: PRNG keys [B], one per sequence.
        block: int32, the block being filled.
        block_passes: int32, passes run in it so far; 0 means that its opening is due.
        passes: int32, passes run so far.
        nfe: int32 [B], passes that counted for each sequence.
        cause: int8 [B, G], why each token was committed (0: still masked; else 1 + CAUSES index).
        commit_pass: int32 [B, G], the sequence's pass number of the commit, -1 before.
        kinds: int32 [B, 4], passes by PASS_KINDS.
        refreshed_rows: int32 [B], rows recomputed by sparse refreshes, summed over layers.
        last_commits: int32 [B], tokens that the last pass committed in the block.
        since_refresh: int32 [B], tokens committed since the block's start or the last refresh.
        cache: the cache policy's own pytree.
        commit: the commit policy's own pytree.
        memory: previous last-layer attention where the commit policy measures drift, else None.
        trace: buffers [max_passes, B, ...] of what each pass did, or None.
    """

    tokens: Array
    pad: Array
    keys: Array
    block: Array
    block_passes: Array
    passes: Array
    nfe: Array
    cause: Array
    commit_pass: Array
    kinds: Array
    refreshed_rows: Array
    last_commits: Array
    since_refresh: Array
    cache: Any
    commit: Any
    memory: AttentionMemory | None
    trace: Any
