"""Golden parity of Polestar, decoded freely, and its stability under rounding noise.

Recordings that differ in the prompt alone are decoded as one left-padded batch.
"""

import dataclasses
from collections import defaultdict

import jax.numpy as jnp
import numpy as np
import pytest
from oracle import golden

import polestar_jax as pj
from decoding.helpers import trace_rows
from polestar_jax.decoding.decode import collect
from polestar_jax.models.transformer import params_from_flat, params_to_flat

INDEX = golden.index()
FAST = {"llada_tiny_B16_t0.9_te0.7", "llada_tiny_gqa_B32_t0.9_te0.5"}
DEEP = "polestar_tie/llada_tiny_P7_B16_t0.9_te0.7.npz"


def recorded_config(name: str, **cache_fields) -> pj.DecodeConfig:
    s = INDEX[name]["settings"]
    return pj.DecodeConfig(
        gen_length=s["gen_length"],
        block_length=s["block_length"],
        cache=pj.PolestarCache(
            num_clusters=s["target_total"],
            refresh_clusters=s["topk"],
            refresh_clusters_last=s["topk_last"],
            kmeans_iters=s["kmeans_iters"],
            **cache_fields,
        ),
        commit=pj.PolestarCommit(
            s["threshold"], s["threshold_early"], gate_centre=0.9, history=s["drift_window"]
        ),
        stop_at_eos=False,
    )


def groups() -> list:
    found = defaultdict(list)
    for name in INDEX:
        if name.startswith("polestar_tie/"):
            file = name.removesuffix(".npz").split("/")[1]
            key = "_".join(w for w in file.split("_") if w not in ("P7", "P61"))
            found[key].append(name)
    return [
        pytest.param(names, id=key, marks=[] if key in FAST else pytest.mark.slow)
        for key, names in found.items()
    ]


def assert_block_numbers(passes: dict, r: dict) -> None:
    """Confidence, drift, delta and gate of the block's rows, where the recording has them."""
    denoising = r["pass_kind"] >= 2
    masked = r["mask_before"]
    np.testing.assert_array_equal(passes["masked"], masked)
    np.testing.assert_allclose(passes["confidence"][masked], r["conf"][masked], atol=3e-4)
    # Where the two best tokens are this close to each other, confidence stays below one half.
    clear = masked & (r["conf"] > 0.501)
    np.testing.assert_array_equal(passes["prediction"][clear], r["argmax"][clear])
    for name in ("drift", "delta"):
        np.testing.assert_allclose(passes[name][denoising], r[name][denoising], atol=1e-3)
        assert np.isnan(passes[name][~denoising]).all()
    # The gate multiplies an error of the confidence by up to 18; float64 itself differs by 1.2e-3.
    np.testing.assert_allclose(passes["gate"], r["gate"], atol=2e-3)


def assert_refreshes(details, row: int, active: np.ndarray, pads: int, r: dict) -> None:
    """Selected rows and clusters of every layer, cluster drifts, predictions behind the block."""
    ours = {
        f.name: np.asarray(getattr(details, f.name))[active, row]
        for f in dataclasses.fields(details)
    }
    np.testing.assert_array_equal(ours["refreshed"][:, :, pads:], r["sel"])
    assert not ours["refreshed"][:, :, :pads].any()
    refresh = r["pass_kind"] == 3
    np.testing.assert_allclose(ours["drift"][refresh], r["sel_scores"][refresh], atol=3e-4)
    width = r["sel_top"].shape[-1]
    np.testing.assert_array_equal(ours["chosen"][..., :width], r["sel_top"])
    behind = r["sel"][:, -1] & (np.arange(r["sel"].shape[-1]) >= r["block_end"][:, None])
    confidence = ours["suffix_confidence"][:, pads:]
    np.testing.assert_allclose(confidence[behind], r["sel_conf"][behind], atol=3e-4)
    clear = behind & (np.nan_to_num(r["sel_conf"]) > 0.501)
    np.testing.assert_array_equal(ours["suffix_token"][:, pads:][clear], r["sel_argmax"][clear])


def assert_causes(passes: dict, r: dict, prompt: int) -> None:
    """Each pass committed the recorded rows, for the recorded reason."""
    before = np.concatenate([np.zeros_like(passes["cause"][:1]), passes["cause"][:-1]])
    new = np.where(before == 0, passes["cause"], 0)
    length = r["conf"].shape[1]
    for i, block in enumerate(r["block"]):
        rows = slice(block * length, (block + 1) * length)
        np.testing.assert_array_equal(new[i, rows] == 1, r["commit_conf"][i])
        np.testing.assert_array_equal(new[i, rows] == 2, r["commit_drift"][i])
    np.testing.assert_array_equal(new == 3, r["commit_suffix"][:, prompt:])


@pytest.mark.parametrize("names", groups())
def test_decoded_freely_every_pass_decision_and_number_is_the_recorded_one(recorded_models, names):
    compare(recorded_models, names, recorded_config(names[0], capacities=(96,)))


