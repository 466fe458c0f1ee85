"""Commit a fixed number of rows per pass: LLaDA's uniform and Dream's own schedule."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from polestar_jax.checks import check_choice, check_integer
from polestar_jax.decoding.commit.base import (
    CommitPolicy,
    CommitView,
    Decision,
    keep_inactive,
    plain_decision,
    rank,
)
from polestar_jax.errors import PolestarError

DREAM_LAST_TIME = 1e-3  # epsilon of Dream's timesteps


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FixedState:
    """Masks the block had at its start and passes made in it, int32 [B] each."""

    masks: Array
    step: Array


@dataclasses.dataclass(frozen=True)
class FixedCommit(CommitPolicy):
    """Spread each block's masks over `steps` / number of blocks passes, best rows first.

    Attributes:
        steps: passes for the whole generation; None means one token a pass. A multiple of the
            number of blocks.
        confidence: what "best" means: "probability", "margin" (first minus second probability) or
            "entropy" (negative entropy).
        schedule: "uniform" commits m // s rows a pass, one more in the first m mod s (at least
            one while masks are left); "dream" commits int(m * (1 - t_next / t)) of the m masks
            left, t linear from 1 to 1e-3, all in the last pass. Early "dream" passes may commit
            none.
    """

    steps: int | None = None
    confidence: str = "probability"
    schedule: str = "uniform"

    ranks_only = True

    def __post_init__(self) -> None:
        if self.steps is not None:
            check_integer("steps", self.steps, 1)
        check_choice("confidence", self.confidence, ("probability", "margin", "entropy"))
        check_choice("schedule", self.schedule, ("uniform", "dream"))

    @property
    def ranking(self) -> str:  # type: ignore[override]
        return self.confidence

    def check(self, gen_length: int, num_blocks: int) -> None:
        if self.steps is None:
            return
        if self.steps % num_blocks:
            raise PolestarError(
                f"steps ({self.steps}) must be a multiple of the number of blocks ({num_blocks})"
            )
        if self.steps > gen_length and self.schedule == "uniform":
            raise PolestarError(
                f"steps ({self.steps}) exceeds gen_length ({gen_length}): every pass commits at "
                f"least one token, so use at most {gen_length}"
            )

    def max_passes(self, gen_length: int, num_blocks: int) -> int:
        return max(gen_length, self.steps or 0)

    def init(self, batch: int, block_length: int) -> FixedState:
        zeros = jnp.zeros(batch, jnp.int32)
        return FixedState(masks=zeros, step=zeros)

    def start_block(self, state: FixedState, masked: Array) -> FixedState:
        count = jnp.sum(masked, axis=-1, dtype=jnp.int32)
        return FixedState(masks=count, step=jnp.zeros_like(state.step))

    def select(
        self, view: CommitView, state: FixedState, active: Array
    ) -> tuple[Decision, FixedState]:
        steps = (self.steps or view.gen_length) // view.num_blocks
        left = jnp.sum(view.masked, axis=-1, dtype=jnp.int32)
        if self.schedule == "uniform":
            count = jnp.where(
                state.step < state.masks % steps,
                state.masks // steps + 1,
                state.masks // steps,
            )
            count = jnp.where(state.step < steps, jnp.maximum(count, 1), left)
        else:
            step = jnp.minimum(state.step, steps - 1)
            share = jnp.asarray(dream_shares(steps))[step]
            count = (left.astype(jnp.float32) * share).astype(jnp.int32)
            count = jnp.where(step == steps - 1, left, count)
        accept = view.masked & (rank(view.score, view.masked) < count[:, None])
        after = dataclasses.replace(state, step=state.step + 1)
        return plain_decision(accept), keep_inactive(active, after, state)


def dream_shares(steps: int) -> Any:
    """1 - t_next / t for each pass, float32 [steps], computed in float32 as Dream does."""
    i = np.arange(steps + 1, dtype=np.float32)
    size = (np.float32(DREAM_LAST_TIME) - np.float32(1)) / np.float32(steps)
    rising, falling = np.float32(1) + size * i, np.float32(DREAM_LAST_TIME) - size * (steps - i)
    t = np.where(i < (steps + 1) // 2, rising, falling).astype(np.float32)
    return np.float32(1) - t[1:] / t[:-1]
