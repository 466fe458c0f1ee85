"""Identities of Polestar that need no oracle, on random small models."""

import dataclasses
import itertools

import numpy as np
import pytest

import polestar_jax as pj
from decoding.helpers import MASK, model_pair, random_prompts, small_config, small_model, trace_rows
from polestar_jax.decoding.cache import polestar_settings
from polestar_jax.decoding.decode import context_of

BASE = {"gen_length": 16, "block_length": 4, "prompt_bucket": 8, "stop_at_eos": False}
WHOLE = pj.PolestarCache(
    window_before=9, window_after=9, num_clusters=24, refresh_clusters=24,
    refresh_clusters_last=24, trigger_last=0, trigger_total=0, windowed_openings=(False,),
)  # fmt: skip
QUIET = pj.PolestarCache(trigger_last=99, trigger_total=99, windowed_openings=(False,))
ORDINARY = pj.PolestarCache(num_clusters=4, refresh_clusters=2)
NO_EARLY = pj.PolestarCommit(0.6, None)
BOTH = pytest.mark.parametrize("family", ["llada", pytest.param("dream", marks=pytest.mark.slow)])


def batch(seed: int) -> list[np.ndarray]:
    return random_prompts(seed, [3, 8, 5])


def decode(family: str, seed: int, cache, commit, **fields) -> pj.DecodeResult:
    config = pj.DecodeConfig(cache=cache, commit=commit, **{**BASE, **fields})
    return pj.decode(model_pair(family, seed)[0], batch(seed), config, trace=True)


def assert_same(a: pj.DecodeResult, b: pj.DecodeResult) -> None:
    np.testing.assert_array_equal(a.trace.tokens, b.trace.tokens)
    np.testing.assert_array_equal(a.nfe, b.nfe)


@BOTH
def test_refreshing_every_row_in_every_layer_equals_no_cache_token_for_token(family):
    """Suffix rule off: then the commit rule is the threshold's, under no cache at all."""
    refreshes = 0
    for seed in range(4):
        plain = decode(family, seed, pj.NoCache(), pj.ThresholdCommit(0.6))
        whole = decode(family, seed, WHOLE, dataclasses.replace(NO_EARLY, suffix=False))
        assert_same(plain, whole)
        refreshes += whole.stats.passes["refresh"].sum()
        assert (whole.stats.passes["cached"] == 0).all()
    assert refreshes > 0


@BOTH
def test_refreshing_every_row_with_suffix_commits_reembedded_sees_the_true_forward(family):
    """Every confidence is that of a full forward over the tokens as they stand."""
    cache = dataclasses.replace(WHOLE, reembed_suffix_commits=True)
    suffix = 0
    for seed in range(4):
        model = model_pair(family, seed)[0]
        result = decode(family, seed, cache, NO_EARLY)
        suffix += result.stats.commits["suffix"].sum()
        passes = trace_rows(result.trace, 1)  # the prompt that fills its bucket: no pads
        before = np.concatenate([np.full((1, 16), MASK), passes["tokens"][:-1]])
        prompts = np.repeat(batch(seed)[1][None], len(before), axis=0)
        logits = np.array(model.logits(np.concatenate([prompts, before], axis=1)))[..., :40]
        logits[..., MASK] = -np.inf
        p = np.exp(logits - logits.max(-1, keepdims=True))
        truth = p.max(-1) / p.sum(-1)
        shift = int(family == "dream")
        for i, block in enumerate(passes["block"]):
            rows = 8 + 4 * block - shift + np.arange(4)
            np.testing.assert_allclose(passes["confidence"][i], truth[i, rows], atol=1e-4)
    assert suffix > 0


@BOTH
def test_never_refreshing_without_drift_commits_is_the_dual_cache(family):
    for seed in range(4):
        dual = decode(family, seed, pj.DualCache(), pj.ThresholdCommit(0.6))
        quiet = decode(family, seed, QUIET, NO_EARLY)
        assert_same(dual, quiet)
        np.testing.assert_array_equal(dual.trace.confidence, quiet.trace.confidence)
        assert (quiet.stats.passes["refresh"] == 0).all()


