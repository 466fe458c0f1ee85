"""Spherical k-means over the window's two parts, with ties decided by rule.

Symbols: B batch, W window rows, K clusters, M width. Clusters [0, K_pre) belong to the prefix
part, [K_pre, K) to the suffix part. K_pre depends on the sequence.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from polestar_jax.drift.window import Window

NORM_FLOOR = 1e-12
ASSIGN_TIE = 1e-5  # the lowest cluster this close to the best cosine wins


@dataclasses.dataclass(frozen=True)
class Parts:
    """How the K clusters are shared between the window's parts.

    Attributes:
        is_prefix: bool [B, K], the cluster is one of the prefix part's.
        allowed: bool [B, W, K], the cluster belongs to the row's part.
        exists: bool [B, K], the cluster's part has rows.
        local: int32 [B, K], the cluster's number within its part.
        rows, clusters: int32 [B, K], rows and clusters of the cluster's part.
        first: int32 [B, K], first row of the part in window coordinates.
    """

    is_prefix: Array
    allowed: Array
    exists: Array
    local: Array
    rows: Array
    clusters: Array
    first: Array


def prefix_clusters(prefix: Array, suffix: Array, clusters: int) -> Array:
    """K_pre for row counts `prefix`, `suffix` [B] (paper: clusters in proportion to rows)."""
    share = clusters * prefix // jnp.maximum(prefix + suffix, 1)
    return jnp.where(prefix == 0, 0, jnp.clip(share, 1, clusters - 1))


def split_clusters(window: Window, clusters: int) -> Parts:
    """Share K clusters between prefix and suffix part."""
    n_pre, n_suf = (jnp.sum(x, axis=-1, dtype=jnp.int32) for x in (window.prefix, window.suffix))
    k_pre = prefix_clusters(n_pre, n_suf, clusters)[:, None]
    number = jnp.arange(clusters)[None, :]
    is_prefix = number < k_pre
    rows = jnp.where(is_prefix, n_pre[:, None], n_suf[:, None])
    first_pre = jnp.maximum(window.first - window.start, 0)[:, None]
    first_suf = jnp.argmax(window.suffix, axis=-1).astype(jnp.int32)[:, None]
    return Parts(
        is_prefix=is_prefix,
        allowed=jnp.where(
            is_prefix[:, None, :], window.prefix[..., None], window.suffix[..., None]
        ),
        exists=rows > 0,
        local=jnp.where(is_prefix, number, number - k_pre),
        rows=rows,
        clusters=jnp.where(is_prefix, k_pre, clusters - k_pre),
        first=jnp.where(is_prefix, first_pre, first_suf),
    )


def strided_rows(parts: Parts) -> Array:
    """First members, int32 [B, K] in window coordinates: rows floor(i * n / K_part) of the part.

    In a part with no more rows than clusters, cluster i starts at row i mod n.
    """
    n = jnp.maximum(parts.rows, 1)
    spread = parts.local * n // jnp.maximum(parts.clusters, 1)
    return parts.first + jnp.where(parts.rows <= parts.clusters, parts.local % n, spread)


def random_rows(parts: Parts, window: Window, keys: Array) -> Array:
    """First members drawn without replacement from each part, with one key per sequence [B]."""
    noise = jax.vmap(lambda key: jax.random.uniform(key, (window.width,)))(keys)

    def shuffled(member: Array) -> Array:  # members first, in random order
        return jnp.argsort(jnp.where(member, noise, 2.0), axis=-1).astype(jnp.int32)

    index = jnp.clip(parts.local, 0, window.width - 1)
    drawn = jnp.where(
        parts.is_prefix,
        jnp.take_along_axis(shuffled(window.prefix), index, axis=1),
        jnp.take_along_axis(shuffled(window.suffix), index, axis=1),
    )
    return jnp.where(parts.rows <= parts.clusters, strided_rows(parts), drawn)


def unit(x: Array) -> Array:
    """Rows of x [..., M] scaled to length 1, norms floored at 1e-12; float32."""
    x = x.astype(jnp.float32)
    norm = jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True))
    return x / jnp.maximum(norm, NORM_FLOOR)


def assign(rows: Array, centroids: Array, allowed: Array) -> Array:
    """Label of each row, int32 [B, W]: the lowest cluster with cosine >= maximum - 1e-5; else -1.

    rows [B, W, M] of length 1, centroids [B, K, M], allowed bool [B, W, K].
    """
    cosine = jnp.einsum("bwm,bkm->bwk", rows, unit(centroids), precision=lax.Precision.HIGHEST)
    cosine = jnp.where(allowed, cosine, -jnp.inf)
    close = allowed & (cosine >= jnp.max(cosine, axis=-1, keepdims=True) - ASSIGN_TIE)
    return jnp.where(jnp.any(close, axis=-1), jnp.argmax(close, axis=-1), -1).astype(jnp.int32)


def membership(labels: Array, clusters: int) -> Array:
    """float32 [B, K, W]: 1 where row w has label k."""
    return (labels[:, None, :] == jnp.arange(clusters)[None, :, None]).astype(jnp.float32)


def sums(member: Array, rows: Array) -> Array:
    """Sum of member rows: [B, K, W] times [B, W, M] in float32."""
    return jnp.einsum("bkw,bwm->bkm", member, rows, precision=lax.Precision.HIGHEST)


def kmeans(
    hidden: Array, parts: Parts, initial: Array, iterations: int
) -> tuple[Array, Array, Array]:
    """Spherical k-means (assignment by cosine, unnormalised means), both parts at once.

    Args:
        hidden: [B, W, M] hidden inputs in window coordinates.
        parts: from `split_clusters`.
        initial: int32 [B, K] first members, from `strided_rows` or `random_rows`.
        iterations: rounds of assignment and means; labels come from the last assignment.

    Returns:
        labels int32 [B, W] (-1 outside the window's parts), centroids float32 [B, K, M], member
        counts float32 [B, K]. An empty cluster takes row 0 of its part and count 0.
    """
    rows = hidden.astype(jnp.float32)
    clusters = initial.shape[1]
    units = unit(rows)
    centroids = jnp.take_along_axis(rows, initial[..., None], axis=1)
    reseed = jnp.take_along_axis(rows, parts.first[..., None], axis=1)

    def one(carry: tuple[Array, Array, Array], _: None) -> tuple[tuple[Array, Array, Array], None]:
        labels = assign(units, carry[1], parts.allowed)
        member = membership(labels, clusters)
        counts = jnp.sum(member, axis=-1)
        means = sums(member, rows) / jnp.maximum(counts, 1.0)[..., None]
        return (labels, jnp.where(counts[..., None] > 0, means, reseed), counts), None

    carry = (jnp.full(rows.shape[:2], -1, jnp.int32), centroids, jnp.zeros(initial.shape))
    (labels, means, counts), _ = lax.scan(one, carry, None, length=iterations)
    # A part with no more rows than clusters: every row its own cluster, the rest are copies.
    few = parts.rows <= parts.clusters
    number = jnp.where(few & parts.exists, parts.local, -1)
    own = parts.first + number  # the row that cluster k owns, where it owns one
    owns = few & (number >= 0) & (number < parts.rows)
    at_row = owns[:, None, :] & (own[:, None, :] == jnp.arange(rows.shape[1])[None, :, None])
    labels = jnp.where(jnp.any(at_row, -1), jnp.argmax(at_row, -1).astype(jnp.int32), labels)
    means = jnp.where(few[..., None], centroids, means)
    counts = jnp.where(few, owns.astype(jnp.float32), counts)
    return labels, means, counts


def move_centroids(
    centroids: Array, counts: Array, labels: Array, changed: Array, new: Array, old: Array
) -> Array:
    """Centroids after some rows changed: each moves by (sum of new - sum of old) / count.

    labels int32 and changed bool [B, W]; new, old [B, W, M]; only changed rows are read.
    """
    difference = new.astype(jnp.float32) - old.astype(jnp.float32)
    difference = jnp.where(changed[..., None], difference, 0.0)
    moved = sums(membership(labels, centroids.shape[1]), difference)
    return centroids + moved / jnp.maximum(counts, 1.0)[..., None]
