"""The stored hidden inputs of a layer's window, in the model's dtype or in NVFP4.

Symbols: B batch, W window rows, K clusters, M model width.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from polestar_jax.errors import PolestarError
from polestar_jax.kernels.nvfp4 import Quantised, dequantise, quantise
from polestar_jax.kernels.nvfp4.formats import GROUP
from polestar_jax.store.place import put

NVFP4 = "nvfp4"
HIDDEN_DTYPES = (None, NVFP4)
SCALE_BYTES = 4  # a row's float32 tensor scale


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowStore:
    """Hidden inputs of one layer's window rows.

    Attributes:
        data: [B, W, M] in the model's dtype; or uint8 [B, W, 9 M / 16 + 4]: M / 2 bytes of E2M1
            values, M / 16 E4M3 group scales, a float32 tensor scale. One array, so that a layer
            crosses in one copy. In pinned host memory if `place` is "host".
        base: float32 [B, K, M], the centroids that rows in NVFP4 are stored relative to: those of
            the opening, for rows refreshed later too (centroids move with every refresh, and rows
            stored before would lose theirs). Always on the device. None in the model's dtype.
        place: "device" or "host".
    """

    data: Array
    base: Array | None
    place: str = dataclasses.field(default="device", metadata={"static": True})

    @property
    def quantised(self) -> bool:
        return self.base is not None


def empty_rows(
    shape: tuple[int, int, int], clusters: int, dtype: Any, hidden_dtype: str | None, place: str
) -> RowStore:
    """A store for rows of shape [B, W, M]; nothing in it may be read before `open_rows`."""
    b, w, m = shape
    if hidden_dtype is None:
        return RowStore(put(jnp.zeros(shape, dtype), place), None, place)
    if m % GROUP:
        raise PolestarError(
            f"hidden_dtype='nvfp4' needs a model width that is a multiple of {GROUP}, got {m}; "
            "use hidden_dtype=None"
        )
    data = jnp.zeros((b, w, row_bytes(m)), jnp.uint8)
    return RowStore(put(data, place), jnp.zeros((b, clusters, m), jnp.float32), place)


def row_bytes(width: int) -> int:
    """Bytes of a row of `width` values in NVFP4."""
    return width // 2 + width // GROUP + SCALE_BYTES


def open_rows(
    old: RowStore, hidden: Array, labels: Array, centroids: Array, implementation: str | None
) -> RowStore:
    """The store with the opening's rows hidden [B, W, M], labels int32 [B, W] (-1: none).

    Rows without a label (of the block, outside the window) are never read back: in NVFP4 they
    are not stored. Nothing is read from the old store.
    """
    if not old.quantised:
        return RowStore(put(hidden, old.place), None, old.place)
    stored = quantise_rows(hidden, labels >= 0, labels, centroids, implementation)
    return RowStore(put(pack(stored), old.place), centroids, old.place)


def read_rows(
    store: RowStore, data: Array, labels: Array, dtype: Any, implementation: str | None
) -> Array:
    """Rows [B, W, M] in the model's dtype, from the store's `data` on the device.

    `labels` must be those of the opening. Rows without one hold nothing meaningful.
    """
    if store.base is None:
        return data
    return dequantise(unpack(data), store.base, labels, dtype=dtype, implementation=implementation)


def update_rows(
    store: RowStore,
    data: Array,
    old: Array,
    new: Array,
    changed: Array,
    labels: Array,
    implementation: str | None,
) -> tuple[RowStore, Array]:
    """Store new [B, W, M] where changed (bool [B, W]).

    `data` and `old` are the store's contents on the device, as fetched and as read. Returns the
    new store and the rows as they will be read from it: in NVFP4 not quite the new ones.
    """
    if store.base is None:
        rows = jnp.where(changed[..., None], new, old)
        return RowStore(put(rows, store.place), None, store.place), rows
    stored = quantise_rows(new, changed, labels, store.base, implementation)
    rows = dequantise(stored, store.base, labels, dtype=old.dtype, implementation=implementation)
    data = jnp.where(changed[..., None], pack(stored), data)
    rows = jnp.where(changed[..., None], rows, old)
    return RowStore(put(data, store.place), store.base, store.place), rows


def quantise_rows(
    rows: Array, kept: Array, labels: Array, centroids: Array, implementation: str | None
) -> Quantised:
    """Rows in NVFP4, each with the tensor scale of all `kept` (bool [B, W]) ones; others are 0."""
    stored = quantise(
        jnp.where(kept[..., None], rows, jnp.zeros((), rows.dtype)),
        centroids,
        jnp.where(kept, labels, -1),
        implementation=implementation,
    )
    return stored._replace(tensor=jnp.broadcast_to(stored.tensor[:, None], labels.shape))


def pack(stored: Quantised) -> Array:
    """One array of bytes, uint8 [B, W, row_bytes(M)]; the tensor scale is [B, W]."""
    scale = lax.bitcast_convert_type(stored.tensor, jnp.uint8)
    return jnp.concatenate([stored.values, stored.scales, scale], axis=-1)


def unpack(data: Array) -> Quantised:
    """The inverse of `pack`."""
    payload = data.shape[-1] - SCALE_BYTES
    values = payload * 8 // 9
    return Quantised(
        data[..., :values],
        data[..., values:payload],
        lax.bitcast_convert_type(data[..., payload:], jnp.float32),
    )


def store_bytes(store: RowStore) -> int:
    """Bytes of the stored rows (real or abstract), without the centroids they relate to."""
    return math.prod(store.data.shape) * store.data.dtype.itemsize
