"""The op as a Mosaic GPU kernel for Hopper: the same stream over the keys, written by hand.

One warpgroup takes 64 query rows of a key head. Tiles of keys, values, rotary tables and kept
scores come into shared memory by TMA, the next tile's while this one is computed; keys are rotated
in registers and put back; both products are wgmma. Numbers and merging are those of
`kernels.stream`. Needs JAX 0.12 (Mosaic's interpreter, which the tests use, lacks parts before).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from polestar_jax.errors import PolestarError
from polestar_jax.kernels.drift_attention.arguments import Arguments, Results, unpacked
from polestar_jax.kernels.layout import heads_first, key_tables, rotate_queries
from polestar_jax.kernels.plan import Plan
from polestar_jax.kernels.stream import merge
from polestar_jax.models.attention import LOG_FLOOR, NEGATIVE

plgpu: Any = mosaic_gpu  # what it offers differs between the supported versions of JAX

TILE = 64  # query rows, keys, and half a head: what a swizzled line of shared memory holds
SLOTS = 2  # tiles in flight
Refs = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes of one call: `length` keys, head size 2 * TILE, `drift` whether it is asked."""

    plan: Plan
    length: int
    dtype: Any
    partial: Any  # dtype of the splits' results
    drift: bool

    @property
    def tiles(self) -> int:
        return self.length // TILE


def check(q: Array, k: Array, scores_dtype: Any) -> None:
    """Raise `PolestarError` for what this body can not take."""
    reason = None
    if str(q.dtype) not in ("bfloat16", "float16") or q.dtype != k.dtype:
        reason = f"{q.dtype} queries with {k.dtype} keys (both bfloat16 or float16)"
    elif q.shape[-1] != 2 * TILE:
        reason = f"head size {q.shape[-1]} ({2 * TILE})"
    elif k.shape[2] % TILE:
        reason = f"{k.shape[2]} keys (a multiple of {TILE})"
    elif jnp.dtype(scores_dtype) != jnp.float32:
        reason = f"scores kept in {scores_dtype} (float32)"
    if reason:
        raise PolestarError(f"drift_attention by Mosaic can not take {reason}; use 'pallas'")


def drift_attention(
    arguments: Arguments, *, theta: float, scores_dtype: Any, interpret: bool
) -> Results:
    """Rows are padded to whole tiles, kept scores with them."""
    q, k, v, positions, pad, previous = arguments
    check(q, k, scores_dtype)
    hk, d = k.shape[1], k.shape[3]
    g, n, t = arguments.packed
    plan = Plan.cut(g, n, t, TILE, TILE, warps=4)
    rows = plan.row_tiles * TILE
    partial = v.dtype if plan.splits == 1 else jnp.dtype(jnp.float32)
    sizes = Sizes(plan, t, q.dtype, partial, previous is not None)

    def padded(x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, rows - n), *((0, 0),) * (x.ndim - 2)))

    inputs = {
        "pad": jnp.repeat(pad, hk),
        "q": padded(heads_first(rotate_queries(q, positions, theta), hk)),
        "k": k.reshape(g, t, d),
        "v": v.reshape(g, t, d),
    }
    inputs["cos"], inputs["sin"] = key_tables(t, d, theta)
    before = None
    if previous is not None:
        before = previous[1].reshape(g, n)
        inputs["old"] = padded(previous[0].reshape(g, n, t).astype(jnp.float32))
        inputs["before"] = padded(before)
    parts = (plan.splits, g, rows)
    outputs = {
        "out": jax.ShapeDtypeStruct((*parts, d), partial),
        "normaliser": jax.ShapeDtypeStruct(parts, jnp.float32),
        "scores": jax.ShapeDtypeStruct((g, rows, t), jnp.float32),
    }
    if previous is not None:
        outputs["kl"] = jax.ShapeDtypeStruct(parts, jnp.float32)
    scratch = _scratch(sizes)

    def drift_attention_mosaic(*refs: Any) -> None:
        ins = dict(zip(inputs, refs))
        outs = dict(zip(outputs, refs[len(inputs) :]))
        pl.run_scoped(
            lambda *own: _program(sizes, ins, outs, dict(zip(scratch, own))), *scratch.values()
        )

    results = plgpu.kernel(
        drift_attention_mosaic,
        out_type=tuple(outputs.values()),
        grid=(g, plan.row_tiles, plan.splits),
        grid_names=("group", "tile", "split"),
        compiler_params=plgpu.CompilerParams(
            approx_math=False, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
    )(*inputs.values())
    got = {
        name: x[..., :n, :] if name in ("out", "scores") else x[..., :n]
        for name, x in zip(outputs, results)
    }
    return unpacked(merge(got, before, v), arguments)


def _scratch(sizes: Sizes) -> Refs:
    """Shared memory (216 KiB of the 227 that a block may have) and barriers."""

    def tile(*shape: int, dtype: Any = sizes.dtype) -> Any:
        line = 128 // jnp.dtype(dtype).itemsize  # elements of a swizzled line of 128 bytes
        transforms = (plgpu.TilingTransform((8, line)), plgpu.SwizzleTransform(128))
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    f32 = jnp.float32
    scratch = {
        "q_low": tile(TILE, TILE),
        "q_high": tile(TILE, TILE),
        "k_low": tile(SLOTS, TILE, TILE),
        "k_high": tile(SLOTS, TILE, TILE),
        "v": tile(SLOTS, TILE, 2 * TILE),
        "cos": tile(SLOTS, TILE, TILE, dtype=f32),
        "sin": tile(SLOTS, TILE, TILE, dtype=f32),
        "scores": tile(TILE, TILE, dtype=f32),
        "weights": tile(TILE, TILE),
        "out": tile(TILE, 2 * TILE, dtype=sizes.partial),
        "row": plgpu.SMEM((TILE,), f32),
        "first": plgpu.Barrier(num_arrivals=3 if sizes.drift else 2),
        "ready": plgpu.Barrier(num_arrivals=5, num_barriers=SLOTS),
    }
    if sizes.drift:
        scratch |= {"old": tile(TILE, TILE, dtype=f32), "old_ready": plgpu.Barrier()}
    return scratch


def _load(ref: Any) -> Array:
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA)


