"""The public functions of the op, the same for every implementation.

Symbols: B batch, R rows, M model width (a multiple of 16), K clusters.
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from polestar_jax.errors import PolestarError
from polestar_jax.kernels.checks import as_int32, check_dtype, check_shapes
from polestar_jax.kernels.dispatch import dispatch
from polestar_jax.kernels.layout import FLOATS
from polestar_jax.kernels.nvfp4 import pallas, reference
from polestar_jax.kernels.nvfp4.formats import E2M1_MAX, E4M3_MAX, GROUP


class Quantised(NamedTuple):
    """Residuals in NVFP4: 4.5 bits a value. A row is its centroid plus value * scale * tensor."""

    values: Array  # uint8 [B, R, M / 2], E2M1, the even value in the low four bits
    scales: Array  # uint8 [B, R, M / 16], the bits of one E4M3 scale for 16 values
    tensor: Array  # float32 [B], the scale of a sequence's rows, or [B, R], that of each row


def quantise(
    rows: Array, centroids: Array, labels: Array, *, implementation: str | None = None
) -> Quantised:
    """Store rows as the rest to their cluster's centroid (arXiv 2607.14107, system optimisation).

    With residual x = row - centroid in float32: tensor scale s_t = max|x| / (6 * 448) over the
    sequence's rows, group scale s_g = E4M3(max|x_g| / (6 s_t)), value = E2M1(x / (s_g s_t)).
    Quotients by constants are products with their reciprocal, so that every back end and every
    optimisation of the compiler gives the same bits. Where a sequence's residuals are all below
    3e-35 the tensor scale is denormal, which most back ends take for zero.

    Args:
      rows: [B, R, M], float32, bfloat16 or float16.
      centroids: [B, K, M], of the rows' dtype or float32.
      labels: int32 [B, R] in [0, K); a negative label means no centroid.
      implementation: None, "xla", "pallas" or "interpret" (see `kernels.dispatch`).

    Raises:
      PolestarError: shapes or types that do not fit together, or an implementation that can not
        run.
    """
    sizes = _check("quantise", rows=(rows, "B R M"), centroids=centroids, labels=labels)
    (labels,) = as_int32("quantise", labels=labels)
    top = jnp.max(jnp.abs(reference.residual(rows, centroids, labels)), axis=(1, 2), initial=0.0)
    tensor = top * (1.0 / (E2M1_MAX * E4M3_MAX))
    inverse = jnp.where(tensor > 0.0, 1.0 / (E2M1_MAX * tensor), 0.0)
    values, scales = dispatch(
        "quantise",
        implementation,
        rows,
        centroids,
        labels,
        tensor,
        inverse,
        reference=reference.quantise,
        kernel=pallas.quantise,
        unsupported=_unsupported(rows, centroids, sizes),
    )
    return Quantised(values, scales, tensor)


def dequantise(
    stored: Quantised,
    centroids: Array,
    labels: Array,
    *,
    dtype: Any = jnp.float32,
    implementation: str | None = None,
) -> Array:
    """The stored rows [B, R, M] in `dtype`: centroid + value * group scale * tensor scale.

    `centroids` and `labels` are those of the time of quantisation, as in `quantise`; any subset of
    the rows may be given, with its labels. Rows of several calls of `quantise` may be mixed if
    each brings its tensor scale. `dtype` is float32, bfloat16, or float16, where what is beyond
    its range becomes its largest number. Errors as `quantise`.
    """
    if not isinstance(stored, Quantised):
        raise PolestarError(
            f"dequantise: stored must be what quantise returned, got {type(stored).__name__}"
        )
    wanted = check_dtype("dequantise", "dtype", dtype, FLOATS)
    sizes = _check(
        "dequantise",
        values=(stored.values, "B R Mhalf"),
        scales=(stored.scales, "B R groups"),
        tensor=(stored.tensor, "B" if stored.tensor.ndim == 1 else "B R"),
        centroids=centroids,
        labels=labels,
    )
    if sizes["Mhalf"] * 2 != sizes["M"] or sizes["groups"] * GROUP != sizes["M"]:
        raise PolestarError(
            f"dequantise: values {stored.values.shape} and scales {stored.scales.shape} do not "
            f"belong to centroids of width {sizes['M']}"
        )
    if {str(stored.values.dtype), str(stored.scales.dtype)} != {"uint8"}:
        raise PolestarError(
            f"dequantise: values {stored.values.dtype} and scales {stored.scales.dtype} must be "
            "uint8"
        )
    (labels,) = as_int32("dequantise", labels=labels)
    tensor = stored.tensor
    if tensor.ndim == 1:
        tensor = jnp.broadcast_to(tensor[:, None], labels.shape)
    return dispatch(
        "dequantise",
        implementation,
        stored.values,
        stored.scales,
        tensor,
        centroids,
        labels,
        reference=partial(reference.dequantise, dtype=wanted),
        kernel=partial(pallas.dequantise, dtype=wanted),
        unsupported=_unsupported(centroids, centroids, sizes),
    )


def _check(op: str, *, centroids: Array, labels: Array, **others: tuple[Array, str]) -> dict:
    sizes = check_shapes(
        op, **others, centroids=(centroids, "B K M"), labels=(labels, "B R")
    )  # fmt: skip
    if sizes["M"] % GROUP:
        raise PolestarError(f"{op}: the width must be a multiple of {GROUP}, got {sizes['M']}")
    return sizes


def _unsupported(rows: Array, centroids: Array, sizes: dict[str, int]) -> str | None:
    if str(rows.dtype) not in FLOATS or str(centroids.dtype) not in FLOATS:
        return f"rows {rows.dtype} with centroids {centroids.dtype} (of {', '.join(FLOATS)})"
    if not (sizes["B"] and sizes["R"] and sizes["M"] and sizes["K"]):
        return "arrays without elements"
    return None
