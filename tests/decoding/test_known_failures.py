"""Faults that users met in other diffusion-LLM projects, each as the behaviour that is right.

Batch neighbours, left pads, endless loops, left-over masks and seeds are in `test_equals_oracle`
and `test_invariances`; checkpoint variants in `tests/convert`.
"""

import dataclasses

import jax
import numpy as np
import pytest

import polestar_jax as pj
from decoding.helpers import (
    EOS,
    MASK,
    assert_equals_oracle,
    model_pair,
    oracle_decode,
    random_prompts,
    small_config,
    small_model,
    trace_rows,
    twin,
)
from polestar_jax.models.transformer import params_to_flat

SMALL = {"gen_length": 16, "block_length": 4, "prompt_bucket": 8}
DUAL = pj.DecodeConfig(cache=pj.DualCache(), commit=pj.ThresholdCommit(0.7), **SMALL)


def prompts_of(seed: int) -> list[np.ndarray]:
    return random_prompts(seed, [3, 8, 1])


def test_rows_that_finish_early_stay_as_they_are_and_do_not_stop_the_others():
    unequal = 0
    for seed in range(6):
        result = pj.decode(model_pair("llada", seed)[0], prompts_of(seed), DUAL, trace=True)
        active, tokens = np.asarray(result.trace.active), np.asarray(result.trace.tokens)
        last = [np.flatnonzero(active[:, row])[-1] for row in range(3)]
        unequal += len(set(last)) > 1
        for row in range(3):
            after = tokens[last[row] : max(last) + 1, row]
            assert (after == result.tokens[row]).all()
        assert (result.tokens != MASK).all()
    assert unequal > 0


def loves(token: int, boost: float) -> pj.Model:
    """A model that puts `token` first almost everywhere; 37 is its end of turn."""
    rng = np.random.default_rng(0)
    head = rng.normal(size=(16, 48))
    head[:, token] = boost
    config = small_config("llada", eot_token=37)
    return small_model(config, 0, head=head, embed=1 + rng.normal(size=(48, 16)))


def test_short_answer_on_a_long_canvas_stops_without_visiting_its_blocks():
    model, prompts = loves(EOS, 2.0), prompts_of(1)
    on, off = (
        pj.decode(model, prompts, dataclasses.replace(DUAL, stop_at_eos=stop), trace=True)
        for stop in (True, False)
    )
    assert (on.nfe < 4).all()
    assert (off.nfe >= 4).all()  # every block costs a pass
    for row in range(3):
        end = list(on.tokens[row]).index(EOS)
        np.testing.assert_array_equal(on.tokens[row, : end + 1], off.tokens[row, : end + 1])


@pytest.mark.parametrize(("token", "option"), [(EOS, "suppress_eos"), (37, "suppress_eot")])
def test_suppressed_end_tokens_are_committed_only_when_nothing_else_is_left(token, option):
    """In each pass, the row committed is one that predicts something else, if there is one."""
    config = dataclasses.replace(DUAL, **{option: True, "stop_at_eos": False})
    result = pj.decode(loves(token, 1.2), prompts_of(1), config, trace=True)
    decided = 0
    for row in range(3):
        passes = trace_rows(result.trace, row)
        canvas = np.concatenate([np.full((1, 16), MASK), passes["tokens"]])
        for i, block in enumerate(passes["block"]):
            rows = slice(4 * block, 4 * block + 4)
            new = (canvas[i, rows] == MASK) & (canvas[i + 1, rows] != MASK)
            ends = passes["prediction"][i] == token
            others = passes["masked"][i] & ~ends
            if others.any():
                assert not (new & ends).any()
                decided += (passes["masked"][i] & ends).any()
            else:
                assert new.sum() == 1
    assert decided > 0


def test_confidence_is_taken_in_float32_from_half_precision_models():
    model = small_model(small_config("llada"), 3, dtype="bfloat16")
    prompt = random_prompts(3, [8])
    config = pj.DecodeConfig(cache=pj.NoCache(), commit=pj.ThresholdCommit(0.7), **SMALL)
    result = pj.decode(model, prompt, config, trace=True)
    passes = trace_rows(result.trace, 0)
    logits = model.logits(np.concatenate([prompt[0], np.full(16, MASK)])[None])
    assert logits.dtype == np.float32
    wide = np.array(logits, np.float64)[0, 8:12, :40]
    wide[:, MASK] = -np.inf
    p = np.exp(wide - wide.max(-1, keepdims=True))
    np.testing.assert_allclose(
        passes["confidence"][0], p.max(-1) / p.sum(-1), rtol=1e-5
    )  # a bfloat16 confidence would be off by 4e-3


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_half_precision_decodes_to_the_end_without_nan(dtype):
    model = small_model(small_config("llada"), 3, dtype=dtype)
    result = pj.decode(model, prompts_of(3), DUAL, trace=True)
    assert (result.tokens != MASK).all()
    for row in range(3):
        assert np.isfinite(trace_rows(result.trace, row)["confidence"]).all()


