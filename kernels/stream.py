"""The attention kernel of this project: one pass over the keys, whatever is asked of it.

A program takes a tile of query rows of one key/value head and streams over its share of the keys
with an online softmax: running maximum m, sum z = sum exp(s - m), weighted values, and for the
drift c = sum exp(s - m) (s - s'), where s are the scaled scores and s' those stored by the previous
pass. With the log-normaliser l = m + log z, KL(now || before) = c / z - l + l'. What is switched
off costs nothing, since the switches are static.

Symbols: G independent attentions (batch x key/value heads), N query rows of each (rows x query
heads per key/value head), T keys, D head size, S splits of the keys.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from polestar_jax.kernels.plan import Plan, power_of_two
from polestar_jax.models.attention import FLOOR, LOG_FLOOR, NEGATIVE
from polestar_jax.models.transformer import precision_of


@dataclasses.dataclass(frozen=True)
class Task:
    """What one call computes. `floor`: None (no drift), "clip" or "add".

    A drift's logarithms are log max(p, 1e-12) ("clip", tokens) or log(p + 1e-12) ("add",
    clusters). The floor under the previous distribution is applied exactly; under the current one
    it changes a drift by less than T * 1e-12 and is left out.
    """

    scale: float
    values: bool
    scores: Any = None  # dtype in which scores are kept, or None
    floor: str | None = None


@functools.partial(jax.named_call, name="stream_attention")
def stream(
    task: Task,
    q: Array,
    k: Array,
    v: Array | None,
    pad: Array,
    limit: Array,
    rope: tuple[Array, Array] | None = None,
    previous: tuple[Array, Array] | None = None,
    *,
    plan: Plan,
    name: str,
    interpret: bool,
) -> dict[str, Array]:
    """Run the kernel and merge its splits.

    q [G, N, D] (rotated already if `rope` is given), k and v [G, T, D]; pad and limit int32 [G]:
    keys before `pad` are masked, rows from `limit` on give zeros; rope: cosines and sines float32
    [2T, D/2], whose row T + p is position p; previous: scores [G, N, T] and log-normaliser [G, N].
    Returns "out" [G, N, D] in v's dtype, "scores" [G, N, T], "normaliser" and "kl" float32
    [G, N], as far as the task asks for them.
    """
    g, n, d = q.shape
    t = k.shape[1]

    def whole(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape), lambda i, r, s: (i,) + (0,) * len(shape))

    def shared(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda i, r, s: (0,) * len(shape))

    def split(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *shape), lambda i, r, s: (s, i) + (0,) * len(shape))

    # A head size that is no power of two is read in wider blocks, masked; the blocks say so.
    deep = d // 2 + power_of_two(d // 2, 16)
    width = power_of_two(d, 16)
    partial_dtype = jnp.float32 if plan.splits > 1 or v is None else v.dtype
    out_shape = {"normaliser": jax.ShapeDtypeStruct((plan.splits, g, n), jnp.float32)}
    out_specs = {"normaliser": split(n)}
    if task.values:
        out_shape["out"] = jax.ShapeDtypeStruct((plan.splits, g, n, d), partial_dtype)
        out_specs["out"] = split(n, width)
    if task.scores is not None:
        out_shape["scores"] = jax.ShapeDtypeStruct((g, n, t), task.scores)
        out_specs["scores"] = whole(n, t)
    if task.floor:
        out_shape["kl"] = jax.ShapeDtypeStruct((plan.splits, g, n), jnp.float32)
        out_specs["kl"] = split(n)

    inputs: dict[str, Any] = {"pad": pad, "limit": limit, "q": q, "k": k}
    in_specs: dict[str, Any] = {
        "pad": shared(g), "limit": shared(g), "q": whole(n, deep), "k": whole(t, deep),
    }  # fmt: skip
    if task.values:
        inputs["v"], in_specs["v"] = v, whole(t, width)
    if rope is not None:
        inputs["cos"], inputs["sin"] = rope
        in_specs["cos"] = in_specs["sin"] = shared(2 * t, deep - d // 2)
    if task.floor:
        assert previous is not None
        inputs["scores"], inputs["normaliser"] = previous
        in_specs["scores"], in_specs["normaliser"] = whole(n, t), whole(n)

    got = pl.pallas_call(
        functools.partial(_program, task, plan, (n, t, d)),
        grid=(g, plan.row_tiles, plan.splits),
        in_specs=[in_specs],
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=plt.CompilerParams(num_warps=plan.warps, num_stages=plan.stages),
        interpret=interpret,
        name=name,
    )(inputs)
    return merge(got, None if previous is None else previous[1], v)


def merge(got: dict[str, Array], before: Array | None, v: Array | None) -> dict[str, Array]:
    """Merge the splits by their log-normalisers and close the drift.

    got: "normaliser" and "kl" [S, G, N], "out" [S, G, N, D], "scores"; before: the previous pass's
    log-normaliser [G, N], with "kl"; v: the values, whose dtype "out" takes.
    """
    parts = got["normaliser"]  # [S, G, N]
    if parts.shape[0] == 1:
        normaliser, weights = parts[0], jnp.ones_like(parts)
    else:
        normaliser = jax.nn.logsumexp(parts, axis=0)
        weights = jnp.exp(parts - normaliser[None])
    result = {"normaliser": normaliser}
    if "scores" in got:
        result["scores"] = got["scores"]
    if "out" in got:
        assert v is not None
        out = got["out"]
        if parts.shape[0] > 1:
            out = jnp.sum(out * weights[..., None], axis=0).astype(v.dtype)
        else:
            out = out[0]
        result["out"] = out
    if "kl" in got:
        assert before is not None
        kl = jnp.sum(got["kl"] * weights, axis=0) - normaliser + before
        result["kl"] = jnp.maximum(kl, 0.0)
    return result


def _dot(a: Array, b: Array, contract_b: int) -> Array:
    """a [M, C] times b, contracted over a's columns and b's axis, in float32."""
    return lax.dot_general(
        a,
        b,
        (((1,), (contract_b,)), ((), ())),
        precision=precision_of(a.dtype),
        preferred_element_type=jnp.float32,
    )


def _program(task: Task, plan: Plan, sizes: tuple[int, int, int], refs: dict, outs: dict) -> None:
    """One tile of rows against one share of the keys."""
    n, t, d = sizes
    half, lanes = d // 2, power_of_two(d // 2, 16)
    width = power_of_two(d, 16)
    group = pl.program_id(0)
    row0 = pl.program_id(1) * plan.rows
    tile0 = pl.program_id(2) * plan.tiles_per_split
    pad, limit = refs["pad"][group], refs["limit"][group]

    rows = row0 + jnp.arange(plan.rows)
    row_in = rows < n
    lane_in = jnp.arange(lanes) < half
    row_slice, low, high = pl.ds(row0, plan.rows), pl.ds(0, lanes), pl.ds(half, lanes)

    def halves(ref: Any, where: Any, present: Array) -> tuple[Array, Array]:
        mask = present[:, None] & lane_in[None, :]
        first = plt.load(ref.at[where, low], mask=mask, other=0)
        return first, plt.load(ref.at[where, high], mask=mask, other=0)

    q_low, q_high = halves(refs["q"], row_slice, rows < limit)
    if task.floor:
        before = plt.load(refs["normaliser"].at[row_slice], mask=row_in, other=0.0)

    def step(j: Array, carry: tuple) -> tuple:
        top, total, drift, out = carry
        key0 = (tile0 + j) * plan.keys
        keys = key0 + jnp.arange(plan.keys)
        key_slice = pl.ds(key0, plan.keys)
        seen = (keys >= pad) & (keys < t)

        k_low, k_high = halves(refs["k"], key_slice, seen)
        if "cos" in refs:
            k_low, k_high = _rotate(refs, k_low, k_high, key0 - pad + t, seen, lane_in, plan)
        scores = (_dot(q_low, k_low, 1) + _dot(q_high, k_high, 1)) * task.scale
        scores = jnp.where(seen[None, :], scores, NEGATIVE)

        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        decay = jnp.exp(top - new_top)
        weights = jnp.where(seen[None, :], jnp.exp(scores - new_top[:, None]), 0.0)
        total = total * decay + jnp.sum(weights, axis=1)
        here = row_in[:, None] & (keys < t)[None, :]
        if task.floor:
            old = plt.load(refs["scores"].at[row_slice, key_slice], mask=here, other=NEGATIVE)
            gap = scores - _floored(task.floor, old.astype(jnp.float32), before[:, None])
            drift = drift * decay + jnp.sum(jnp.where(seen[None, :], weights * gap, 0.0), axis=1)
        if task.scores is not None:
            kept = scores.astype(task.scores)
            plt.store(outs["scores"].at[row_slice, key_slice], kept, mask=here)
        if task.values:
            mask = seen[:, None] & (jnp.arange(width) < d)[None, :]
            v = plt.load(refs["v"].at[key_slice, pl.ds(0, width)], mask=mask, other=0)
            out = out * decay[:, None] + _dot(weights.astype(v.dtype), v, 0)
        return new_top, total, drift, out

    # A tile without rows does nothing but write its zeros.
    steps = (row0 < limit).astype(jnp.int32) * plan.tiles_per_split
    empty = jnp.zeros((plan.rows,), jnp.float32)
    start = (empty + NEGATIVE, empty, empty, jnp.zeros((plan.rows, width), jnp.float32))
    top, total, drift, out = lax.fori_loop(0, steps, step, start)

    some = jnp.where(total > 0, total, 1.0)  # a share may hold pads only
    plt.store(outs["normaliser"].at[row_slice], top + jnp.log(some), mask=row_in)
    if task.floor:
        plt.store(outs["kl"].at[row_slice], drift / some, mask=row_in)
    if task.values:
        present = (rows < limit)[:, None]
        value = jnp.where(present, out / some[:, None], 0.0).astype(outs["out"].dtype)
        mask = row_in[:, None] & (jnp.arange(width) < d)[None, :]
        plt.store(outs["out"].at[row_slice, pl.ds(0, width)], value, mask=mask)


def _rotate(
    refs: dict, low: Array, high: Array, first: Array, seen: Array, lane_in: Array, plan: Plan
) -> tuple[Array, Array]:
    """Rotary positions of a tile of keys; `first` is the tables' row of its first key.

    Positions before the row's first token are negative; they lie in the tables' first half, so no
    index is. Float32, rounded back to the keys' dtype as the model does.
    """
    mask = seen[:, None] & lane_in[None, :]
    where = (pl.ds(first, plan.keys), pl.ds(0, low.shape[1]))
    cos = plt.load(refs["cos"].at[where], mask=mask, other=0.0)
    sin = plt.load(refs["sin"].at[where], mask=mask, other=0.0)
    a, b = low.astype(jnp.float32), high.astype(jnp.float32)
    return (a * cos - b * sin).astype(low.dtype), (b * cos + a * sin).astype(low.dtype)


def _floored(floor: str, old: Array, before: Array) -> Array:
    """Scores of the previous pass that give its floored probabilities under its normaliser."""
    if floor == "clip":
        return jnp.maximum(old, before + LOG_FLOOR)
    return before + jnp.log(jnp.exp(old - before) + FLOOR)
