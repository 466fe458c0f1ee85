"""The plain forward gives the logits that the original PyTorch models gave."""

from pathlib import Path

import numpy as np
import pytest

from polestar_jax.weights import load

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("name", ["llada_tiny", "llada_tiny_gqa", "dream_tiny"])
def test_logits_of_a_left_padded_batch_equal_the_recorded_ones(name):
    model = load(GOLDEN / name)
    with np.load(GOLDEN / f"logits_{name}.npz") as file:
        recorded = {key: file[key] for key in file.files}
    longest = 61 + 64
    tokens = np.full((3, longest), model.config.pad_token)
    mask = np.zeros((3, longest), int)
    for row, p in enumerate((7, 32, 61)):
        tokens[row, longest - p - 64 :] = recorded[f"ids_{p}"]
        mask[row, longest - p - 64 :] = 1
    padded = np.asarray(model.logits(tokens, mask))
    for row, p in enumerate((7, 32, 61)):
        rows, expected = recorded[f"rows_{p}"], recorded[f"logits_{p}"]
        got = padded[row, longest - p - 64 :][rows]
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-3)
    alone = np.asarray(model.logits(recorded["ids_7"][None]))[0]
    np.testing.assert_allclose(alone, padded[0, longest - 7 - 64 :], rtol=0, atol=5e-4)
