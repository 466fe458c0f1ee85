"""Four-bit rows of a trained model: what centroids save."""

import pytest

import polestar_jax as pj
from benchmarks.store import held_out, real_rows


@pytest.mark.slow
def test_centroids_reduce_the_error_of_the_embedded_models_rows_in_every_layer():
    model = pj.load("embedded", dtype="float32")
    for layer in real_rows(model, [row.prompt for row in held_out(26)]):
        assert 0 < layer["rest_to_centroid"] < layer["raw_rows"]
        assert layer["raw_rows"] < 0.12
