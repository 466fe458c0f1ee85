"""Polestar as its authors released it, given the decisions that rounding noise took there.

The recorded sequence, cluster labels, centroids and selected rows are put in; what a pass then
computes (drift, cluster drifts, confidences) must be what was recorded.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from oracle import golden

import polestar_jax as pj
from decoding.helpers import trace_rows
from decoding.test_recorded_polestar import assert_block_numbers, recorded_config
from polestar_jax.decoding.cache.clusters import centroid_queries
from polestar_jax.decoding.cache.refresh import Selection, refresh_pass
from polestar_jax.decoding.decode import collect
from polestar_jax.decoding.ops import proxy_attention

INDEX = golden.index()
FAST = "polestar_official/llada_tiny_P7_B16_t0.9_te0.7.npz"
NAMES = [
    pytest.param(name, marks=[] if name == FAST else pytest.mark.slow)
    for name in INDEX
    if name.startswith("polestar_official/")
]


@dataclasses.dataclass(frozen=True, eq=False)
class RecordedCache(pj.PolestarCache):
    """Polestar-Cache whose clusters, triggers and selections come from a recording.

    `kind` [N], `labels` and `selected` [N, layers, T'], `centroids` [N, layers, K, M], indexed by
    the pass; T' positions start behind the left pads.
    """

    recorded: Any = None

    # By identity: the inherited comparison leaves `recorded` out, and two recordings with equal
    # settings would share one compiled program, with the decisions of the first in it.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def _at(self, ctx, state, name: str, layer: int, window) -> Any:
        """A recorded row array in window coordinates, [1, W]."""
        row = jnp.asarray(self.recorded[name])[state.passes, layer]
        padded = jnp.full(ctx.total, -1, row.dtype).at[-row.shape[0] :].set(row)
        return padded[window.start + jnp.arange(window.width)][None]

    def _open(self, ctx, state, active, *rest):
        out, window = super()._open(ctx, state, active, *rest), self.window(ctx, state.block)
        fixed = []
        for layer, own in enumerate(out.cache.clusters):
            centroids = jnp.asarray(self.recorded["centroids"])[state.passes, layer][None]
            labels = self._at(ctx, state, "labels", layer, window)
            counts = (labels[:, None] == jnp.arange(self.num_clusters)[None, :, None]).sum(-1)
            queries = ctx.model.query(layer, centroid_queries(ctx, layer, centroids))
            scores, normaliser, _ = proxy_attention(ctx, queries, out.cache.layers[layer], None)
            changes = {"labels": labels, "centroids": centroids, "scores": scores}
            changes |= {"normaliser": normaliser, "counts": counts.astype(jnp.float32)}
            fixed.append(dataclasses.replace(own, **changes))
        cache = dataclasses.replace(out.cache, clusters=tuple(fixed))
        return dataclasses.replace(out, cache=cache)

    def triggered(self, state, active):
        return active & (jnp.asarray(self.recorded["kind"])[state.passes] == 3)

    def refresh(self, ctx, state, active):
        window = self.window(ctx, state.block)

        def choose(layer, drift, clusters):
            rows = self._at(ctx, state, "selected", layer, window) == 1
            return Selection(rows, jnp.full((1, self.refresh_clusters), -1), drift)

        return refresh_pass(ctx, self, state, window, active, self.triggered(state, active), choose)


def recorded_decisions(r: dict) -> dict[str, np.ndarray]:
    labels = np.full(r["sel"].shape, -1, np.int32)
    labels[r["km_pass"]] = r["km_labels"]
    return {
        "kind": r["pass_kind"].astype(np.int32),
        "labels": labels,
        "selected": r["sel"].astype(np.int32),
        "centroids": np.nan_to_num(r["centroids_after"]),
    }


@pytest.mark.parametrize("name", NAMES)
def test_drift_scores_and_confidences_given_the_recorded_decisions(recorded_models, name):
    r, model = golden.recording(name), recorded_models[INDEX[name]["checkpoint"]]
    config = recorded_config(name)
    policy = RecordedCache(
        num_clusters=config.cache.num_clusters, capacities=(96,), recorded=recorded_decisions(r)
    )
    config = dataclasses.replace(config, cache=policy)
    state = pj.init_state(model, [r["prompt"]], config, trace=True)
    pads = np.asarray(state.tokens[:, : int(state.pad[0])])
    for i, after in enumerate(r["x_after"]):
        state = pj.decode_step(model, state, config)
        centroids = r["centroids_after"][i]
        for layer, own in enumerate(state.cache.clusters):
            there = ~np.isnan(centroids[layer, :, 0])
            np.testing.assert_allclose(own.centroids[0][there], centroids[layer][there], atol=5e-4)
        forced = np.concatenate([pads[0], after.astype(np.int32)])[None]
        state = dataclasses.replace(state, tokens=jnp.asarray(forced))
    result = collect(model, state)
    passes = trace_rows(result.trace, 0)
    np.testing.assert_array_equal(passes["kind"], r["pass_kind"])
    np.testing.assert_array_equal(passes["block"], r["block"])
    assert_block_numbers(passes, r)
    details, refresh = result.trace.details, r["pass_kind"] == 3
    scores = np.asarray(details.drift)[: len(refresh), 0]
    there = ~np.isnan(r["sel_scores"]) & refresh[:, None, None]
    # One recorded score of 3.946 is itself 3.0e-4 away from the same formula in float64, where
    # ours is 2.4e-5 away: hence the relative part.
    np.testing.assert_allclose(scores[there], r["sel_scores"][there], atol=3e-4, rtol=1e-4)
    behind = r["sel"][:, -1] & (np.arange(r["sel"].shape[-1]) >= r["block_end"][:, None])
    confidence = np.asarray(details.suffix_confidence)[: len(refresh), 0, pads.shape[1] :]
    np.testing.assert_allclose(confidence[behind], r["sel_conf"][behind], atol=3e-4)
