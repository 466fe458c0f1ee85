"""What the ops' doors let in: everything that works, and one sentence for everything else."""

import dataclasses
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polestar_jax.errors import PolestarError
from polestar_jax.kernels.aot import card_in_scope
from polestar_jax.kernels.drift_attention import drift_attention
from polestar_jax.kernels.nvfp4 import dequantise, quantise
from polestar_jax.kernels.proxy_drift import proxy_drift
from polestar_jax.kernels.sparse_refresh import (
    attend_rows,
    gather_cache,
    gather_rows,
    scatter_cache,
    scatter_rows,
)

B, R, H, HK, D, T, M, K = 2, 3, 4, 2, 16, 5, 32, 3
IMPLEMENTATIONS = (None, "xla", "interpret")


@dataclasses.dataclass(frozen=True)
class Op:
    """An op with arguments that it takes."""

    run: object
    arguments: dict

    def __call__(self, **changes):
        return self.run(**(self.arguments | changes))


def ops() -> dict[str, Op]:
    rng = np.random.default_rng(0)

    def floats(*shape):
        return rng.normal(size=shape).astype(np.float32)

    q, k, v = floats(B, R, H, D), floats(B, HK, T, D), floats(B, HK, T, D)
    rows = np.array([[0, 2, 4], [4, 1, 3]], np.int32)
    count, pad = np.array([2, 3], np.int32), np.array([0, 1], np.int32)
    previous = (floats(B, H, R, T), floats(B, H, R))
    seen = {"q": q, "k": k, "v": v, "positions": rows, "pad": pad, "theta": 1e4}
    centroids, labels = floats(B, K, M), np.array([[0, 1, 2], [-1, 2, 0]], np.int32)
    stored = quantise(floats(B, R, M), centroids, labels)
    return {
        "drift_attention": Op(drift_attention, seen | {"previous": previous}),
        "proxy_drift": Op(proxy_drift, {"q": q, "k": k, "pad": pad, "previous": previous}),
        "attend_rows": Op(attend_rows, seen | {"count": count}),
        "gather_rows": Op(gather_rows, {"hidden": floats(B, T, M), "rows": rows, "count": count}),
        "gather_cache": Op(gather_cache, {"k": k, "v": v, "rows": rows, "count": count}),
        "scatter_rows": Op(
            scatter_rows,
            {"hidden": floats(B, T, M), "new": floats(B, R, M), "rows": rows, "count": count},
        ),
        "scatter_cache": Op(
            scatter_cache,
            {
                "k": k, "v": v, "new_k": floats(B, R, HK, D), "new_v": floats(B, R, HK, D),
                "rows": rows, "count": count,
            },
        ),
        "quantise": Op(
            quantise, {"rows": floats(B, R, M), "centroids": centroids, "labels": labels}
        ),
        "dequantise": Op(
            dequantise, {"stored": stored, "centroids": centroids, "labels": labels}
        ),
    }  # fmt: skip


OPS = ops()
INTEGERS = [
    (op, name)
    for op, case in OPS.items()
    for name in ("positions", "pad", "count", "rows", "labels")
    if name in case.arguments and not (op == "quantise" and name == "rows")
]
FLOATING = [(op, name) for op in ("drift_attention", "attend_rows") for name in "qkv"]
FLOATING += [("proxy_drift", name) for name in "qk"]


