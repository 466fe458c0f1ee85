"""Polestar against the oracle: random models, batches of unequal prompts, both families.

The oracle decodes each row alone and unpadded, so equality also shows that triggers, clusters,
histories and window bounds belong to each sequence of the batch.
"""

import dataclasses

import numpy as np
import pytest
from oracle.polestar import Pass, Polestar, Settings

import polestar_jax as pj
from decoding.helpers import model_pair, random_prompts, trace_rows

CASES = {
    "llada_defaults": ("llada", {}, {}, {}),
    "dream_reembedding_windows": (
        "dream",
        {"reembed_suffix_commits": True, "windowed_openings": (False, True)},
        {"threshold": 0.6, "early_threshold": 0.3},
        {},
    ),
    "llada_reembedding_always_windowed": (
        "llada",
        {"reembed_suffix_commits": True, "windowed_openings": (True,), "refresh_clusters_last": 3},
        {"threshold": 0.5, "early_threshold": 0.2},
        {},
    ),
    "dream_wide_window": (
        "dream",
        {"window_before": 1, "window_after": 2, "num_clusters": 5, "refresh_clusters": 2},
        {"threshold": 0.6, "early_threshold": 0.1, "gate_scale": 1.0, "history": 2},
        {},
    ),
    "dream_windows_without_prefix": (
        "dream",
        {"window_before": 0, "windowed_openings": (True,), "refresh_clusters_last": 9},
        {"threshold": 0.5, "early_threshold": None},
        {},
    ),
    "llada_no_suffix_window": (
        "llada",
        {"window_after": 0, "num_clusters": 2, "refresh_clusters": 1, "kmeans_iters": 1},
        {"threshold": 0.6, "early_threshold": 0.3, "suffix": False, "delta_max": 0.05},
        {},
    ),
    "llada_one_block": ("llada", {}, {}, {"block_length": 16}),
    "dream_more_clusters_than_rows": (
        "dream",
        {"num_clusters": 8, "trigger_last": 0},
        {"threshold": 0.5, "early_threshold": 0.2},
        {"block_length": 2, "gen_length": 8},
    ),
    "llada_only_cache": ("llada", {}, None, {}),
    "llada_blocks_of_two_all_clusters": (
        "llada",
        {"refresh_clusters": 8, "refresh_clusters_last": 8, "trigger_last": 0, "trigger_total": 0},
        {"threshold": 0.4, "early_threshold": 0.3},
        {"block_length": 2, "gen_length": 12},
    ),
}
FAST = ("llada_defaults", "dream_reembedding_windows", "llada_reembedding_always_windowed")


def make_config(case: str) -> pj.DecodeConfig:
    _, cache, commit, fields = CASES[case]
    base = {"num_clusters": 4, "refresh_clusters": 2}
    commit_defaults = {"threshold": 0.7, "early_threshold": 0.4}
    rule = (
        pj.ThresholdCommit(0.7)
        if commit is None
        else pj.PolestarCommit(**{**commit_defaults, **commit})
    )
    return pj.DecodeConfig(
        cache=pj.PolestarCache(**{**base, **cache}),
        commit=rule,
        **{"gen_length": 16, "block_length": 4, "prompt_bucket": 8, **fields},
    )


def oracle_settings(config: pj.DecodeConfig) -> Settings:
    cache, commit = config.cache, config.commit
    polestar = isinstance(commit, pj.PolestarCommit)
    return Settings(
        block_length=config.block_length,
        window_before=cache.window_before,
        window_after=cache.window_after,
        clusters=cache.num_clusters,
        refresh=cache.refresh_clusters,
        refresh_last=cache.refresh_clusters_last,
        kmeans_iters=cache.kmeans_iters,
        trigger_last=cache.trigger_last,
        trigger_total=cache.trigger_total,
        windowed=cache.windowed_openings,
        reembed=cache.reembed_suffix_commits,
        tau=commit.threshold,
        early=commit.early_threshold if polestar else None,
        scale=commit.gate_scale if polestar else 0.0,
        centre=commit.gate_centre if polestar else None,
        delta_max=commit.delta_max if polestar else 0.0,
        history=commit.history if polestar else 1,
        suffix=polestar and commit.suffix,
        shift=config.dream_shift,
        stop_at_eos=config.stop_at_eos,
    )


