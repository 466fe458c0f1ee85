"""The library against the oracle: random models, batches of unequal prompts, every policy.

A batch equal to the oracle's rows, each decoded alone and unpadded, shows at once that a row does
not depend on its neighbours nor on its left pads. One compiled program serves all seeds.
"""

import dataclasses

import numpy as np
import pytest

import polestar_jax as pj
from decoding.helpers import (
    assert_equals_oracle,
    model_pair,
    oracle_decode,
    random_prompts,
    trace_rows,
)

CACHES = {"none": pj.NoCache(), "prefix": pj.PrefixCache(), "dual": pj.DualCache()}
COMMITS = {
    "threshold": pj.ThresholdCommit(0.7),
    "budget": pj.ThresholdCommit(0.5, steps=8),
    "factor": pj.FactorCommit(1.0),
    "factor_edge": pj.FactorCommit(0.5, fast_dllm_edge=True),
    "fixed": pj.FixedCommit(8),
    "margin": pj.FixedCommit(None, "margin"),
    "entropy_dream": pj.FixedCommit(16, "entropy", "dream"),
}
FAST = {
    ("llada", "none", "threshold"), ("llada", "prefix", "factor"), ("llada", "dual", "margin"),
    ("dream", "none", "entropy_dream"), ("dream", "prefix", "budget"),
    ("dream", "dual", "threshold"),
}  # fmt: skip
SEEDS = range(12)


def combinations() -> list:
    """Every family, cache and commit policy; a covering choice in the fast stage."""
    return [
        pytest.param(*names, marks=[] if names in FAST else pytest.mark.slow)
        for family in ("llada", "dream")
        for names in [(family, cache, commit) for cache in CACHES for commit in COMMITS]
    ]


def make_config(cache: str, commit: str, **fields) -> pj.DecodeConfig:
    return pj.DecodeConfig(
        gen_length=16, block_length=4, cache=CACHES[cache], commit=COMMITS[commit],
        prompt_bucket=8, allow_empty_prompt=True, **fields,
    )  # fmt: skip


@pytest.mark.parametrize(("family", "cache", "commit"), combinations())
def test_each_row_of_a_batch_equals_the_oracle_alone_after_every_pass(family, cache, commit):
    config = make_config(cache, commit)
    stopped = 0
    for seed in SEEDS:
        model, net = model_pair(family, seed)
        lengths = np.random.default_rng(seed).integers(1, 9, 3).tolist()
        prompts = random_prompts(seed, lengths)
        result = pj.decode(model, prompts, config, trace=True)
        for row, prompt in enumerate(prompts):
            expected = oracle_decode(net, prompt, config)
            passes = trace_rows(result.trace, row)
            assert_equals_oracle(passes, expected, len(prompt), config.block_length)
            np.testing.assert_array_equal(result.tokens[row], expected[-1].tokens[len(prompt) :])
            assert result.nfe[row] == len(expected)
        stopped += int(result.stats.commits["eos"].sum() > 0)
    assert stopped > 0, "no seed stopped at an EOS: the comparison left that rule out"


@pytest.mark.parametrize("family", [pytest.param("llada", marks=pytest.mark.slow), "dream"])
def test_number_of_left_pads_does_not_matter(family):
    """Prompts that fill their bucket, and the same with 24 pads, give the same passes."""
    model, _ = model_pair(family, 3)
    prompts = random_prompts(5, [8, 8, 8])
    config = make_config("dual", "threshold")
    padded = dataclasses.replace(config, prompt_bucket=32)
    a, b = (pj.decode(model, prompts, c, trace=True) for c in (config, padded))
    np.testing.assert_array_equal(a.trace.tokens, b.trace.tokens)
    np.testing.assert_array_equal(a.nfe, b.nfe)


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_empty_prompt_gives_the_oracle_confidences_on_the_same_tokens(family):
    """Without a prompt all masks tie, so the tokens chosen are fed to the oracle as they are."""
    config = make_config("dual", "threshold")
    for seed in range(4):
        model, net = model_pair(family, seed)
        result = pj.decode(model, random_prompts(seed, [0, 5, 8]), config, trace=True)
        passes = trace_rows(result.trace, 0)
        expected = oracle_decode(net, np.zeros(0, int), config, teacher=list(passes["tokens"]))
        assert_equals_oracle(passes, expected, 0, config.block_length)
