"""What holds for every decoding: fused = stepwise, sampling, EOS, guaranteed progress."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import polestar_jax as pj
from decoding.helpers import (
    EOS,
    MASK,
    model_pair,
    random_prompts,
    small_config,
    small_model,
    trace_rows,
)

POLICIES = {
    "plain_fixed": (pj.NoCache(), pj.FixedCommit(8)),
    "prefix_factor": (pj.PrefixCache(), pj.FactorCommit(1.0)),
    "dual_threshold": (pj.DualCache(), pj.ThresholdCommit(0.7)),
    "polestar": (pj.PolestarCache(num_clusters=3), pj.PolestarCommit(0.7, 0.4)),
}


def make_config(policy: str, **fields) -> pj.DecodeConfig:
    cache, commit = POLICIES[policy]
    base = {"gen_length": 16, "block_length": 4, "prompt_bucket": 8}
    return pj.DecodeConfig(cache=cache, commit=commit, **{**base, **fields})


def small_batch(seed: int) -> list[np.ndarray]:
    return random_prompts(seed, [3, 8, 1])


@functools.cache
def reference(policy: str, seed: int, family: str = "llada") -> pj.DecodeResult:
    return pj.decode(
        model_pair(family, seed)[0], small_batch(seed), make_config(policy), trace=True
    )


def keys_of(seed: int) -> jax.Array:
    return jax.random.split(jax.random.key(seed), 3)


@pytest.mark.parametrize("policy", POLICIES)
def test_stepwise_equals_fused(policy):
    """`decode_step` in a Python loop: the same tokens after every pass, NFE, causes, statistics."""
    config = make_config(policy)
    for seed in range(3):
        model, fused = model_pair("llada", seed)[0], reference(policy, seed)
        state = pj.init_state(model, small_batch(seed), config)
        canvas = []
        while not pj.is_done(state, model):
            state = pj.decode_step(model, state, config)
            canvas.append(np.asarray(state.tokens[:, 8:]))
        np.testing.assert_array_equal(canvas, fused.trace.tokens[: len(canvas)])
        assert not np.asarray(fused.trace.active[len(canvas) :]).any()
        np.testing.assert_array_equal(state.tokens[:, 8:], fused.tokens)
        np.testing.assert_array_equal(state.nfe, fused.nfe)
        np.testing.assert_array_equal(state.cause, fused.cause)
        np.testing.assert_array_equal(state.commit_pass, fused.commit_pass)
        for i, kind in enumerate(("full", "windowed", "cached", "refresh")):
            np.testing.assert_array_equal(state.kinds[:, i], fused.stats.passes[kind])


@pytest.mark.parametrize("policy", POLICIES)
def test_every_pass_commits_and_nothing_committed_changes(policy):
    """Progress in each active sequence; unmasked tokens stay; at the end no mask is left."""
    for seed in range(6):
        result = reference(policy, seed)
        for row in range(3):
            passes = trace_rows(result.trace, row)
            canvas = np.concatenate([np.full((1, 16), MASK), passes["tokens"]])
            for before, after, block in zip(canvas, canvas[1:], passes["block"]):
                rows = slice(4 * block, 4 * block + 4)
                assert ((before[rows] == MASK) & (after[rows] != MASK)).any()
                kept = before != MASK
                eos = np.flatnonzero(after == EOS)
                if eos.size and (after[eos[0] :] == EOS).all():
                    kept &= np.arange(16) < eos[0]  # behind the final EOS everything is EOS
                np.testing.assert_array_equal(after[kept], before[kept])
            assert (canvas[-1] != MASK).all()
            np.testing.assert_array_equal(canvas[-1], result.tokens[row])


def test_commits_and_passes_add_up():
    for policy in POLICIES:
        result = reference(policy, 0)
        np.testing.assert_array_equal(sum(result.stats.commits.values()), [16] * 3)
        np.testing.assert_array_equal(sum(result.stats.passes.values()), result.nfe)
        assert (result.commit_pass >= 0).all()
        assert (result.commit_pass < result.nfe[:, None]).all()


@pytest.mark.parametrize("policy", ["dual_threshold", "polestar"])
def test_temperature_zero_takes_the_arg_max_whatever_the_key(policy):
    """Each committed token is the arg max of its pass; a key changes nothing."""
    model, result = model_pair("llada", 1)[0], reference(policy, 1)
    other = pj.decode(model, small_batch(1), make_config(policy), keys_of(7), trace=True)
    np.testing.assert_array_equal(other.trace.tokens, result.trace.tokens)
    first = trace_rows(result.trace, 1)  # the prompt that fills its bucket
    tokens = np.concatenate([small_batch(1)[1], np.full(16, MASK)])[None]
    logits = np.array(model.logits(tokens))[0, 8:12, :40]
    logits[:, MASK] = -np.inf
    np.testing.assert_array_equal(first["prediction"][0], logits.argmax(-1))


def test_sampling_depends_on_the_key_alone():
    """Same key, same text; other keys, other texts; each row as if it were alone with its key."""
    model = model_pair("llada", 2)[0]
    config = make_config("dual_threshold", temperature=1.0, stop_at_eos=False)
    prompts = small_batch(2)
    texts = [pj.decode(model, prompts, config, keys_of(seed)).tokens for seed in (0, 0, 1, 2)]
    np.testing.assert_array_equal(texts[0], texts[1])
    for row in range(3):
        assert len({texts[i][row].tobytes() for i in (1, 2, 3)}) == 3
    assert (np.concatenate(texts) != MASK).all()
    swapped = pj.decode(model, prompts[::-1], config, keys_of(0)[::-1]).tokens
    np.testing.assert_array_equal(swapped, texts[0][::-1])


def test_sampling_follows_the_softmax():
    """First tokens over many keys have the frequencies that the temperature prescribes."""
    model, t = model_pair("llada", 4)[0], 1.5
    config = pj.DecodeConfig(
        gen_length=1, block_length=1, temperature=t, prompt_bucket=8, stop_at_eos=False
    )
    prompt = random_prompts(9, [8])[0]
    n = 4000
    result = pj.decode(model, [prompt] * n, config, jax.random.key(3))
    logits = np.asarray(model.logits(np.append(prompt, MASK)[None]), np.float64)[0, 8, :40]
    logits[MASK] = -np.inf
    p = np.exp((logits - logits.max()) / t)
    p /= p.sum()
    seen = np.bincount(result.tokens[:, 0], minlength=40) / n
    assert np.abs(seen - p).max() < 5 * np.sqrt(0.25 / n)
    assert seen[MASK] == 0


def test_confidence_of_a_sampled_token_is_its_untempered_probability():
    model = model_pair("llada", 4)[0]
    config = make_config("plain_fixed", temperature=2.0)
    result = pj.decode(model, random_prompts(9, [8, 8, 8]), config, keys_of(0), trace=True)
    passes = trace_rows(result.trace, 0)
    tokens = np.concatenate([random_prompts(9, [8])[0], np.full(16, MASK)])[None]
    logits = np.asarray(model.logits(tokens), np.float64)[0, 8:12, :40]
    logits[:, MASK] = -np.inf
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    chosen = p[np.arange(4), passes["prediction"][0]]
    np.testing.assert_allclose(passes["confidence"][0], chosen, rtol=1e-4)
    assert (passes["prediction"][0] != p.argmax(-1)).any()


def test_random_remasking_is_reproducible_and_spreads():
    """Random order: fixed by the key, different for other keys, the same number of commits."""
    model = model_pair("llada", 2)[0]
    config = make_config("plain_fixed", remasking="random", stop_at_eos=False)
    orders = [
        pj.decode(model, small_batch(2), config, keys_of(seed)).commit_pass for seed in (0, 0, 1)
    ]
    np.testing.assert_array_equal(orders[0], orders[1])
    assert (orders[0] != orders[2]).any()
    np.testing.assert_array_equal(np.sort(orders[2], axis=1), np.repeat([range(8)] * 3, 2, axis=1))


ALSO_POLESTAR = ["dual_threshold", pytest.param("polestar", marks=pytest.mark.slow)]


@pytest.mark.parametrize("policy", ALSO_POLESTAR)
def test_stopping_at_eos_changes_nothing_up_to_it_and_saves_passes(policy):
    saved = 0
    for seed in range(8):
        model, on = model_pair("llada", seed)[0], reference(policy, seed)
        off = pj.decode(model, small_batch(seed), make_config(policy, stop_at_eos=False))
        for row in range(3):
            eos = np.flatnonzero(off.tokens[row] == EOS)
            end = eos[0] + 1 if eos.size else 16
            np.testing.assert_array_equal(on.tokens[row, :end], off.tokens[row, :end])
            assert (on.tokens[row, end:] == EOS).all()
            assert on.nfe[row] <= off.nfe[row]
            saved += int(off.nfe[row] - on.nfe[row])
    assert saved > 0


@pytest.mark.parametrize("policy", ALSO_POLESTAR)
def test_threshold_one_still_ends_with_one_commit_a_pass(policy):
    """With a threshold that nothing reaches, exactly the best row is committed per pass."""
    commit = pj.ThresholdCommit(1.0) if policy == "dual_threshold" else pj.PolestarCommit(1.0, None)
    config = dataclasses.replace(make_config(policy, stop_at_eos=False), commit=commit)
    result = pj.decode(model_pair("llada", 0)[0], small_batch(0), config)
    np.testing.assert_array_equal(result.nfe, [16] * 3)
    assert (result.tokens != MASK).all()


def model_with_head(kind: str) -> pj.Model:
    """Uniform logits, or a mask token that the model prefers to all others."""
    if kind == "uniform":
        return small_model(small_config("llada"), 0, head=np.zeros((16, 48)))
    rng = np.random.default_rng(0)
    head = rng.normal(size=(16, 48))
    head[:, MASK] = 5.0  # inputs of positive mean give it the largest logit
    return small_model(small_config("llada"), 0, head=head, embed=1 + rng.normal(size=(48, 16)))


@pytest.mark.parametrize("head", ["uniform", "prefers_mask"])
@pytest.mark.parametrize("policy", ["dual_threshold", "polestar"])
def test_decoding_ends_without_masks_whatever_the_head_says(policy, head):
    """A head that prefers the mask token, or nothing at all: no endless loop, no mask."""
    model = model_with_head(head)
    if head == "prefers_mask":
        tokens = np.concatenate([small_batch(0)[1], np.full(16, MASK)])[None]
        assert (np.asarray(model.logits(tokens))[0, 8:, :40].argmax(-1) == MASK).all()
    result = pj.decode(model, small_batch(0), make_config(policy), trace=True)
    assert (result.tokens != MASK).all()
    assert (result.tokens < 40).all()
    assert (result.nfe <= 16).all()


def test_rows_of_the_head_beyond_the_vocabulary_are_never_predicted():
    model = small_model(small_config("llada"), 0)
    head = np.asarray(model.params["head"][...]).copy()
    head[:, 40:] *= 100.0
    loud = small_model(model.config, 0, head=head)
    config = make_config("dual_threshold")
    a, b = (pj.decode(m, small_batch(0), config, trace=True) for m in (model, loud))
    np.testing.assert_array_equal(a.trace.tokens, b.trace.tokens)