@pytest.mark.slow
def test_without_caching_policy_of_its_own_the_commit_rule_has_no_suffix_packet():
    """PolestarCommit on the dual cache: early commits by drift, none in the suffix."""
    causes = set()
    for seed in range(6):
        result = decode("llada", seed, pj.DualCache(), pj.PolestarCommit(0.9, 0.2, gate_scale=0.5))
        causes |= set(result.cause.ravel().tolist())
    assert causes == {1, 2}


def test_capacities_of_the_refresh_never_change_the_result():
    """One compiled row count that always fits, and many that sometimes do."""
    commit = pj.PolestarCommit(0.6, 0.3)
    sizes = [ORDINARY, dataclasses.replace(ORDINARY, capacities=(1, 2, 3, 5, 8))]
    refreshed = set()
    for seed in range(4):
        one, many = (decode("llada", seed, cache, commit) for cache in sizes)
        assert_same(one, many)
        for name in ("refreshed", "chosen", "suffix_token"):
            np.testing.assert_array_equal(
                getattr(one.trace.details, name), getattr(many.trace.details, name)
            )
        refreshed |= set(np.asarray(one.trace.details.refreshed).sum(-1).ravel().tolist())
    assert {1, 3, 5} & refreshed
    assert max(refreshed) > 5


@pytest.mark.parametrize(
    ("platform", "batch", "block_length", "counts"),
    [
        ("gpu", 1, 32, (96,)),  # 128 rows: hidden behind the weights' transfer
        ("gpu", 1, 64, (48, 96, 144, 192)),  # 256 rows are not
        ("gpu", 2, 32, (24, 48, 72, 96)),
        ("cpu", 1, 32, (24, 48, 72, 96)),
    ],
)
def test_row_counts_are_told_apart_only_where_fewer_rows_cost_less(
    monkeypatch, platform, batch, block_length, counts
):
    monkeypatch.setattr(polestar_settings, "target_platform", lambda: platform)
    config = pj.preset("polestar", gen_length=256, block_length=block_length)
    model = small_model(small_config("llada", max_length=512), 0)
    tokens, pad = np.zeros((batch, 512), np.int32), np.zeros(batch, np.int32)
    ctx = context_of(model.config, model.params, config, tokens, pad)
    assert config.cache.row_counts(ctx) == counts


@dataclasses.dataclass(frozen=True)
class Stepping:
    """A generation under `decode_step`, with its configuration."""

    model: pj.Model
    config: pj.DecodeConfig

    def states(self, prompts) -> list[pj.DecodeState]:
        state = pj.init_state(self.model, prompts, self.config, trace=True)
        found = [state]
        while not pj.is_done(found[-1], self.model):
            found.append(pj.decode_step(self.model, found[-1], self.config))
        return found


def stepping(seed: int) -> Stepping:
    config = pj.DecodeConfig(cache=ORDINARY, commit=pj.PolestarCommit(0.6, 0.3), **BASE)
    return Stepping(model_pair("llada", seed)[0], config)


def test_every_centroid_stays_the_mean_of_its_members():
    """After openings and after any number of refreshes, to 1e-4 (rows may change many times)."""
    moved = 0
    for seed in range(4):
        states = stepping(seed).states(batch(seed))
        for before, after in itertools.pairwise(states):
            for layer, own in enumerate(after.cache.clusters):
                hidden = np.asarray(after.cache.hidden[layer].data)
                labels, counts = np.asarray(own.labels), np.asarray(own.counts)
                centroids = np.asarray(own.centroids)
                for row, cluster in zip(*np.nonzero(counts)):
                    members = hidden[row][labels[row] == cluster]
                    assert len(members) == counts[row, cluster]
                    np.testing.assert_allclose(centroids[row, cluster], members.mean(0), atol=1e-4)
                if int(before.block) == int(after.block) and int(before.block_passes) > 0:
                    moved += (centroids != np.asarray(before.cache.clusters[layer].centroids)).any()
    assert moved > 0


