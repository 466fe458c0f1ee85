"""The public functions of the op, the same for every implementation.

Symbols: B batch, T cached positions, R capacity of selected rows, M model width, H query heads, Hk
key/value heads, D head size. Of sequence b only the first count[b] <= R rows exist; the rest of
`rows` is ignored, reads give zeros and nothing is written. The rows of one sequence are distinct
and lie in [0, T).
"""

from functools import partial

from jax import Array

from polestar_jax.errors import PolestarError
from polestar_jax.kernels.checks import check_shapes
from polestar_jax.kernels.dispatch import dispatch
from polestar_jax.kernels.layout import unsupported_attention
from polestar_jax.kernels.sparse_refresh import pallas, reference


def gather_rows(
    hidden: Array, rows: Array, count: Array, *, implementation: str | None = None
) -> Array:
    """hidden[b, rows[b]]: [B, T, M] -> [B, R, M], zeros from count[b] on.

    Args:
      hidden: [B, T, M], any dtype.
      rows: int32 [B, R].
      count: int32 [B].
      implementation: None, "xla", "pallas" or "interpret" (see `kernels.dispatch`).

    Raises:
      PolestarError: shapes that do not fit together, or an implementation that can not run.
    """
    check_shapes("gather_rows", hidden=(hidden, "B T M"), rows=(rows, "B R"), count=(count, "B"))
    (out,) = dispatch(
        "gather_rows",
        implementation,
        (hidden[:, None],),
        rows,
        count,
        reference=reference.gather,
        kernel=pallas.gather,
        unsupported=_empty(hidden, rows),
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
    return dispatch(
        "gather_cache",
        implementation,
        (k, v),
        rows,
        count,
        reference=reference.gather,
        kernel=pallas.gather,
        unsupported=_empty(k, rows),
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
    (out,) = dispatch(
        "scatter_rows",
        implementation,
        (hidden[:, None],),
        (new[:, :, None].astype(hidden.dtype),),
        rows,
        count,
        reference=reference.scatter,
        kernel=pallas.scatter,
        unsupported=_empty(hidden, rows),
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

    In place as `scatter_rows`; new rows are converted to the caches' dtypes.
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
    return dispatch(
        "scatter_cache",
        implementation,
        (k, v),
        (new_k.astype(k.dtype), new_v.astype(v.dtype)),
        rows,
        count,
        reference=reference.scatter,
        kernel=pallas.scatter,
        unsupported=_empty(k, rows),
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
      v: [B, Hk, T, D] cached values; all three float32, bfloat16 or float16.
      positions: int32 [B, R] of the queries. Key t of sequence b has position t - pad[b].
      pad: int32 [B], left pads: keys t < pad[b] are masked.
      count: int32 [B] of rows that exist; rows from there on give zeros and cost (nearly) nothing.
        None: all.
      theta: base of the rotary frequencies.
      implementation: None, "xla", "pallas" or "interpret" (see `kernels.dispatch`).

    Raises:
      PolestarError: shapes that do not fit together, or an implementation that can not run.
    """
    check_shapes(
        "attend_rows",
        q=(q, "B R H D"),
        k=(k, "B Hk T D"),
        v=(v, "B Hk T D"),
        positions=(positions, "B R"),
        pad=(pad, "B"),
        count=(count, "B"),
    )
    if k.shape[2] < 1:
        raise PolestarError(f"attend_rows: no keys in k {k.shape}")
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
        unsupported=unsupported_attention(q, k) or _empty(k, positions),
    )


def _empty(source: Array, rows: Array) -> str | None:
    return "arrays without elements" if source.size == 0 or rows.size == 0 else None
