"""The op's kernels: one program moves one row of every array; attention streams over the keys.

Moving rows is bound by memory: a program loads its row's index, and the row [Hk, D] of each array
as one masked block. Writes go to the caller's buffer (input aliased to output), so a refresh of a
few rows touches only those.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from polestar_jax.kernels.layout import key_tables, rotate_queries, rows_first
from polestar_jax.kernels.plan import Plan, power_of_two
from polestar_jax.kernels.stream import Task, stream

MAX_BLOCK = 4096  # elements of a row moved at once


def _cut(heads: int, width: int) -> tuple[int, int, int]:
    """Block [heads, columns] of one row, powers of two, and how many blocks of columns it takes."""
    high = power_of_two(heads)
    wide = min(power_of_two(width), max(1, MAX_BLOCK // high))
    return high, wide, -(-width // wide)


def _row_specs(sources: tuple[Array, ...]) -> list[pl.BlockSpec]:
    """Sequence b of caches [B, Hk, T, D] whose blocks are wide enough for every masked access."""
    specs = []
    for x in sources:
        high, wide, blocks = _cut(x.shape[1], x.shape[3])
        shape = (None, high, x.shape[2], wide * blocks)
        specs.append(pl.BlockSpec(shape, lambda b, r: (b, 0, 0, 0)))
    return specs


def _packed_specs(packed: tuple[Array, ...] | list[jax.ShapeDtypeStruct]) -> list[pl.BlockSpec]:
    """Row r of sequence b of packed rows [B, R, Hk, D]."""
    specs = []
    for x in packed:
        high, wide, blocks = _cut(x.shape[2], x.shape[3])
        shape = (None, None, high, wide * blocks)
        specs.append(pl.BlockSpec(shape, lambda b, r: (b, r, 0, 0)))
    return specs


def _scalars(rows: Array, count: Array) -> list[pl.BlockSpec]:
    return [
        pl.BlockSpec(rows.shape, lambda b, r: (0, 0)),
        pl.BlockSpec(count.shape, lambda b, r: (0,)),
    ]


def gather(
    sources: tuple[Array, ...], rows: Array, count: Array, *, interpret: bool
) -> tuple[Array, ...]:
    """As `reference.gather`, all sources in one kernel."""
    b, r = rows.shape
    out = [jax.ShapeDtypeStruct((b, r, x.shape[1], x.shape[3]), x.dtype) for x in sources]
    got = pl.pallas_call(
        partial(_gather_row, tuple((x.shape[1], x.shape[3]) for x in sources)),
        grid=(b, r),
        in_specs=[*_scalars(rows, count), *_row_specs(sources)],
        out_specs=_packed_specs(out),
        out_shape=out,
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="gather_rows",
    )(rows, count, *sources)
    return tuple(got)


def _gather_row(sizes: tuple[tuple[int, int], ...], rows_ref, count_ref, *refs) -> None:
    # rows_ref [B, R]; count_ref [B]; sources [Hk, T, D] then outputs [Hk, D], per array
    b, r = pl.program_id(0), pl.program_id(1)
    present = r < count_ref[b]
    row = jnp.where(present, rows_ref[b, r], 0)
    for (heads, width), source, out in zip(sizes, refs, refs[len(sizes) :]):
        high, wide, blocks = _cut(heads, width)
        for block in range(blocks):
            inside = _inside(heads, width, high, wide, block)
            columns = pl.ds(block * wide, wide)
            value = plt.load(
                source.at[pl.ds(0, high), row, columns], mask=inside & present, other=0
            )
            plt.store(out.at[pl.ds(0, high), columns], value, mask=inside)


def scatter(
    targets: tuple[Array, ...],
    new: tuple[Array, ...],
    rows: Array,
    count: Array,
    *,
    interpret: bool,
) -> tuple[Array, ...]:
    """As `reference.scatter`, all targets in one kernel and in their own memory."""
    got = pl.pallas_call(
        partial(_scatter_row, tuple((x.shape[1], x.shape[3]) for x in targets)),
        grid=rows.shape,
        in_specs=[*_scalars(rows, count), *_packed_specs(new), *_row_specs(targets)],
        out_specs=_row_specs(targets),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in targets],
        input_output_aliases={2 + len(new) + i: i for i in range(len(targets))},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="scatter_rows",
    )(rows, count, *new, *targets)
    return tuple(got)


def _scatter_row(sizes: tuple[tuple[int, int], ...], rows_ref, count_ref, *refs) -> None:
    # rows_ref [B, R]; count_ref [B]; new rows [Hk, D], then targets and outputs [Hk, T, D]
    b, r = pl.program_id(0), pl.program_id(1)
    present = r < count_ref[b]
    row = jnp.where(present, rows_ref[b, r], 0)
    for (heads, width), new, out in zip(sizes, refs, refs[2 * len(sizes) :]):
        high, wide, blocks = _cut(heads, width)
        for block in range(blocks):
            inside = _inside(heads, width, high, wide, block) & present
            columns = pl.ds(block * wide, wide)
            value = plt.load(new.at[pl.ds(0, high), columns], mask=inside, other=0)
            plt.store(out.at[pl.ds(0, high), row, columns], value, mask=inside)


def _inside(heads: int, width: int, high: int, wide: int, block: int) -> Array:
    columns = block * wide + jnp.arange(wide)
    return (jnp.arange(high) < heads)[:, None] & (columns < width)[None, :]


def attend_rows(
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    pad: Array,
    count: Array | None,
    *,
    theta: float,
    interpret: bool,
) -> Array:
    """As `reference.attend_rows`; tiles without a row end at once."""
    b, r, h, d = q.shape
    hk, t = k.shape[1], k.shape[2]
    g, group = b * hk, h // hk
    if count is None:
        count = jnp.full((b,), r, jnp.int32)
    got = stream(
        Task(d**-0.5, True),
        rows_first(rotate_queries(q, positions, theta), hk),
        k.reshape(g, t, d),
        v.reshape(g, t, d),
        jnp.repeat(pad, hk),
        jnp.repeat(count * group, hk),
        key_tables(t, d, theta),
        plan=Plan.of(g, r * group, t, k.dtype.itemsize, rotary=True),
        name="attend_rows",
        interpret=interpret,
    )
    out = got["out"].reshape(b, hk, r, group, d).transpose(0, 2, 1, 3, 4)
    return out.reshape(b, r, h * d)