def _across(x: Array, width: int = TILE) -> Array:
    """A value per row, repeated along the columns of a tile."""
    return lax.broadcast_in_dim(x, (TILE, width), [0])


def _program(sizes: Sizes, ins: Refs, outs: Refs, own: Refs) -> None:
    """One tile of rows against one share of the keys."""
    group, tile, part = (lax.axis_index(name) for name in ("group", "tile", "split"))
    rows = pl.ds(tile * TILE, TILE)
    first_tile = part * sizes.plan.tiles_per_split
    steps = jnp.minimum(sizes.plan.tiles_per_split, sizes.tiles - first_tile)
    pad = ins["pad"][group]
    per_row = plgpu.Layout.WGMMA.reduce(1)

    for name, half in (("q_low", 0), ("q_high", TILE)):
        source = ins["q"].at[group, rows, pl.ds(half, TILE)]
        plgpu.copy_gmem_to_smem(source, own[name], own["first"])
    if sizes.drift:
        plgpu.copy_gmem_to_smem(ins["before"].at[group, rows], own["row"], own["first"])
        _fetch_old(ins, own, group, rows, first_tile)
    _fetch(sizes, ins, own, group, pad, first_tile, 0)
    plgpu.barrier_wait(own["first"])
    before = plgpu.load(own["row"], layout=per_row) if sizes.drift else None

    def step(j: Array, carry: tuple) -> tuple:
        top, total, drift, out = carry
        slot = lax.rem(j, jnp.int32(SLOTS))
        key_tile = first_tile + j
        plgpu.barrier_wait(own["ready"].at[slot])
        _rotate(own, slot, sizes.dtype)

        # All warps are past the previous step now, so its slot may be overwritten.
        @pl.when(j + 1 < steps)
        def _next() -> None:
            _fetch(sizes, ins, own, group, pad, key_tile + 1, 1 - slot)

        keys = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 1, layout=plgpu.Layout.WGMMA)
        seen = keys + key_tile * TILE >= pad
        scores = jnp.where(seen, _scores(own, slot), NEGATIVE)
        new_top = jnp.maximum(top, scores.max(axis=1))
        decay = jnp.exp(top - new_top)
        weights = jnp.where(seen, jnp.exp(scores - _across(new_top)), 0.0)
        total = total * decay + weights.sum(axis=1)
        if sizes.drift:
            plgpu.barrier_wait(own["old_ready"])
            assert before is not None
            base = jnp.maximum(_load(own["old"]), _across(before) + LOG_FLOOR)
            gap = jnp.where(seen, weights * (scores - base), 0.0)
            drift = drift * decay + gap.sum(axis=1)

        plgpu.wait_smem_to_gmem(0)  # the previous tile's scores have left
        own["scores"][...] = scores
        own["weights"][...] = weights.astype(sizes.dtype)
        plgpu.commit_smem()
        target = outs["scores"].at[group, rows, pl.ds(key_tile * TILE, TILE)]
        plgpu.copy_smem_to_gmem(own["scores"], target)
        if sizes.drift:

            @pl.when(j + 1 < steps)
            def _next_old() -> None:
                _fetch_old(ins, own, group, rows, key_tile + 1)

        def values(acc: Any) -> Array:
            plgpu.wgmma(acc, own["weights"], own["v"].at[slot])
            return acc[...]

        added = pl.run_scoped(values, plgpu.ACC((TILE, 2 * TILE), jnp.float32))
        return new_top, total, drift, out * _across(decay, 2 * TILE) + added

    zero = plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), per_row)
    nothing = plgpu.layout_cast(jnp.zeros((TILE, 2 * TILE), jnp.float32), plgpu.Layout.WGMMA)
    carry = (zero + NEGATIVE, zero, zero, nothing)
    top, total, drift, out = lax.fori_loop(0, steps, step, carry)

    some = jnp.where(total > 0, total, 1.0)  # a share may hold pads only
    own["out"][...] = (out / _across(some, 2 * TILE)).astype(sizes.partial)
    own["row"][...] = top + jnp.log(some)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(own["out"], outs["out"].at[part, group, rows])
    plgpu.copy_smem_to_gmem(own["row"], outs["normaliser"].at[part, group, rows])
    plgpu.wait_smem_to_gmem(0)
    if sizes.drift:
        own["row"][...] = drift / some
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(own["row"], outs["kl"].at[part, group, rows])
        plgpu.wait_smem_to_gmem(0)


