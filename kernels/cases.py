"""Every op at every named shape as a function with abstract arguments: what the checks compile
and the benchmarks time.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from polestar_jax.kernels.drift_attention import drift_attention
from polestar_jax.kernels.drift_attention import shapes as drift_shapes
from polestar_jax.kernels.nvfp4 import Quantised, dequantise, quantise
from polestar_jax.kernels.nvfp4 import shapes as nvfp4_shapes
from polestar_jax.kernels.proxy_drift import proxy_drift
from polestar_jax.kernels.proxy_drift import shapes as proxy_shapes
from polestar_jax.kernels.shapes import AttentionShape, RefreshShape, StoreShape
from polestar_jax.kernels.sparse_refresh import (
    attend_rows,
    gather_cache,
    gather_rows,
    scatter_cache,
    scatter_rows,
)
from polestar_jax.kernels.sparse_refresh import shapes as refresh_shapes

Abstract = jax.ShapeDtypeStruct
THETA = 500000.0  # LLaDA-8B


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: `run(*args, implementation=...)`.

    `donate` are arguments written in place; `matrix` whether the kernel multiplies matrices (its
    bf16 body must then use the tensor cores); `moved` the bytes that must cross the memory bus.
    """

    op: str
    shape: str
    dtype: str
    run: Callable[..., Any]
    args: tuple[Any, ...]
    matrix: bool
    moved: int
    donate: tuple[int, ...] = ()
    kernel: str | None = None  # the implementation to check; None is the dispatcher's choice
    cards: tuple[str, ...] = ("A100", "H100", "H200")

    @property
    def name(self) -> str:
        return f"{self.op}/{self.shape}/{self.dtype}"


def size_of(*arrays: Any) -> int:
    """Bytes of abstract arrays and pytrees of them."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))


def cases(dtypes: tuple[str, ...] = ("bfloat16", "float32")) -> Iterator[Case]:
    """All of them; float32 only where it is decoded (small models) or odd."""
    for dtype in dtypes:
        for name, shape in drift_shapes.SHAPES.items():
            if dtype == "bfloat16" or small(name):
                yield from _drift(name, shape, dtype)
        for name, shape in proxy_shapes.SHAPES.items():
            if dtype == "bfloat16" or small(name):
                yield _proxy(name, shape, dtype)
        for name, refresh in refresh_shapes.SHAPES.items():
            if dtype == "bfloat16" or small(name):
                yield from _refresh(name, refresh, dtype)
        if dtype == "bfloat16":
            for name, opening in refresh_shapes.OPENINGS.items():
                yield _attend(name, opening, dtype)
        for name, store in nvfp4_shapes.SHAPES.items():
            if dtype == "bfloat16" or small(name):
                yield from _nvfp4(name, store, dtype)


def small(name: str) -> bool:
    return name == "embedded" or name.startswith("odd") or name == "llada-8b"


def _attention_args(s: AttentionShape, dtype: str) -> tuple[Abstract, Abstract, Abstract, Abstract]:
    q = Abstract((s.batch, s.rows, s.heads, s.head_dim), dtype)
    k = Abstract((s.batch, s.kv_heads, s.length, s.head_dim), dtype)
    positions = Abstract((s.batch, s.rows), jnp.int32)
    return q, k, positions, Abstract((s.batch,), jnp.int32)


def _previous(s: AttentionShape) -> tuple[Abstract, Abstract]:
    rows = (s.batch, s.heads, s.rows)
    return Abstract((*rows, s.length), jnp.float32), Abstract(rows, jnp.float32)


def _drift(name: str, s: AttentionShape, dtype: str) -> Iterator[Case]:
    q, k, positions, pad = _attention_args(s, dtype)
    previous = _previous(s)
    run = partial(drift_attention, theta=THETA)
    kept = size_of(previous)
    moved = size_of(q, k, k, q) + kept
    first = (q, k, k, positions, pad)
    yield Case("drift_attention", name, dtype, run, (*first, previous), True, moved + kept)
    yield Case("drift_attention_first", name, dtype, run, first, True, moved)
    if dtype == "bfloat16" and s.head_dim == 128 and s.length % 64 == 0:
        yield Case(
            "drift_attention_mosaic", name, dtype, run, (*first, previous), True, moved + kept,
            kernel="mosaic", cards=("H100", "H200"),
        )  # fmt: skip


def _proxy(name: str, s: AttentionShape, dtype: str) -> Case:
    q, k, _, pad = _attention_args(s, dtype)
    previous = _previous(s)
    moved = size_of(q, k, previous, previous)
    return Case("proxy_drift", name, dtype, proxy_drift, (q, k, pad, previous), True, moved)


def _refresh(name: str, s: RefreshShape, dtype: str) -> Iterator[Case]:
    _, k, rows, count = _attention_args(s, dtype)
    hidden = Abstract((s.batch, s.length, s.width), dtype)
    new = Abstract((s.batch, s.rows, s.width), dtype)
    row_kv = Abstract((s.batch, s.rows, s.kv_heads, s.head_dim), dtype)
    index = (rows, count)
    yield Case("gather_rows", name, dtype, gather_rows, (hidden, *index), False, size_of(new, new))
    yield Case(
        "gather_cache", name, dtype, gather_cache, (k, k, *index), False, 4 * size_of(row_kv)
    )
    yield Case(
        "scatter_rows", name, dtype, scatter_rows, (hidden, new, *index), False,
        size_of(new, new), (0,),
    )  # fmt: skip
    yield Case(
        "scatter_cache", name, dtype, scatter_cache, (k, k, row_kv, row_kv, *index), False,
        4 * size_of(row_kv), (0, 1),
    )  # fmt: skip
    yield _attend(name, s, dtype)


def _attend(name: str, s: RefreshShape, dtype: str) -> Case:
    q, k, rows, count = _attention_args(s, dtype)
    args = (q, k, k, rows, count, count)
    run = partial(attend_rows, theta=THETA)
    return Case("attend_rows", name, dtype, run, args, True, size_of(q, q, k, k))


def _nvfp4(name: str, s: StoreShape, dtype: str) -> Iterator[Case]:
    rows = Abstract((s.batch, s.rows, s.width), dtype)
    centroids = Abstract((s.batch, s.clusters, s.width), dtype)
    labels = Abstract((s.batch, s.rows), jnp.int32)
    stored = Quantised(
        Abstract((s.batch, s.rows, s.width // 2), jnp.uint8),
        Abstract((s.batch, s.rows, s.width // 16), jnp.uint8),
        Abstract((s.batch,), jnp.float32),
    )
    moved = size_of(rows, centroids, stored)
    yield Case("quantise", name, dtype, quantise, (rows, centroids, labels), False, moved)
    yield Case(
        "dequantise", name, dtype, partial(dequantise, dtype=jnp.dtype(dtype)),
        (stored, centroids, labels), False, moved,
    )  # fmt: skip
