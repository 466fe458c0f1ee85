"""Polestar-Commit: accept a token before the usual confidence when its drift spikes."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from polestar_jax.checks import check_integer, check_number
from polestar_jax.decoding.commit.base import (
    CommitPolicy,
    CommitView,
    Decision,
    keep_inactive,
    rank,
)
from polestar_jax.errors import PolestarError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DriftHistory:
    """The last drift vectors of the block, float32 [B, w, L], and how many were stored, [B]."""

    drift: Array
    stored: Array


@dataclasses.dataclass(frozen=True)
class PolestarCommit(CommitPolicy):
    """Confidence threshold, plus early commits where drift rises above its own history.

    A masked row is accepted when its confidence c >= `threshold` (and the best one always), or
    early when early_threshold < c < threshold and
    gate_scale * max(0, gate_centre - c)^2 <= delta < delta_max, where delta is the row's drift
    minus the mean of its last `history` drifts in this block (arXiv 2607.14107, Polestar-Commit).

    Attributes:
        threshold: confidence at which a row is always accepted.
        early_threshold: confidence below which none is accepted early; None: no early commits.
        gate_scale, gate_centre: shape of the gate; `gate_centre` None means `threshold` (the
            released code has 0.9 whatever the threshold).
        delta_max: a delta this large is taken for a jump of context, not a decision.
        history: drift vectors remembered.
        suffix: also commit refreshed rows behind the block at `threshold` (needs a cache policy
            that refreshes such rows).
    """

    threshold: float = 0.9
    early_threshold: float | None = 0.7
    gate_scale: float = 10.0
    gate_centre: float | None = None
    delta_max: float = 2.0
    history: int = 5
    suffix: bool = True

    needs_drift = True

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, 0.0, 1.0)
        if self.early_threshold is not None:
            check_number("early_threshold", self.early_threshold, 0.0, 1.0)
            if self.early_threshold > self.threshold:
                raise PolestarError(
                    f"early_threshold ({self.early_threshold}) must not exceed threshold "
                    f"({self.threshold}); lower it, or pass None for no early commits"
                )
        check_number("gate_scale", self.gate_scale, 0.0, float("inf"))
        if self.gate_centre is not None:
            check_number("gate_centre", self.gate_centre, 0.0, 1.0)
        check_number("delta_max", self.delta_max, 0.0, float("inf"))
        check_integer("history", self.history, 1)
        if not isinstance(self.suffix, bool):
            raise PolestarError(f"suffix must be True or False, got {self.suffix!r}")

    @property
    def suffix_threshold(self) -> float | None:  # type: ignore[override]
        return self.threshold if self.suffix else None

    def init(self, batch: int, block_length: int) -> DriftHistory:
        return DriftHistory(
            drift=jnp.zeros((batch, self.history, block_length), jnp.float32),
            stored=jnp.zeros(batch, jnp.int32),
        )

    def start_block(self, state: DriftHistory, masked: Array) -> DriftHistory:
        return jax.tree.map(jnp.zeros_like, state)

    def select(
        self, view: CommitView, state: DriftHistory, active: Array
    ) -> tuple[Decision, DriftHistory]:
        confidence = view.confidence
        accept = view.masked & (
            (confidence >= self.threshold) | (rank(view.score, view.masked) == 0)
        )
        delta = drift_delta(view.drift, state)
        early = jnp.zeros_like(accept)
        gate = jnp.full(confidence.shape, jnp.nan, jnp.float32)
        if self.early_threshold is not None:
            centre = self.threshold if self.gate_centre is None else self.gate_centre
            gate = self.gate_scale * jnp.maximum(0.0, centre - confidence) ** 2
            between = (confidence > self.early_threshold) & (confidence < self.threshold)
            early = view.masked & between & (gate <= delta) & (delta < self.delta_max)
            early &= ~view.first
        decision = Decision(
            accept=accept,
            early=early,
            delta=jnp.where(view.first, jnp.nan, delta),
            gate=jnp.where(view.masked & ~view.first, gate, jnp.nan),
        )
        after = push(state, view.drift)
        return decision, keep_inactive(active & ~view.first, after, state)


def drift_delta(drift: Array, history: DriftHistory) -> Array:
    """Drift [B, L] minus the mean of the stored vectors; the drift itself where none is stored."""
    size = history.drift.shape[1]
    used = jnp.minimum(history.stored, size)
    valid = (jnp.arange(size)[None, :] < used[:, None])[..., None]
    total = jnp.sum(jnp.where(valid, history.drift, 0.0), axis=1)
    return drift - total / jnp.maximum(used, 1)[:, None].astype(jnp.float32)


def push(history: DriftHistory, drift: Array) -> DriftHistory:
    """Store a drift vector [B, L] in place of the oldest."""
    size = history.drift.shape[1]
    at = jnp.arange(size)[None, :] == (history.stored % size)[:, None]
    return DriftHistory(
        drift=jnp.where(at[..., None], drift[:, None, :], history.drift),
        stored=history.stored + 1,
    )