def test_drift_of_an_unchanged_context_is_zero_and_never_negative():
    """A pass repeated on the tokens it had before: no token drift, no cluster drift."""
    plain = refresh = 0
    for seed in range(4):
        run = stepping(seed)
        states = run.states(batch(seed))
        for before, after in itertools.pairwise(states):
            i = int(before.passes)
            kind = np.asarray(after.trace.kind[i])
            active = np.asarray(after.trace.active[i])
            if (kind[active] < 2).any():
                continue  # an opening: no drift is defined
            assert (np.asarray(after.trace.drift[i])[active] >= 0).all()
            scores = np.asarray(after.trace.details.drift[i])
            assert (scores[~np.isnan(scores)] >= 0).all()
            again = dataclasses.replace(
                after, tokens=before.tokens, block=before.block, block_passes=before.block_passes,
                last_commits=before.last_commits, since_refresh=before.since_refresh,
            )  # fmt: skip
            again = pj.decode_step(run.model, again, run.config)
            drift = np.asarray(again.trace.drift[i + 1])
            still = active & (kind == 2)  # a refresh changes the context after the attention
            assert (np.abs(drift[still]) < 1e-6).all()
            plain += still.sum()
            if (kind == 3).any():
                # The packet of the last layer but one is applied once more: same rows, same inputs
                # in layer 0, whose keys therefore stay as they are.
                scores = np.asarray(again.trace.details.drift[i + 1])[kind == 3, 0]
                assert (np.abs(scores[~np.isnan(scores)]) < 1e-6).all()
                refresh += (kind == 3).sum()
    assert plain > 0
    assert refresh > 0


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_half_precision_has_finite_drift_and_no_nan(dtype):
    model = small_model(small_config("llada"), 2, dtype=dtype)
    config = pj.DecodeConfig(cache=ORDINARY, commit=pj.PolestarCommit(0.6, 0.3), **BASE)
    result = pj.decode(model, batch(2), config, trace=True)
    assert (result.tokens != MASK).all()
    for row in range(3):
        passes = trace_rows(result.trace, row)
        assert np.isfinite(passes["confidence"]).all()
        assert np.isfinite(passes["drift"][passes["kind"] >= 2]).all()
        assert (passes["drift"][passes["kind"] >= 2] >= 0).all()


def test_a_sequence_that_does_not_refresh_is_not_changed_by_one_that_does():
    """Decoded beside three different neighbours, a row has the same passes and the same kinds."""
    config = pj.DecodeConfig(cache=ORDINARY, commit=pj.PolestarCommit(0.6, 0.3), **BASE)
    mixed = 0
    for seed in range(4):
        model, (own, *_) = model_pair("llada", seed)[0], batch(seed)
        seen = []
        for other in range(3):
            neighbours = random_prompts(100 + 10 * seed + other, [8, 1 + other])
            result = pj.decode(model, [neighbours[0], own, neighbours[1]], config, trace=True)
            seen.append(trace_rows(result.trace, 1))
            both = np.asarray(result.trace.active)[:, :2].all(1)
            kinds = np.asarray(result.trace.kind)[both]
            mixed += ((kinds[:, 1] == 2) & (kinds[:, 0] == 3)).sum()
        for passes in seen[1:]:
            np.testing.assert_array_equal(passes["tokens"], seen[0]["tokens"])
            np.testing.assert_array_equal(passes["kind"], seen[0]["kind"])
            np.testing.assert_allclose(passes["confidence"], seen[0]["confidence"], atol=1e-5)
    assert mixed > 0


@pytest.mark.slow
def test_a_block_completed_early_from_the_block_before_is_skipped_by_its_sequence():
    """Suffix commits may complete the next block: that sequence never opens it."""
    cache = pj.PolestarCache(
        num_clusters=4, refresh_clusters=4, refresh_clusters_last=4, trigger_last=0, trigger_total=0
    )
    fields = {**BASE, "block_length": 2}
    config = pj.DecodeConfig(cache=cache, commit=pj.PolestarCommit(0.5, None), **fields)
    skipped = 0
    for seed in range(6):
        result = pj.decode(model_pair("llada", seed)[0], batch(seed), config, trace=True)
        assert (result.tokens != MASK).all()
        for row in range(3):
            visited = set(trace_rows(result.trace, row)["block"].tolist())
            causes = result.cause[row].reshape(8, 2)
            for block in set(range(8)) - visited:
                assert (causes[block] == 3).all()
                skipped += 1
    assert skipped > 0
