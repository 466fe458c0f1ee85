"""Arithmetic and rows of a generation, computed from its passes and the shapes they ran on.

Counted are multiplications and additions of matrix products (2 per multiply-add): projections,
attention, MLP, head, and Polestar's k-means, centroids and proxy attention. Norms, rotations and
softmaxes are left out. Each sequence is charged what it would need alone: passes it took part in,
rows that were selected for it. A batch computes more, since its sequences wait for each other.
"""

import dataclasses

import numpy as np

import polestar_jax as pj
from polestar_jax.decoding.cache.prefix import MAX_SIZES
from polestar_jax.decoding.state import CAUSES
from polestar_jax.errors import PolestarError
from polestar_jax.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class RowCost:
    """Operations of one row in one layer, by part; `head` once per predicted row.

    kv: key and value projections. rest: query and output projections, MLP, attention over T keys.
    proxy: query projection and scores of one centroid.
    """

    kv: int
    rest: int
    head: int
    proxy: int


@dataclasses.dataclass(frozen=True)
class Work:
    """Per sequence, float64 [B]: operations, and rows run times layers."""

    flops: np.ndarray
    row_layers: np.ndarray


def row_cost(model: ModelConfig, total: int) -> RowCost:
    """For sequences of `total` positions T."""
    m, q = model.width, model.num_heads * model.head_dim
    kv = model.num_kv_heads * model.head_dim
    return RowCost(
        kv=2 * m * 2 * kv,
        rest=2 * m * q + 2 * q * m + 6 * m * model.mlp_width + 4 * q * total,
        head=2 * m * model.embedding_rows,
        proxy=2 * m * q + 2 * q * total,
    )


def pass_flops(
    model: ModelConfig, cost: RowCost, rows: np.ndarray | int, predicted: int
) -> np.ndarray:
    """One pass over `rows` rows; the last layer finishes only the `predicted` ones."""
    rows = np.asarray(rows, np.float64)
    below = (model.num_layers - 1) * rows * (cost.kv + cost.rest)
    return below + rows * cost.kv + predicted * (cost.rest + cost.head)


def passes_by_block(result: pj.DecodeResult, num_blocks: int) -> np.ndarray:
    """Passes of each sequence in each block, int [B, blocks].

    Every pass commits at least one token of its block by confidence, so the different pass numbers
    of those commits count the passes.

    Raises:
        PolestarError: a schedule with passes that commit nothing, for which that does not hold.
    """
    confident = CAUSES.index("confidence") + 1
    numbers = np.where(result.cause == confident, result.commit_pass, -1)
    numbers = np.sort(numbers.reshape(len(numbers), num_blocks, -1), axis=-1)
    new = np.diff(numbers, axis=-1, prepend=-1) > 0
    counts = new.sum(axis=-1)
    if (counts.sum(axis=-1) != result.nfe).any():
        raise PolestarError(
            "the rows of a prefix cache's passes cannot be counted where passes commit nothing; "
            "use the uniform schedule"
        )
    return counts


def work(model: ModelConfig, config: pj.DecodeConfig, total: int, result: pj.DecodeResult) -> Work:
    """Operations and rows of each sequence of a decoded batch of `total` positions."""
    cost, layers = row_cost(model, total), model.num_layers
    length = config.block_length
    lead = int(model.shift_logits and config.dream_shift == "exact")
    passes = {name: count.astype(np.float64) for name, count in result.stats.passes.items()}
    block = length + lead
    cached = passes["cached"] + passes["refresh"]
    flops = passes["full"] * pass_flops(model, cost, total, length)
    rows = passes["full"] * total
    if isinstance(config.cache, pj.PrefixCache):
        suffix_flops, suffix_rows = _prefix_passes(model, cost, config, lead, result)
        flops, rows = flops + suffix_flops, rows + suffix_rows
    else:
        flops = flops + cached * pass_flops(model, cost, block, length)
        rows = rows + cached * block
    rows = rows * layers
    if isinstance(config.cache, pj.PolestarCache):
        cache = config.cache
        width = (cache.window_before + 1 + cache.window_after) * length + int(model.shift_logits)
        width = min(width, total)
        opening = passes["full"] + passes["windowed"]
        refreshed = result.stats.refreshed_rows.astype(np.float64)
        flops = flops + passes["windowed"] * pass_flops(model, cost, width, length)
        flops = flops + opening * _clustering(model, cost, cache, width)
        flops = flops + passes["refresh"] * _proxies(model, cost, cache, width)
        flops = flops + refreshed * _refreshed_row(model, cost, config)
        rows = rows + passes["windowed"] * width * layers + refreshed
    return Work(flops, rows)


def _prefix_passes(
    model: ModelConfig, cost: RowCost, config: pj.DecodeConfig, lead: int, result: pj.DecodeResult
) -> tuple[np.ndarray, np.ndarray]:
    """Later passes of a prefix cache: they run the smallest compiled row count that suffices."""
    blocks = config.num_blocks
    sizes = min(MAX_SIZES, blocks)
    counts = np.array(sorted({-(-blocks * i // sizes) for i in range(1, sizes + 1)}))
    left = blocks - np.arange(blocks)
    rows = counts[np.searchsorted(counts, left)] * config.block_length + lead  # [blocks]
    later = np.maximum(passes_by_block(result, blocks) - 1, 0).astype(np.float64)
    return later @ pass_flops(model, cost, rows, config.block_length), later @ rows


def _clustering(model: ModelConfig, cost: RowCost, cache: pj.PolestarCache, width: int) -> int:
    """k-means (cosines and sums per round) and the first proxy attention, all layers."""
    rounds = cache.kmeans_iters * 2 * (2 * width * cache.num_clusters * model.width)
    extra = 0
    if cache.signal == "uncertainty":
        extra = width * (cost.rest + cost.head)
    return model.num_layers * (rounds + cache.num_clusters * cost.proxy) + extra


def _proxies(model: ModelConfig, cost: RowCost, cache: pj.PolestarCache, width: int) -> int:
    """Proxy attention in every layer and the centroids' moves in all but the first."""
    moves = (model.num_layers - 1) * 2 * width * cache.num_clusters * model.width
    return model.num_layers * cache.num_clusters * cost.proxy + moves


def _refreshed_row(model: ModelConfig, cost: RowCost, config: pj.DecodeConfig) -> float:
    """One refreshed row in one layer, on average over layers.

    Below the last layer its keys and values for the next layer are computed too, in the last
    layer the head. How many rows each layer refreshed is taken to follow the number of clusters it
    chose; the last layer's are read by the suffix rule alone.
    """
    cache = config.cache
    assert isinstance(cache, pj.PolestarCache)
    if config.commit.suffix_threshold is None:
        return cost.rest + cost.kv
    below = (model.num_layers - 1) * cache.refresh_clusters
    last = cache.refresh_clusters_last / (below + cache.refresh_clusters_last)
    return cost.rest + (1 - last) * cost.kv + last * cost.head