def assert_equal(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("op", OPS)
def test_numpy_arrays_give_what_jax_arrays_give(op, implementation):
    case = OPS[op]
    changes = {
        name: jax.tree.map(jnp.asarray, value)
        for name, value in case.arguments.items()
        if name != "theta"
    }
    run = partial(case, implementation=implementation)
    assert_equal(run(), run(**changes))


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
@pytest.mark.parametrize("op", [op for op in OPS if "quantise" not in op])
def test_integers_of_any_width_are_taken(op, implementation):
    run, plain = partial(OPS[op], implementation=implementation), OPS[op].arguments
    names = [name for found, name in INTEGERS if found == op]
    want = run()
    for dtype in ("uint8", "int64"):
        assert_equal(run(**{name: plain[name].astype(dtype) for name in names}), want)


@pytest.mark.parametrize(("op", "name"), INTEGERS)
def test_what_must_be_integers_is_refused_otherwise(op, name):
    value = OPS[op].arguments[name]
    for implementation, dtype in itertools.product(IMPLEMENTATIONS, (np.float32, bool)):
        with pytest.raises(PolestarError, match=f"{op}: {name} must be integers, got"):
            OPS[op](**{name: value.astype(dtype)}, implementation=implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("op", "name"), FLOATING)
def test_queries_keys_and_values_must_be_floats_of_one_type(op, name, implementation):
    for dtype in (np.int32, np.float16, np.complex64):
        wrong = {name: OPS[op].arguments[name].astype(dtype)}
        with pytest.raises(PolestarError, match=f"{op}: q .* must be floating-point"):
            OPS[op](**wrong, implementation=implementation)


@pytest.mark.parametrize("op", OPS)
def test_what_is_no_array_is_named(op):
    for name, value in OPS[op].arguments.items():
        if name in ("theta", "previous", "stored"):
            continue
        with pytest.raises(PolestarError, match=f"{op}: {name} must be an array, got list"):
            OPS[op](**{name: value.tolist()})


@pytest.mark.parametrize("op", ["drift_attention", "proxy_drift"])
def test_the_previous_pass_is_a_pair_of_float_arrays(op):
    scores, normaliser = OPS[op].arguments["previous"]
    result = OPS[op]()
    for wrong in (result, (scores,), [scores, normaliser], (None, normaliser), scores):
        with pytest.raises(PolestarError, match=r"previous must be the pair \(scores, normaliser"):
            OPS[op](previous=wrong)
    with pytest.raises(PolestarError, match="previous scores must be floats, got int32"):
        OPS[op](previous=(scores.astype(np.int32), normaliser))
    assert_equal(OPS[op](previous=(result.scores, result.normaliser)).drift, np.zeros((B, R)))


@pytest.mark.parametrize("op", ["drift_attention", "proxy_drift"])
@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "int32", "float64", "bad", None])
def test_scores_are_kept_in_types_that_hold_a_masked_key(op, dtype):
    with pytest.raises(PolestarError, match="scores_dtype must be one of float32, bfloat16, got"):
        OPS[op](scores_dtype=dtype)


@pytest.mark.parametrize("dtype", ["float64", "int8", "bad", None])
def test_rows_are_restored_in_types_that_the_kernel_writes(dtype):
    with pytest.raises(PolestarError, match="dtype must be one of float32, bfloat16, float16, got"):
        OPS["dequantise"](dtype=dtype)


def test_only_what_was_quantised_is_restored():
    stored = OPS["dequantise"].arguments["stored"]
    with pytest.raises(PolestarError, match="must be what quantise returned, got tuple"):
        OPS["dequantise"](stored=tuple(stored))
    signed = stored._replace(values=stored.values.astype(jnp.int8))
    with pytest.raises(PolestarError, match="values int8 and scales uint8 must be uint8"):
        OPS["dequantise"](stored=signed)


@pytest.mark.parametrize("op", ["drift_attention", "attend_rows"])
@pytest.mark.parametrize("theta", [0.0, -5.0, float("nan"), float("inf"), "x", None, True])
def test_the_base_of_rotary_frequencies_is_a_positive_number(op, theta):
    with pytest.raises(PolestarError, match="theta must be a positive number"):
        OPS[op](theta=theta)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("op", ["drift_attention", "attend_rows"])
