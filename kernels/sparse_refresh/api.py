"""The public functions of the op, the same for every implementation.

Symbols: B batch, T cached positions, R capacity of selected rows, M model width, H query heads, Hk
key/value heads, D head size. Of sequence b only the first count[b] <= R rows exist; the rest of
`rows` is ignored, reads give zeros and nothing is written. The rows of one sequence are distinct
and lie in [0, T); that is not checked, since they are known on the device only.
"""

from functools import partial

import jax.numpy as jnp
from jax import Array

from polestar_jax.errors import PolestarError
from polestar_jax.kernels.checks import as_int32, check_shapes, check_theta, same_floats
from polestar_jax.kernels.dispatch import dispatch
from polestar_jax.kernels.layout import FLOATS, check_rotary, unsupported_attention
from polestar_jax.kernels.sparse_refresh import pallas, reference

MOVABLE = (*FLOATS, "int8", "int16", "int32", "uint8", "uint16", "uint32")  # by the kernel


def gather_rows(
    hidden: Array, rows: Array, count: Array, *, implementation: str | None = None
) -> Array:
    """hidden[b, rows[b]]: [B, T, M] -> [B, R, M], zeros from count[b] on.

    Args:
      hidden: [B, T, M], any dtype. The kernel moves floats of 16 or 32 bits and integers of up to
        32; with None the rest is left to the reference.
      rows: int32 [B, R].
      count: int32 [B].
      implementation: None, "xla", "pallas" or "interpret" (see `kernels.dispatch`).

    Raises:
      PolestarError: shapes or types that do not fit together, or an implementation that can not
        run.
    """
    check_shapes("gather_rows", hidden=(hidden, "B T M"), rows=(rows, "B R"), count=(count, "B"))
    rows, count = as_int32("gather_rows", rows=rows, count=count)
    (out,) = dispatch(
        "gather_rows",
        implementation,
        (hidden[:, None],),
        rows,
        count,
        reference=reference.gather,
        kernel=pallas.gather,
        unsupported=_immovable(rows, hidden),
    )
    return out[:, :, 0]


def gather_cache(
    k: Array, v: Array, rows: Array, count: Array, *, implementation: str | None = None
) -> tuple[Array, Array]:
    """Selected rows of a layer's keys and values: two [B, Hk, T, D] -> two [B, R, Hk, D].

    Arguments, zeros and errors as `gather_rows`.
    """
    check_shapes(
        "gather_cache",
        k=(k, "B Hk T D"),
        v=(v, "B Hk T D"),
        rows=(rows, "B R"),
        count=(count, "B"),
    )
    rows, count = as_int32("gather_cache", rows=rows, count=count)
    return dispatch(
        "gather_cache",
        implementation,
        (k, v),
        rows,
        count,
        reference=reference.gather,
        kernel=pallas.gather,
        unsupported=_immovable(rows, k, v),
    )


def scatter_rows(
    hidden: Array, new: Array, rows: Array, count: Array, *, implementation: str | None = None
) -> Array:
    """hidden [B, T, M] with hidden[b, rows[b]] = new [B, R, M]; in place where it may be.

    The kernel writes into its argument's memory: under `jit`, an argument that is donated or not
    used again is updated without a copy. Arguments and errors as `gather_rows`.
    """
    check_shapes(
        "scatter_rows",
        hidden=(hidden, "B T M"),
        new=(new, "B R M"),
        rows=(rows, "B R"),
        count=(count, "B"),
    )
    rows, count = as_int32("scatter_rows", rows=rows, count=count)
    (out,) = dispatch(
        "scatter_rows",
        implementation,
        (jnp.asarray(hidden)[:, None],),
        (_converted("scatter_rows", new, hidden)[:, :, None],),
        rows,
        count,
        reference=reference.scatter,
        kernel=pallas.scatter,
        unsupported=_immovable(rows, hidden),
    )
    return out[:, 0]


