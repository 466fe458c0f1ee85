"""How often decoding compiles: once per bucket, never per prompt length, seed or weight."""

import dataclasses

import jax
import numpy as np
import pytest

import polestar_jax as pj
from decoding.helpers import random_prompts, small_config, small_model
from polestar_jax.decoding.decode import decode_program, step_program

CONFIG = pj.DecodeConfig(
    gen_length=8, block_length=8, cache=pj.NoCache(), commit=pj.ThresholdCommit(0.7)
)


@pytest.fixture(scope="module")
def model() -> pj.Model:
    return small_model(small_config("llada", max_length=512, num_layers=1), 0)


def compiled(program) -> int:
    return program._cache_size()


def test_ten_prompts_of_ten_lengths_compile_at_most_three_programs(model):
    before = compiled(decode_program)
    for length in (1, 9, 17, 33, 60, 64, 65, 100, 150, 250):
        pj.decode(model, random_prompts(length, [length]), CONFIG)
    assert 1 <= compiled(decode_program) - before <= 3


def test_other_prompts_and_weights_of_the_same_shape_compile_nothing(model):
    pj.decode(model, random_prompts(0, [5, 7]), CONFIG)
    before = compiled(decode_program)
    other = small_model(model.config, 1)
    for seed in range(3):
        pj.decode(other, random_prompts(seed, [seed + 1, 64]), CONFIG)
    equal = pj.DecodeConfig(
        gen_length=8, block_length=8, cache=pj.NoCache(), commit=pj.ThresholdCommit(0.7)
    )
    pj.decode(other, random_prompts(0, [5, 7]), equal)
    assert compiled(decode_program) == before


def test_seeds_compile_nothing(model):
    config = dataclasses.replace(CONFIG, temperature=1.0)
    pj.decode(model, random_prompts(0, [5]), config, jax.random.key(0))
    before = compiled(decode_program)
    texts = {
        pj.decode(model, random_prompts(0, [5]), config, jax.random.key(s)).tokens.tobytes()
        for s in range(1, 4)
    }
    assert compiled(decode_program) == before
    assert len(texts) > 1


def test_all_passes_of_all_blocks_are_one_step_program(model):
    config = dataclasses.replace(CONFIG, block_length=2, stop_at_eos=False, cache=pj.DualCache())
    state = pj.init_state(model, random_prompts(0, [5]), config)
    before = compiled(step_program)
    passes = 0
    while not pj.is_done(state, model):
        state = pj.decode_step(model, state, config)
        passes += 1
    assert passes >= 4
    assert compiled(step_program) - before == 1


def test_a_pass_leaves_the_state_it_was_given_untouched(model):
    config = dataclasses.replace(CONFIG, block_length=2, stop_at_eos=False, cache=pj.DualCache())
    state = pj.init_state(model, random_prompts(0, [5]), config)
    before = jax.tree.map(np.array, jax.tree.leaves(dataclasses.replace(state, keys=None)))
    pj.decode_step(model, state, config)
    after = jax.tree.leaves(dataclasses.replace(state, keys=None))
    for a, b in zip(before, after):
        np.testing.assert_array_equal(a, b)
