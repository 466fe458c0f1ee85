"""The two small floating-point formats, by integer arithmetic that every back end compiles.

E2M1: sign, two exponent bits, one mantissa bit: 0, 0.5, 1, 1.5, 2, 3, 4, 6. E4M3 ("fn"): bias 7,
no infinity, largest value 448, least 2^-9; here only values >= 0 occur. Both round to nearest,
ties to even. These functions run inside kernels too.
"""

import jax.numpy as jnp
from jax import Array, lax

FLOAT16_MAX = 65504.0
GROUP = 16  # values that share a scale
E2M1_MAX = 6.0
E4M3_MAX = 448.0
# (threshold, whether the threshold itself rounds up) between neighbouring magnitudes
E2M1_STEPS = (
    (0.25, False), (0.75, True), (1.25, False), (1.75, True),
    (2.5, False), (3.5, True), (5.0, False),
)  # fmt: skip


def e2m1_encode(x: Array, scale: Array) -> Array:
    """Codes 0..15, int32, of x / scale; float32, scale >= 0 broadcastable, larger values clamp.

    Thresholds are scaled instead of dividing x: products round alike on every back end, quotients
    do not. A scale of 0 gives 0.
    """
    magnitude = jnp.abs(x)
    code = jnp.zeros(x.shape, jnp.int32)
    for threshold, itself in E2M1_STEPS:
        edge = threshold * scale
        above = magnitude >= edge if itself else magnitude > edge
        code = code + above.astype(jnp.int32)
    code = jnp.where(scale > 0.0, code, 0)
    return code + jnp.where((x < 0.0) & (code > 0), 8, 0)


def e2m1_decode(code: Array) -> Array:
    """Float32 value of int32 codes 0..15."""
    m = code & 7
    twice = jnp.where(m < 4, m, jnp.where(m < 6, 2 * m - 4, 4 * m - 16))
    value = twice.astype(jnp.float32) * 0.5
    return jnp.where(code > 7, -value, value)


def e4m3_encode(x: Array) -> Array:
    """Bits 0..126, int32, of float32 x >= 0; larger values clamp to 448."""
    bits = lax.bitcast_convert_type(jnp.minimum(x, E4M3_MAX), jnp.int32)
    # Normal numbers: keep three mantissa bits, a carry moves into the exponent by itself.
    kept = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    normal = kept - (120 << 3)
    # Below 2^-6 the step is 2^-9: round x * 512 to an integer.
    steps = x * 512.0
    floor = steps.astype(jnp.int32)
    rest = steps - floor.astype(jnp.float32)
    up = (rest > 0.5) | ((rest == 0.5) & ((floor & 1) == 1))
    return jnp.where(x < 2.0**-6, floor + up.astype(jnp.int32), normal)


def e4m3_decode(bits: Array) -> Array:
    """Float32 value of int32 bits 0..126."""
    normal = lax.bitcast_convert_type((bits + (120 << 3)) << 20, jnp.float32)
    return jnp.where(bits < 8, bits.astype(jnp.float32) * 2.0**-9, normal)


def narrowed(x: Array, dtype: jnp.dtype) -> Array:
    """Float32 x in `dtype`; what is beyond float16's range becomes its largest number."""
    if dtype == jnp.float16:
        x = jnp.clip(x, -FLOAT16_MAX, FLOAT16_MAX)
    return x.astype(dtype)