def assert_same_passes(
    result: pj.DecodeResult, row: int, expected: list[Pass], prompt: int, suffix: bool
) -> None:
    """Tokens, kinds, causes, selections and numbers of every pass; prompts in a bucket of 8.

    Without the suffix rule nobody reads the last layer's refreshed rows, and none are run.
    """
    passes = trace_rows(result.trace, row)
    details = result.trace.details
    active = np.asarray(result.trace.active)[:, row]
    refreshed = np.asarray(details.refreshed)[active, row, :, 8 - prompt :]
    layers = refreshed.shape[1] if suffix else refreshed.shape[1] - 1
    scores = np.asarray(details.drift)[active, row]
    assert len(passes["tokens"]) == len(expected)
    cause = np.zeros(passes["cause"].shape[1], int)
    for i, p in enumerate(expected):
        where = f"pass {i}"
        np.testing.assert_array_equal(passes["tokens"][i], p.tokens[prompt:], err_msg=where)
        assert passes["kind"][i] == p.kind, where
        np.testing.assert_array_equal(passes["masked"][i], p.mask_before, err_msg=where)
        ours = np.where(p.mask_before, passes["confidence"][i], np.nan)
        np.testing.assert_allclose(ours, p.confidence, atol=2e-4, err_msg=where)
        rows = slice(p.block[0] - prompt, p.block[1] - prompt)
        cause[rows] += p.commit_conf + 2 * p.commit_drift
        cause += 3 * p.commit_suffix[prompt:]
        early = passes["cause"][i] != 4  # positions behind a final EOS have that cause
        np.testing.assert_array_equal(passes["cause"][i][early], cause[early], err_msg=where)
        np.testing.assert_array_equal(refreshed[i, :layers], p.selected[:layers], err_msg=where)
        for layer, score in enumerate(p.scores):
            np.testing.assert_allclose(
                scores[i, layer][~np.isnan(scores[i, layer])], score, atol=2e-4, err_msg=where
            )
        if p.kind >= 2 and not np.isnan(passes["delta"][i]).all():
            np.testing.assert_allclose(passes["drift"][i], p.drift, atol=5e-4, err_msg=where)
            np.testing.assert_allclose(passes["delta"][i], p.delta, atol=5e-4, err_msg=where)


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in FAST else pytest.mark.slow) for c in CASES]
)
def test_each_row_equals_the_oracle_in_every_pass(case):
    config, family = make_config(case), CASES[case][0]
    settings = oracle_settings(config)
    kinds, causes = set(), set()
    for seed in range(10):
        model, net = model_pair(family, seed)
        lengths = np.random.default_rng(seed).integers(1, 9, 3).tolist()
        prompts = random_prompts(seed, lengths)
        result = pj.decode(model, prompts, config, trace=True)
        for row, prompt in enumerate(prompts):
            expected = Polestar(net, prompt, config.gen_length, settings).run()
            assert_same_passes(result, row, expected, len(prompt), settings.suffix)
            kinds |= {p.kind for p in expected}
        causes |= set(result.cause.ravel().tolist())
    assert_exercised(config, kinds, causes)


def assert_exercised(config: pj.DecodeConfig, kinds: set[int], causes: set[int]) -> None:
    """The seeds reach every kind of pass and every cause that the configuration allows."""
    windowed = any(config.cache.windowed_openings[:4]) and config.num_blocks > 1
    assert {0, 3} <= kinds
    assert (1 in kinds) == windowed
    if isinstance(config.commit, pj.PolestarCommit):
        assert (3 in causes) == (config.commit.suffix and config.num_blocks > 1)
        if config.commit.early_threshold is None:
            assert 2 not in causes


def test_empty_prompt_and_whole_window_equal_the_oracle_on_the_same_tokens():
    """P = 0: no prefix part at the first block. All masks tie, so only numbers are compared."""
    config = dataclasses.replace(make_config("llada_defaults"), allow_empty_prompt=True)
    settings = dataclasses.replace(oracle_settings(config), stop_at_eos=False)
    config = dataclasses.replace(config, stop_at_eos=False)
    model, net = model_pair("llada", 1)
    result = pj.decode(model, random_prompts(1, [0, 8, 3]), config, trace=True)
    passes = trace_rows(result.trace, 0)
    run = Polestar(net, np.zeros(0, int), 16, settings)
    run.force_tokens = lambda i: passes["tokens"][i]
    expected = run.run()
    assert len(expected) == len(passes["tokens"])
    for i, p in enumerate(expected):
        ours = np.where(p.mask_before, passes["confidence"][i], np.nan)
        np.testing.assert_allclose(ours, p.confidence, atol=2e-4)
    assert (result.tokens != 38).all()
