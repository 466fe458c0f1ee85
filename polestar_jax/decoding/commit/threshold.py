"""Commit every row whose confidence reaches a threshold; always the best one."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from polestar_jax.checks import check_integer, check_number
from polestar_jax.decoding.commit.base import (
    CommitPolicy,
    CommitView,
    Decision,
    keep_inactive,
    plain_decision,
    rank,
)
from polestar_jax.errors import PolestarError


@dataclasses.dataclass(frozen=True)
class ThresholdCommit(CommitPolicy):
    """Every masked row with confidence >= `threshold`, and always the most confident one.

    With `steps` (Dream's `confidence_threshold`), at most q = gen_length / steps + carry of the
    most confident rows are considered in a pass, carry being what earlier passes left unused; the
    decoding goes on past `steps` until no mask is left. Without it there is no such limit.
    """

    threshold: float = 0.9
    steps: int | None = None

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, 0.0, 1.0)
        if self.steps is not None:
            check_integer("steps", self.steps, 1)

    def init(self, batch: int, block_length: int) -> Any:
        return () if self.steps is None else jnp.zeros(batch, jnp.int32)

    def start_block(self, state: Any, masked: Array) -> Any:
        return jax.tree.map(jnp.zeros_like, state)

    def check(self, gen_length: int, num_blocks: int) -> None:
        if self.steps is not None and gen_length % self.steps:
            raise PolestarError(
                f"ThresholdCommit(steps={self.steps}) must divide gen_length ({gen_length})"
            )

    def select(self, view: CommitView, state: Any, active: Array) -> tuple[Decision, Any]:
        order = rank(view.score, view.masked)
        accept = view.masked & ((view.confidence >= self.threshold) | (order == 0))
        if self.steps is None:
            return plain_decision(accept), state
        budget = state + view.gen_length // self.steps
        accept &= order < budget[:, None]
        carry = budget - jnp.sum(accept, axis=-1, dtype=jnp.int32)
        return plain_decision(accept), keep_inactive(active, carry, state)
