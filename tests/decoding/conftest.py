"""Recorded checkpoints, loaded once by the library's own reader."""

import pytest
from oracle import golden

import polestar_jax as pj


@pytest.fixture(scope="session")
def recorded_models() -> dict[str, pj.Model]:
    names = ("llada_tiny", "llada_tiny_gqa", "dream_tiny")
    return {name: pj.load(golden.ROOT / name) for name in names}
