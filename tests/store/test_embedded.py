"""Four-bit rows of a trained model: what centroids save, and that answers hardly change."""

import pytest

import polestar_jax as pj
from benchmarks.store import decode_rows, held_out, judged, overlap, real_rows

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def embedded() -> pj.Model:
    return pj.load("embedded", dtype="float32")


@slow
def test_centroids_reduce_the_error_of_the_embedded_models_rows_in_every_layer(embedded):
    for layer in real_rows(embedded, [row.prompt for row in held_out(26)]):
        assert 0 < layer["rest_to_centroid"] < 0.75 * layer["raw_rows"]
        assert layer["raw_rows"] < 0.12


@slow
def test_four_bits_choose_the_same_clusters_and_tokens_almost_always(embedded):
    """On a few held-out rows; the benchmark does it on 500."""
    rows, found = held_out(26), []
    for stores in ({}, {"hidden_dtype": "nvfp4", "hidden_store": "host"}):
        config = pj.preset("polestar", gen_length=64, block_length=32, **stores)
        found.append(decode_rows(embedded, config, rows, 26))
    a, b = found
    assert judged(a)["refresh_passes"] > 0
    assert overlap(a, a)["clusters_in_common"] == 1
    assert overlap(a, b)["clusters_in_common"] > 0.9
    assert (a["tokens"] == b["tokens"]).mean() > 0.95