def scatter_cache(
    k: Array,
    v: Array,
    new_k: Array,
    new_v: Array,
    rows: Array,
    count: Array,
    *,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """Keys and values [B, Hk, T, D] with the selected rows replaced by new ones [B, R, Hk, D].

    In place as `scatter_rows`; new rows are converted to the caches' dtypes. Errors as there.
    """
    check_shapes(
        "scatter_cache",
        k=(k, "B Hk T D"),
        v=(v, "B Hk T D"),
        new_k=(new_k, "B R Hk D"),
        new_v=(new_v, "B R Hk D"),
        rows=(rows, "B R"),
        count=(count, "B"),
    )
    rows, count = as_int32("scatter_cache", rows=rows, count=count)
    return dispatch(
        "scatter_cache",
        implementation,
        (jnp.asarray(k), jnp.asarray(v)),
        (_converted("scatter_cache", new_k, k), _converted("scatter_cache", new_v, v)),
        rows,
        count,
        reference=reference.scatter,
        kernel=pallas.scatter,
        unsupported=_immovable(rows, k, v),
    )


def attend_rows(
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    pad: Array,
    count: Array | None = None,
    *,
    theta: float,
    implementation: str | None = None,
) -> Array:
    """softmax(rope(q) rope(k)^T / sqrt(D)) v of rows anywhere in the sequence -> [B, R, H * D].

    Args:
      q: [B, R, H, D] queries, not rotated.
      k: [B, Hk, T, D] cached keys, not rotated.
      v: [B, Hk, T, D] cached values, finite also at pads; all three float32, bfloat16 or float16,
        and D even.
      positions: int32 [B, R] of the queries. Key t of sequence b has position t - pad[b].
      pad: int32 [B] in [0, T), left pads: keys t < pad[b] are masked.
      count: int32 [B] of rows that exist; rows from there on give zeros and cost (nearly) nothing.
        None: all.
      theta: base of the rotary frequencies.
      implementation: None, "xla", "pallas" or "interpret" (see `kernels.dispatch`).

    Raises:
      PolestarError: shapes or types that do not fit together, or an implementation that can not
        run.
    """
    check_shapes(
        "attend_rows",
        at_least_one="H Hk T D",
        q=(q, "B R H D"),
        k=(k, "B Hk T D"),
        v=(v, "B Hk T D"),
        positions=(positions, "B R"),
        pad=(pad, "B"),
        count=(count, "B"),
    )
    same_floats("attend_rows", q=q, k=k, v=v)
    positions, pad, count = as_int32("attend_rows", positions=positions, pad=pad, count=count)
    if count is not None:
        count = jnp.clip(count, 0, q.shape[1])
    check_rotary("attend_rows", q)
    check_theta("attend_rows", theta)
    return dispatch(
        "attend_rows",
        implementation,
        q,
        k,
        v,
        positions,
        pad,
        count,
        reference=partial(reference.attend_rows, theta=theta),
        kernel=partial(pallas.attend_rows, theta=theta),
        unsupported=unsupported_attention(q, k),
    )


def _immovable(rows: Array, *sources: Array) -> str | None:
    """Why the kernel can not move rows of these arrays, or None."""
    for source in sources:
        if str(source.dtype) not in MOVABLE:
            return f"rows of {source.dtype} (one of {', '.join(MOVABLE)})"
        if source.size == 0 or rows.size == 0:
            return "arrays without elements"
    return None


def _converted(op: str, new: Array, target: Array) -> Array:
    """New rows in the target's dtype; numbers of another kind are refused."""
    kinds = (jnp.floating, jnp.integer)
    alike = any(all(jnp.issubdtype(x.dtype, kind) for x in (new, target)) for kind in kinds)
    if not alike and new.dtype != target.dtype:
        raise PolestarError(f"{op}: new rows of {new.dtype} do not go into {target.dtype}")
    return jnp.asarray(new).astype(target.dtype)