def test_dream_reads_the_prediction_of_a_position_one_row_before():
    model, prompts = model_pair("dream", 5)[0], random_prompts(5, [8, 8, 8])
    result = pj.decode(model, prompts, DUAL, trace=True)
    tokens = np.concatenate([prompts[0], np.full(16, MASK)])[None]
    logits = np.array(model.logits(tokens))[0, 7:11, :40]
    logits[:, MASK] = -np.inf
    first = trace_rows(result.trace, 0)["prediction"][0]
    np.testing.assert_array_equal(first, logits.argmax(-1))


def test_steps_beside_a_threshold_have_a_rule_and_elsewhere_are_refused():
    """With a threshold, steps bound the commits: G / steps plus what earlier passes left."""
    config = pj.preset("parallel", threshold=0.0, steps=8, stop_at_eos=False, **SMALL)
    result = pj.decode(model_pair("llada", 0)[0], prompts_of(0), config)
    np.testing.assert_array_equal(result.nfe, [8] * 3)
    with pytest.raises(pj.PolestarError, match="steps"):
        pj.preset("fast-dllm-factor", steps=8)


@pytest.mark.parametrize(
    "cache",
    [
        pytest.param(pj.PrefixCache(), marks=pytest.mark.slow),
        pj.DualCache(),
        pytest.param(pj.PolestarCache(num_clusters=3), marks=pytest.mark.slow),
    ],
    ids=["prefix", "dual", "polestar"],
)
def test_cache_on_and_off_run_under_the_same_commit_schedule(cache):
    """The commit policy alone decides how many tokens each pass commits, whatever the cache."""
    prompts, model = prompts_of(0), model_pair("llada", 0)[0]
    config = pj.DecodeConfig(
        cache=cache, commit=pj.FixedCommit(8, "margin"), stop_at_eos=False, **SMALL
    )
    result = pj.decode(model, prompts, config)
    np.testing.assert_array_equal(result.nfe, [8] * 3)
    for row in range(3):
        np.testing.assert_array_equal(np.bincount(result.commit_pass[row]), [2] * 8)
        blocks = result.commit_pass[row].reshape(4, 4) // 2
        np.testing.assert_array_equal(blocks, np.repeat(np.arange(4), 4).reshape(4, 4))


def test_a_cached_run_leaves_nothing_behind_in_the_model():
    model, prompts = model_pair("llada", 0)[0], prompts_of(0)
    plain = pj.DecodeConfig(cache=pj.NoCache(), commit=pj.ThresholdCommit(0.7), **SMALL)
    weights = {k: np.array(v) for k, v in params_to_flat(model.params).items()}
    before = pj.decode(model, prompts, plain)
    pj.decode(model, prompts, DUAL, trace=True)
    after = pj.decode(model, prompts, plain)
    np.testing.assert_array_equal(before.tokens, after.tokens)
    np.testing.assert_array_equal(before.nfe, after.nfe)
    for name, value in params_to_flat(model.params).items():
        np.testing.assert_array_equal(np.asarray(value), weights[name])


def test_keys_and_values_of_a_finished_block_are_renewed_with_its_final_tokens():
    """After the second block's opening the cache is that of a full pass, the first block's too."""
    (model, net), prompt = model_pair("llada", 2), random_prompts(2, [8])
    config = dataclasses.replace(DUAL, stop_at_eos=False)
    state = pj.init_state(model, prompt, config)
    while int(state.block) == 0:
        before = np.asarray(state.tokens[0])
        state = pj.decode_step(model, state, config)
    assert (before[8:12] != MASK).all()
    assert (before[12:] == MASK).all()
    truth = net.empty_cache(24)
    net.forward(before, np.arange(24), truth)
    for layer, cache in enumerate(state.cache):
        np.testing.assert_allclose(cache.v[0].swapaxes(0, 1), truth.v[layer], atol=1e-4)
        rotated = net.rotate(truth.k[layer], np.arange(24))
        np.testing.assert_allclose(cache.k[0].swapaxes(0, 1), rotated, atol=1e-4)


