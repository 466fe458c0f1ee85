"""Commit policies: which masked rows are accepted after a pass."""

from polestar_jax.decoding.commit.base import CommitPolicy
from polestar_jax.decoding.commit.factor import FactorCommit
from polestar_jax.decoding.commit.fixed import FixedCommit
from polestar_jax.decoding.commit.polestar import PolestarCommit
from polestar_jax.decoding.commit.threshold import ThresholdCommit

__all__ = ["CommitPolicy", "FactorCommit", "FixedCommit", "PolestarCommit", "ThresholdCommit"]
