"""Compilation is told apart from computing."""

import time

import jax
import jax.numpy as jnp

from polestar_jax.cli.timing import measure


def test_the_first_call_counts_as_compiling_and_the_second_does_not():
    @jax.jit
    def power(x):
        for _ in range(60):
            x = jnp.sin(x @ x)
        return x

    x = jax.block_until_ready(jnp.ones((8, 8)))
    with measure() as first:
        jax.block_until_ready(power(x))
    with measure() as second:
        jax.block_until_ready(power(x))
    assert 0.2 * first.total < first.compiling < first.total  # the rest is tracing, not computing
    assert second.compiling == 0
    assert second.computing == second.total < first.total


def test_listening_ends_with_the_block():
    with measure() as watch:
        time.sleep(0.01)
    before = watch.compiling
    jax.jit(lambda x: x * 3 + 1)(jnp.ones(7))
    assert watch.compiling == before == 0
    assert watch.total >= 0.01
