"""Where rows are kept changes nothing: host equals device bit for bit, in every dtype kept."""

import functools

import jax
import numpy as np
import pytest
from decoding.helpers import model_pair, random_prompts

import polestar_jax as pj
from polestar_jax.decoding.decode import decode_program

LENGTHS = [3, 8, 1]
HIDDEN, KEYS = {"hidden_store": "host"}, {"kv_store": "host"}
BOTH, FOUR_BITS = HIDDEN | KEYS, {"hidden_dtype": "nvfp4"}
AGAIN = {"reembed_suffix_commits": True}  # layer 0 gets packets too


def make_config(**stores) -> pj.DecodeConfig:
    # One compiled row count; every kind of pass occurs.
    cache = pj.PolestarCache(num_clusters=3, capacities=(1000,), **stores)
    commit = pj.PolestarCommit(0.7, 0.4)
    return pj.DecodeConfig(
        gen_length=16, block_length=4, prompt_bucket=8, cache=cache, commit=commit
    )


def final_state(family: str, seed: int, rows: int, **stores):
    """The state after the whole generation, its trace of all passes included."""
    model, config = model_pair(family, seed)[0], make_config(**stores)
    state = pj.init_state(model, random_prompts(seed, LENGTHS[:rows]), config, trace=True)
    return decode_program(model.params, state, model=model.config, config=config)


def rows_kept(state) -> list[np.ndarray]:
    """All arrays of a state but the caches' own, in one order wherever they lie."""
    hidden = [store.data for store in state.cache.hidden]
    others = (state.tokens, state.nfe, state.cause, state.commit_pass, state.kinds, state.trace)
    return [np.asarray(x) for x in (*jax.tree.leaves((others, state.cache.clusters)), *hidden)]


def caches(state) -> list[np.ndarray]:
    """Keys and values of every layer, [S, B, Hk, T, D]."""
    return [
        np.asarray(x.stacked if hasattr(x, "stacked") else np.stack([x.k, x.v, x.raw]))
        for x in state.cache.layers
    ]


def assert_same(a, b) -> None:
    for x, y in zip(rows_kept(a) + caches(a), rows_kept(b) + caches(b), strict=True):
        np.testing.assert_array_equal(x, y)


@functools.cache
def reference(family: str, seed: int, rows: int, common: tuple):
    """With all rows on the device."""
    return final_state(family, seed, rows, **dict(common))


slow = pytest.mark.slow
CASES = [
    pytest.param("llada", 3, {}, BOTH, id="llada-batch-all"),
    pytest.param("llada", 3, FOUR_BITS, BOTH, id="llada-batch-nvfp4"),
    pytest.param("llada", 3, {}, HIDDEN, id="llada-batch-hidden", marks=slow),
    pytest.param("llada", 3, {}, KEYS, id="llada-batch-keys", marks=slow),
    pytest.param("llada", 1, {}, BOTH, id="llada-alone-all", marks=slow),
    pytest.param("llada", 1, FOUR_BITS, HIDDEN, id="llada-alone-nvfp4", marks=slow),
    pytest.param("llada", 3, FOUR_BITS | AGAIN, BOTH, id="llada-batch-again", marks=slow),
    pytest.param("dream", 3, {}, BOTH, id="dream-batch-all", marks=slow),
    pytest.param("dream", 1, FOUR_BITS, BOTH, id="dream-alone-nvfp4", marks=slow),
    pytest.param("dream", 3, FOUR_BITS, HIDDEN, id="dream-batch-nvfp4", marks=slow),
    pytest.param("dream", 1, {}, BOTH, id="dream-alone-all", marks=slow),
]


@pytest.mark.parametrize(("family", "rows", "common", "stores"), CASES)
def test_host_equals_device_bit_for_bit(family, rows, common, stores):
    """Tokens, every pass's trace, clusters, keys, values and stored rows, on several models."""
    kinds = 0
    for seed in range(4):
        expected = reference(family, seed, rows, tuple(common.items()))
        away = final_state(family, seed, rows, **stores, **common)
        assert_same(expected, away)
        kinds += np.asarray(away.kinds).sum(0)
        for store in away.cache.hidden:
            kind = "pinned_host" if "hidden_store" in stores else "device"
            assert store.data.sharding.memory_kind == kind
        for cache in away.cache.layers:
            assert hasattr(cache, "stacked") == ("kv_store" in stores)
            if "kv_store" in stores:
                assert cache.stacked.sharding.memory_kind == "pinned_host"
    assert (kinds > 0).all()  # full, windowed, cached and refresh passes all occurred


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("stores", [BOTH, HIDDEN | FOUR_BITS], ids=["all", "nvfp4"])
def test_stepwise_equals_fused_with_rows_on_the_host(family, stores):
    model, config = model_pair(family, 1)[0], make_config(**stores)
    prompts = random_prompts(1, LENGTHS)
    fused = pj.decode(model, prompts, config, trace=True)
    state, canvas = pj.init_state(model, prompts, config), []
    while not pj.is_done(state, model):
        state = pj.decode_step(model, state, config)
        canvas.append(np.asarray(state.tokens[:, 8:]))
    np.testing.assert_array_equal(canvas, fused.trace.tokens[: len(canvas)])
    np.testing.assert_array_equal(state.tokens[:, 8:], fused.tokens)
    np.testing.assert_array_equal(state.nfe, fused.nfe)
    np.testing.assert_array_equal(state.cause, fused.cause)


@pytest.mark.slow
def test_a_sequence_stored_in_four_bits_decodes_in_a_batch_as_if_alone():
    config, model = make_config(**HIDDEN, **FOUR_BITS), model_pair("llada", 1)[0]
    prompts = random_prompts(1, LENGTHS)
    together = pj.decode(model, prompts, config)
    for row, prompt in enumerate(prompts):
        alone = pj.decode(model, [prompt], config)
        np.testing.assert_array_equal(together.tokens[row], alone.tokens[0])
        assert together.nfe[row] == alone.nfe[0]