def _fetch(
    sizes: Sizes, ins: Refs, own: Refs, group: Array, pad: Array, tile: Array, slot: Array | int
) -> None:
    """Start the transfers of a tile of keys, their values and their rotary tables into a slot."""
    keys = pl.ds(tile * TILE, TILE)
    table = pl.ds(tile * TILE - pad + sizes.length, TILE)  # row T + p is position p
    sources = {
        "k_low": ins["k"].at[group, keys, pl.ds(0, TILE)],
        "k_high": ins["k"].at[group, keys, pl.ds(TILE, TILE)],
        "v": ins["v"].at[group, keys],
        "cos": ins["cos"].at[table],
        "sin": ins["sin"].at[table],
    }
    for name, source in sources.items():
        plgpu.copy_gmem_to_smem(source, own[name].at[slot], own["ready"].at[slot])


def _fetch_old(ins: Refs, own: Refs, group: Array, rows: Any, tile: Array) -> None:
    source = ins["old"].at[group, rows, pl.ds(tile * TILE, TILE)]
    plgpu.copy_gmem_to_smem(source, own["old"], own["old_ready"])


def _rotate(own: Refs, slot: Array, dtype: Any) -> None:
    """Rotary positions of the slot's keys, in float32, rounded back in place."""
    low, high = own["k_low"].at[slot], own["k_high"].at[slot]
    a, b = _load(low).astype(jnp.float32), _load(high).astype(jnp.float32)
    cos, sin = _load(own["cos"].at[slot]), _load(own["sin"].at[slot])
    low[...] = (a * cos - b * sin).astype(dtype)
    high[...] = (b * cos + a * sin).astype(dtype)
    plgpu.commit_smem()


def _scores(own: Refs, slot: Array) -> Array:
    """Scaled scores of the tile, float32 [rows, keys]."""

    def product(acc: Any) -> Array:
        for half in ("low", "high"):
            keys = own[f"k_{half}"].at[slot].transpose((1, 0))
            plgpu.wgmma(acc, own[f"q_{half}"], keys)
        return acc[...]

    return pl.run_scoped(product, plgpu.ACC((TILE, TILE), jnp.float32)) * (2 * TILE) ** -0.5
