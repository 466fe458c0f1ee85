"""The oracle itself is right: it reproduces the recorded trajectories, pass by pass."""

import functools

import numpy as np
import pytest

from oracle import baselines, golden
from oracle.polestar import Pass, Polestar, Settings

INDEX = golden.index()
net = functools.cache(golden.net)


def cases(folder: str, fast: tuple[str, ...]) -> list:
    """Recordings of a folder; those without one of the `fast` words belong to the slow stage."""
    return [
        pytest.param(name, marks=[] if any(w in name for w in fast) else pytest.mark.slow)
        for name in INDEX
        if name.startswith(folder)
    ]


def commit_rule(settings: dict):
    """The commit rule that a recording was made with."""
    blocks = settings["gen_length"] // settings.get("block_length", settings["gen_length"])
    if settings.get("alg") == "confidence_threshold":
        return baselines.budget_threshold(
            settings["threshold"], settings["gen_length"] / settings["steps"]
        )
    if "alg" in settings:
        by = {"maskgit_plus": "probability", "topk_margin": "margin", "entropy": "entropy"}
        return baselines.fixed(settings["steps"] // blocks, by[settings["alg"]], "dream")
    if "factor" in settings:
        return baselines.factor(settings["factor"], edge=True)
    if "threshold" in settings:
        return baselines.threshold(settings["threshold"])
    return baselines.fixed(settings["steps"] // blocks)


def cache_name(name: str) -> str:
    return next((c for c in ("dual", "prefix") if f"/{c}" in name), "none")


@pytest.mark.parametrize(
    "name", cases("traj_", ("_P7_B16", "conf_thr0.9_s32_P7", "entropy_s32_P7"))
)
def test_baselines_reproduce_the_recording(name):
    r, settings = golden.recording(name), INDEX[name]["settings"]
    dream_cached = "dream" in name and "plain" not in name
    passes = baselines.decode(
        net(INDEX[name]["checkpoint"]),
        r["prompt"],
        settings["gen_length"],
        settings.get("block_length", settings["gen_length"]),
        commit_rule(settings),
        cache_name(name),
        shift="in_block",
        teacher=list(r["x_after"]) if dream_cached else None,
    )
    np.testing.assert_array_equal([p.tokens for p in passes], r["x_after"])
    np.testing.assert_array_equal([p.rows for p in passes], r["pass_range"])
    np.testing.assert_array_equal([p.argmax for p in passes], r["argmax"])
    np.testing.assert_allclose([p.confidence for p in passes], r["conf"], atol=3e-4)


def polestar_settings(s: dict) -> Settings:
    return Settings(
        block_length=s["block_length"],
        clusters=s["target_total"],
        refresh=s["topk"],
        refresh_last=s["topk_last"],
        history=s["drift_window"],
        kmeans_iters=s["kmeans_iters"],
        tau=s["threshold"],
        early=s["threshold_early"],
        centre=0.9,
    )


def check_numbers(passes: list[Pass], r: dict) -> None:
    """Confidences, drift and delta, cluster scores and centroids of all passes."""
    np.testing.assert_allclose([p.confidence for p in passes], r["conf"], atol=3e-4)
    np.testing.assert_allclose([p.drift for p in passes], r["drift"], atol=1e-3)
    np.testing.assert_allclose([p.delta for p in passes], r["delta"], atol=1e-3)
    kept = ~np.isnan(r["centroids_after"]).all(axis=(1, 2, 3))
    assert kept.sum() > len(r["km_pass"]), "openings and some refreshes are recorded"
    for i, p in enumerate(passes):
        for layer, centroids in enumerate(p.centroids if kept[i] else ()):
            recorded = r["centroids_after"][i, layer]
            np.testing.assert_allclose(centroids, recorded[: len(centroids)], atol=5e-4)
            assert np.isnan(recorded[len(centroids) :]).all()
        for layer, scores in enumerate(p.scores):
            recorded = r["sel_scores"][i, layer, : len(scores)]
            np.testing.assert_allclose(scores, recorded, atol=3e-4)


@pytest.mark.parametrize("name", cases("polestar_tie", ("P7_B16", "P61_B4_t0.5", "gqa_P7")))
def test_polestar_reproduces_the_recording(name):
    r, meta = golden.recording(name), INDEX[name]
    passes = Polestar(
        net(meta["checkpoint"]), r["prompt"], 128, polestar_settings(meta["settings"])
    ).run()
    for field, key in (
        ("tokens", "x_after"), ("kind", "pass_kind"), ("rows", "pass_range"),
        ("mask_before", "mask_before"), ("commit_conf", "commit_conf"),
        ("commit_drift", "commit_drift"), ("commit_suffix", "commit_suffix"), ("selected", "sel"),
    ):  # fmt: skip
        np.testing.assert_array_equal([getattr(p, field) for p in passes], r[key], err_msg=field)
    for i, p in enumerate(passes):
        for layer, top in enumerate(p.top):
            assert top == [c for c in r["sel_top"][i, layer] if c >= 0]
    for j, i in enumerate(r["km_pass"]):
        np.testing.assert_array_equal(passes[i].labels, r["km_labels"][j])
        for layer, counts in enumerate(passes[i].counts):
            np.testing.assert_array_equal(counts, r["km_counts"][j, layer, : len(counts)])
    check_numbers(passes, r)


def teacher_forced(name: str) -> list[Pass]:
    """Polestar with the recorded tokens, clusters and selections put in."""
    r, meta = golden.recording(name), INDEX[name]
    run = Polestar(net(meta["checkpoint"]), r["prompt"], 128, polestar_settings(meta["settings"]))
    opening = {int(i): j for j, i in enumerate(r["km_pass"])}

    def clusters(i: int, layer: int):
        centroids = r["centroids_after"][i, layer]
        present = centroids[~np.isnan(centroids[:, 0])].astype(run.net.dtype)
        return r["km_labels"][opening[i], layer].astype(int), present

    run.force_clusters = clusters
    run.force_selection = lambda i, layer: r["sel"][i, layer]
    run.force_tokens = lambda i: r["x_after"][i]
    return run.run()


@pytest.mark.parametrize("name", cases("polestar_official", ("P7_B16", "gqa_P7_B32")))
def test_polestar_agrees_with_the_release_given_its_decisions(name):
    r, passes = golden.recording(name), teacher_forced(name)
    np.testing.assert_array_equal([p.kind for p in passes], r["pass_kind"])
    check_numbers(passes, r)
    clear = np.nan_to_num(r["conf"]) > 0
    np.testing.assert_array_equal([p.argmax for p in passes] * clear, r["argmax"] * clear)


def test_dream_refreshing_everything_equals_no_cache():
    dream, prompt = net("dream_tiny"), np.arange(5)
    plain = baselines.decode(dream, prompt, 16, 4, baselines.threshold(0.5))
    settings = Settings(
        block_length=4, window_before=9, window_after=9, clusters=24, refresh=24, refresh_last=24,
        trigger_last=0, trigger_total=0, windowed=(False,), tau=0.5, early=None, reembed=True,
        suffix=False,
    )  # fmt: skip
    passes = Polestar(dream, prompt, 16, settings).run()
    np.testing.assert_array_equal([p.tokens for p in passes], [p.tokens for p in plain])


def test_dream_without_refresh_is_the_dual_cache():
    dream, prompt = net("dream_tiny"), np.arange(5)
    dual = baselines.decode(dream, prompt, 16, 4, baselines.threshold(0.5), "dual")
    settings = Settings(
        block_length=4, trigger_last=99, trigger_total=99, windowed=(False,), tau=0.5, early=None
    )
    passes = Polestar(dream, prompt, 16, settings).run()
    np.testing.assert_array_equal([p.tokens for p in passes], [p.tokens for p in dual])


def test_suffix_commits_reembedded_keep_the_identity_with_no_cache():
    """Every row refreshed at every layer, suffix commits on: each pass sees the true forward."""
    llada, prompt = net("llada_tiny"), np.arange(5)
    settings = Settings(
        block_length=4, window_before=9, window_after=9, clusters=24, refresh=24, refresh_last=24,
        trigger_last=0, trigger_total=0, windowed=(False,), tau=0.5, early=None, reembed=True,
    )  # fmt: skip
    passes = Polestar(llada, prompt, 16, settings).run()
    assert any(p.commit_suffix.any() for p in passes)
    before = np.concatenate([prompt, np.full(16, 500)])
    for p in passes:
        s, e = p.block
        truth = llada.predict(llada.forward(before, np.arange(21), llada.empty_cache(21))[0])[s:e]
        np.testing.assert_allclose(
            p.confidence, np.where(before[s:e] == 500, truth.max(-1), np.nan), atol=1e-9
        )
        before = p.tokens