@pytest.mark.slow
def test_decoded_freely_with_the_default_row_counts_of_a_refresh(recorded_models):
    compare(recorded_models, [DEEP], recorded_config(DEEP))


def compare(recorded_models: dict, names: list[str], config: pj.DecodeConfig) -> None:
    """Decode the recorded prompts as one batch and compare every pass."""
    model = recorded_models[INDEX[names[0]]["checkpoint"]]
    recordings = [golden.recording(name) for name in names]
    result = pj.decode(model, [r["prompt"] for r in recordings], config, trace=True)
    for row, r in enumerate(recordings):
        passes, prompt = trace_rows(result.trace, row), len(r["prompt"])
        np.testing.assert_array_equal(passes["tokens"], r["x_after"][:, prompt:])
        assert result.nfe[row] == int(r["nfe"])
        np.testing.assert_array_equal(passes["kind"], r["pass_kind"])
        np.testing.assert_array_equal(passes["block"], r["block"])
        assert_block_numbers(passes, r)
        assert_causes(passes, r, prompt)
        active = np.asarray(result.trace.active)[:, row]
        assert_refreshes(result.trace.details, row, active, 64 - prompt, r)
        assert result.stats.refreshed_rows[row] == r["sel"].sum()
        for kind, name in enumerate(("full", "windowed", "cached", "refresh")):
            assert result.stats.passes[name][row] == (r["pass_kind"] == kind).sum()


def test_text_does_not_change_under_weight_noise_of_rounding_size(recorded_models):
    """All weights times 1 + 3e-7 N(0, 1): the tie rules keep every pass as it was."""
    names = [n for n in INDEX if n.startswith("polestar_tie/") and n.endswith("B16_t0.9_te0.7.npz")]
    names = [n for n in names if INDEX[n]["checkpoint"] == "llada_tiny"]
    recordings = [golden.recording(name) for name in names]
    model = recorded_models["llada_tiny"]
    config = recorded_config(names[0], capacities=(96,))
    flat = {k: np.asarray(v) for k, v in params_to_flat(model.params).items()}
    for seed in range(3):
        rng = np.random.default_rng(seed)
        noisy = {
            k: jnp.asarray(v * (1 + 3e-7 * rng.normal(size=v.shape)), jnp.float32)
            for k, v in flat.items()
        }
        assert any((noisy[k] != flat[k]).any() for k in flat)
        other = dataclasses.replace(model, params=params_from_flat(model.config, noisy))
        result = pj.decode(other, [r["prompt"] for r in recordings], config, trace=True)
        for row, r in enumerate(recordings):
            tokens = trace_rows(result.trace, row)["tokens"]
            np.testing.assert_array_equal(tokens, r["x_after"][:, len(r["prompt"]) :])


def test_centroids_labels_inputs_and_keys_after_every_pass(recorded_models):
    """The state between passes, and `decode_step` as good as the fused program."""
    r, model = golden.recording(DEEP), recorded_models["llada_tiny"]
    config, prompt = recorded_config(DEEP, capacities=(96,)), 7
    state = pj.init_state(model, [r["prompt"]], config)
    pads = int(state.pad[0])
    opening = {int(i): j for j, i in enumerate(r["km_pass"])}
    for i, after in enumerate(r["x_after"]):
        state = pj.decode_step(model, state, config)
        np.testing.assert_array_equal(np.asarray(state.tokens)[0, pads:], after)
        block = int(r["block"][i])
        # Window coordinates: 64 rows that hold the window, shifted inwards at the ends.
        start = min(max(64 + 16 * block - 32, 0), 192 - 64)
        for layer, own in enumerate(state.cache.clusters):
            centroids = r["centroids_after"][i, layer]
            there = ~np.isnan(centroids[:, 0])
            np.testing.assert_allclose(own.centroids[0][there], centroids[there], atol=3e-4)
            labels = np.full(192, -1)
            labels[start : start + 64] = own.labels[0]
            if i in opening:
                j = opening[i]
                np.testing.assert_array_equal(labels[pads:], r["km_labels"][j, layer])
                counts = np.nan_to_num(r["km_counts"][j, layer])
                np.testing.assert_array_equal(own.counts[0], counts)
            if f"deep{i}_k" in r:
                member = labels >= 0
                inputs = np.zeros((192, 64))
                inputs[start : start + 64] = state.cache.hidden[layer].data[0]
                recorded = np.zeros((192, 64))
                recorded[pads:] = r[f"deep{i}_hidden"][layer]
                np.testing.assert_allclose(inputs[member], recorded[member], atol=3e-4)
                keys = np.asarray(state.cache.layers[layer].raw)[0, :, pads:]
                np.testing.assert_allclose(keys, r[f"deep{i}_k"][layer], atol=3e-4)
    assert pj.is_done(state, model)
    assert int(state.nfe[0]) == int(r["nfe"])
    result = collect(model, state)
    np.testing.assert_array_equal(result.tokens[0], r["x_after"][-1, prompt:])