def test_heads_that_can_not_be_rotated_are_refused(op, implementation):
    odd = {name: OPS[op].arguments[name][..., :15] for name in "qkv"}
    with pytest.raises(PolestarError, match="even head size, got 15"):
        OPS[op](**odd, implementation=implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("op", ["drift_attention", "proxy_drift", "attend_rows"])
def test_heads_keys_and_values_without_elements_are_refused(op, implementation):
    empty = {
        "H": {"q": np.zeros((B, R, 0, D), np.float32)},
        "D": {n: np.zeros((*OPS[op].arguments[n].shape[:3], 0), np.float32) for n in "qk"},
        "T": {"k": np.zeros((B, HK, 0, D), np.float32)},
    }
    for axis, changes in empty.items():
        if "v" in OPS[op].arguments and axis != "H":
            changes = changes | {"v": changes["k"]}
        if "previous" in OPS[op].arguments:
            changes = changes | {"previous": None}
        with pytest.raises(PolestarError, match=f"axis {axis} of . has no elements"):
            OPS[op](**changes, implementation=implementation)


def test_no_rows_or_no_clusters_are_nothing_to_do():
    none = OPS["attend_rows"](
        q=np.zeros((B, 0, H, D), np.float32), positions=np.zeros((B, 0), np.int32)
    )
    assert none.shape == (B, 0, H * D)
    stored = OPS["quantise"](
        centroids=np.zeros((B, 0, M), np.float32), labels=np.full((B, R), -1, np.int32)
    )
    assert np.isfinite(stored.tensor).all()
    for op in ("quantise", "attend_rows"):
        changes = {"centroids": np.zeros((B, 0, M), np.float32)} if op == "quantise" else {
            "q": np.zeros((B, 0, H, D), np.float32), "positions": np.zeros((B, 0), np.int32)
        }  # fmt: skip
        with pytest.raises(PolestarError, match="no kernel for arrays without elements"):
            OPS[op](**changes, implementation="interpret")


@pytest.mark.parametrize(
    "dtype", ["bool", "complex64", "int4", "float8_e4m3fn", "bfloat16", "int8"]
)
def test_rows_of_any_type_are_moved_and_for_cuda_what_the_kernel_can_not_by_the_reference(dtype):
    rng = np.random.default_rng(1)
    hidden = jnp.asarray(rng.integers(0, 2, (B, T, M))).astype(dtype)
    rows, count = OPS["gather_rows"].arguments["rows"], np.full(B, R, np.int32)
    taken = gather_rows(hidden, rows, count)
    want = np.take_along_axis(np.asarray(hidden), rows[..., None].astype(np.int64), axis=1)
    np.testing.assert_array_equal(taken, want)
    back = scatter_rows(jnp.zeros_like(hidden), taken, rows, count)
    again = gather_rows(back, rows, count)
    np.testing.assert_array_equal(again, want)
    with card_in_scope("A100"):
        traced = jax.jit(gather_rows).trace(hidden, jnp.asarray(rows), jnp.asarray(count))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("__gpu$xla.gpu.triton" in text) == (dtype in ("bfloat16", "int8"))
    if "__gpu$xla.gpu.triton" not in text:
        with pytest.raises(PolestarError, match=f"no kernel for rows of {dtype}"):
            gather_rows(hidden, rows, count, implementation="interpret")


def test_new_rows_of_another_kind_are_refused():
    with pytest.raises(PolestarError, match="new rows of complex64 do not go into float32"):
        OPS["scatter_rows"](new=OPS["scatter_rows"].arguments["new"].astype(np.complex64))
    half = OPS["scatter_rows"](new=OPS["scatter_rows"].arguments["new"].astype(np.float16))
    assert half.dtype == np.float32


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_float16_rows_that_round_beyond_its_range_become_its_largest_number(implementation):
    centroids, labels = np.full((1, 1, 16), 60000, np.float16), np.zeros((1, 2), np.int32)
    rows = np.stack([np.full(16, x, np.float16) for x in (1500, 65504)])[None]
    stored = quantise(rows, centroids, labels)
    restored = dequantise(stored, centroids, labels, dtype="float16", implementation=implementation)
    assert np.isfinite(np.asarray(restored)).all()
    assert (np.asarray(restored)[0, 1] == 65504).all()
    exact = dequantise(stored, centroids, labels, implementation=implementation)
    assert (np.asarray(exact)[0, 1] > 65504).all()


@pytest.mark.parametrize("op", OPS)
def test_with_64_bit_types_an_op_runs_or_says_why_not(op):
    plain = OPS[op]()
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        assert_equal(OPS[op](implementation="xla"), plain)
        with pytest.raises(PolestarError, match="jax_enable_x64 is on.*use None or 'xla'"):
            OPS[op](implementation="interpret")
