"""Which implementation runs: a named one or an error, never another in its place."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polestar_jax.errors import PolestarError
from polestar_jax.kernels.aot import card_in_scope
from polestar_jax.kernels.dispatch import dispatch
from polestar_jax.kernels.sparse_refresh import gather_rows

HIDDEN = np.ones((1, 4, 16), np.float32)
ROWS, COUNT = np.zeros((1, 2), np.int32), np.full(1, 2, np.int32)


def reference(x):
    return x + 1


def kernel(x, *, interpret):
    return x + (10 if interpret else 20)


def run(implementation, unsupported=None):
    return dispatch(
        "an_op",
        implementation,
        jnp.zeros(()),
        reference=reference,
        kernel=kernel,
        unsupported=unsupported,
    )


def test_a_named_implementation_is_the_one_that_runs():
    assert run("xla") == 1
    assert run("interpret") == 10


def test_on_the_cpu_no_name_means_the_reference():
    assert run(None) == 1
    assert jax.jit(partial(run, None))() == 1


def test_the_kernel_is_refused_without_a_gpu_and_not_replaced():
    with pytest.raises(PolestarError, match="needs an NVIDIA GPU and the target here is 'cpu'"):
        run("pallas")


def test_unsupported_arguments_refuse_every_kernel_with_the_reason():
    assert run(None, unsupported="complex numbers") == 1
    for name in ("pallas", "interpret"):
        with pytest.raises(PolestarError, match="no kernel for complex numbers"):
            run(name, unsupported="complex numbers")


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(PolestarError, match="unknown implementation 'triton'.*xla"):
        run("triton")


def test_programs_for_the_cpu_hold_no_kernel():
    text = jax.jit(gather_rows).lower(HIDDEN, ROWS, COUNT).as_text()
    assert "triton" not in text
    assert "custom_call" not in text


def test_programs_lowered_for_cuda_hold_the_kernel():
    """Without the CUDA compiler: only the lowering, as JAX can do it on any machine."""
    with card_in_scope("A100"):
        traced = jax.jit(gather_rows).trace(HIDDEN, ROWS, COUNT)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "__gpu$xla.gpu.triton" in text


def test_interpreted_outputs_start_as_poison():
    """What the suites rely on when they take finite outputs as proof that all was written."""
    from jax.experimental import pallas as pl

    got = pl.pallas_call(
        lambda x, out: None,
        out_shape=jax.ShapeDtypeStruct((8,), jnp.float32),
        interpret=True,
    )(jnp.ones(8))
    assert np.isnan(got).all()
