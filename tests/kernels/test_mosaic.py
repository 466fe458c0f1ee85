"""The Hopper body of drift attention in Mosaic's interpreter, with race detection."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polestar_jax.errors import PolestarError
from polestar_jax.kernels import aot
from polestar_jax.kernels.drift_attention import drift_attention
from polestar_jax.kernels.shapes import AttentionShape
from tests.kernels import oracle
from tests.kernels.common import (
    THETA,
    attention_inputs,
    before,
    clean,
    close,
    drift_tolerance,
    score_tolerance,
)

SHAPES = {
    "one-tile": AttentionShape(1, 7, 1, 1, 128, 64),
    "grouped": AttentionShape(2, 33, 4, 2, 128, 320),  # two tiles of rows, tiles of pads
    "split": AttentionShape(1, 32, 1, 1, 128, 1280),
}


@pytest.mark.newest_jax
@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_outputs_match_the_oracle_without_a_race(name):
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    shape = SHAPES[name]
    q, k, v, positions, pad, rng = attention_inputs(shape, "bfloat16")
    k = np.where(np.isnan(k), 0, k).astype(k.dtype)
    old, previous = before(q, k, pad, rng, positions, THETA)
    run = partial(drift_attention, theta=THETA, implementation="mosaic-interpret")
    got = jax.block_until_ready(run(q, k, v, positions, pad, previous))
    assert not gpu_callbacks.get_races().races_found
    want = oracle.scores(q, k, pad, positions, THETA)
    p, normaliser = oracle.softmax(want)
    out = oracle.attended(p, clean(v))
    allowed = score_tolerance("bfloat16", shape.head_dim, shape.length)
    close(got.scores, want, allowed, "scores")
    close(got.normaliser, normaliser, allowed, "normaliser")
    close(got.attended, out, allowed * np.abs(out).max(), "attended")
    drift = oracle.token_drift(want, old)
    close(got.drift, drift, drift_tolerance(drift, allowed), "drift")
    first = run(q, k, v, positions, pad)
    assert first.drift is None
    np.testing.assert_array_equal(first.scores, got.scores)


def test_what_mosaic_can_not_take_is_refused_with_the_reason():
    q = jnp.zeros((1, 4, 2, 64), jnp.bfloat16)
    k = jnp.zeros((1, 1, 64, 64), jnp.bfloat16)
    args = (q, k, k, jnp.zeros((1, 4), jnp.int32), jnp.zeros(1, jnp.int32))
    old = jax.__version_info__ < (0, 12)
    match = "needs JAX 0.12" if old else "can not take head size 64"
    with pytest.raises(PolestarError, match=match):
        drift_attention(*args, theta=THETA, implementation="mosaic-interpret")
    with pytest.raises(PolestarError, match="needs an NVIDIA GPU"):
        drift_attention(*args, theta=THETA, implementation="mosaic")


@pytest.mark.slow
@pytest.mark.gpu_compiler
def test_it_compiles_for_hopper():
    from polestar_jax.kernels.cases import cases

    case = next(c for c in cases() if c.name == "drift_attention/llada-8b/bfloat16")
    program = aot.compile_for(partial(case.run, implementation="mosaic"), case.args, "H200")
    assert program.custom_calls.get("mosaic_gpu_v2") == 1
    assert "__gpu$xla.gpu.triton" not in program.custom_calls