def test_throughput_counts_tokens_before_the_first_eos_and_no_prompt():
    """Even where decoding goes on behind it: what follows is not part of the answer."""
    config = dataclasses.replace(DUAL, stop_at_eos=False)
    result = pj.decode(loves(EOS, 1.4), prompts_of(1), config)
    real = np.array([row.index(EOS) for row in result.tokens.tolist()])
    assert ((result.tokens != EOS).sum(axis=1) > real).any()
    np.testing.assert_array_equal(result.stats.generated, real)
    np.testing.assert_allclose(result.stats.tokens_per_forward, real / result.nfe)


def test_tied_head_and_one_key_value_head_per_query_head_equal_the_oracle():
    config = small_config("llada", tied_head=True, num_kv_heads=4)
    for seed in range(3):
        model = small_model(config, seed)
        prompts = prompts_of(seed)
        result = pj.decode(model, prompts, DUAL, trace=True)
        for row, prompt in enumerate(prompts):
            expected = oracle_decode(twin(model), prompt, DUAL)
            assert_equals_oracle(trace_rows(result.trace, row), expected, len(prompt), 4)


BAD_PROMPTS = {
    "empty_batch": ([], "no prompts"),
    "empty_prompt": ([[]], "empty"),
    "longer_than_the_model": ([[1] * 49], "exceeds"),
    "mask_token_inside": ([[1, MASK, 2]], "mask token"),
    "token_out_of_vocabulary": ([[1, 40]], "outside the vocabulary"),
    "negative_token": ([[-1]], "outside the vocabulary"),
    "fractional_tokens": ([[1.5, 2.0]], "whole-number"),
    "nested_lists": ([[[1, 2]]], "flat list"),
    "lists_of_unequal_depth": ([[1, [2, 3]]], "flat list"),
    "number_for_prompts": (7, "must be a string"),
    "bytes_for_a_prompt": ([b"abc"], "must be a string or a list of token ids"),
    "none_for_a_prompt": ([None], "must be a string or a list of token ids"),
    "text_without_tokenizer": ("hello", "no tokenizer"),
    "flat_array": (np.arange(4), r"\[batch, length\]"),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_prompt_that_cannot_work_is_refused_in_one_sentence(case):
    prompts, words = BAD_PROMPTS[case]
    with pytest.raises(pj.PolestarError, match=words) as error:
        pj.decode(model_pair("llada", 0)[0], prompts, DUAL)
    assert "\n" not in str(error.value)


BAD_SETTINGS = {
    "gen_length": (10, "multiple of block_length"), "block_length": (0, "block_length"),
    "temperature": (float("nan"), "temperature"), "remasking": ("best", "remasking"),
    "cache": ("dual", "cache"), "commit": (0.9, "commit"), "stop_at_eos": (1, "stop_at_eos"),
    "threshold": (float("inf"), "threshold"), "treshold": (0.9, "treshold"),
    "prompt_bucket": (0, "prompt_bucket"), "dream_shift": ("none", "dream_shift"),
}  # fmt: skip


@pytest.mark.parametrize("field", BAD_SETTINGS)
def test_setting_that_cannot_work_is_refused_by_name(field):
    value, words = BAD_SETTINGS[field]
    with pytest.raises(pj.PolestarError, match=words):
        pj.preset("fast-dllm-dual", **{"gen_length": 16, "block_length": 4, field: value})
    with pytest.raises(pj.PolestarError, match="unknown preset"):
        pj.preset("fast-dllm-duel")


def test_randomness_without_a_key_is_refused():
    config = dataclasses.replace(DUAL, temperature=0.5)
    with pytest.raises(pj.PolestarError, match="key"):
        pj.decode(model_pair("llada", 0)[0], prompts_of(0), config)
    with pytest.raises(pj.PolestarError, match="2"):
        pj.decode(
            model_pair("llada", 0)[0], prompts_of(0), config, jax.random.split(jax.random.key(0))
        )


def test_argument_of_the_wrong_kind_is_refused_in_one_sentence():
    model = model_pair("llada", 0)[0]
    with pytest.raises(pj.PolestarError, match=r"preset\('polestar'\), got 'polestar'"):
        pj.decode(model, prompts_of(0), "polestar")
    random = dataclasses.replace(DUAL, temperature=0.5)
    with pytest.raises(pj.PolestarError, match=r"jax.random.key\(seed\), got 0"):
        pj.decode(model, prompts_of(0), random, key=0)
    huge = dataclasses.replace(DUAL, prompt_bucket=10**8)
    with pytest.raises(pj.PolestarError, match="prompt_bucket 100000000 exceeds"):
        pj.decode(model, prompts_of(0), huge)
