"""What a commit policy sees and must provide."""

import abc
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["masked", "confidence", "score", "drift", "first"],
    meta_fields=["gen_length", "num_blocks"],
)
@dataclasses.dataclass(frozen=True)
class CommitView:
    """The block after a pass; L rows per sequence.

    Attributes:
        masked: bool [B, L], the candidates.
        confidence: float32 [B, L], probability of the chosen token under the untempered softmax.
        score: float32 [B, L], what rows are ranked by (probability, margin, entropy or random).
        drift: float32 [B, L], attention drift since the previous pass; 0 where none is defined.
        first: bool scalar, this is the block's first pass: no drift is defined.
        gen_length, num_blocks: static lengths of the generation.
    """

    masked: Array
    confidence: Array
    score: Array
    drift: Array
    first: Array
    gen_length: int
    num_blocks: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Decision:
    """What to commit: `accept` bool [B, L] by confidence or rank, `early` bool [B, L] by drift.

    `delta` and `gate`, float32 [B, L], are recorded in traces; NaN where undefined.
    """

    accept: Array
    early: Array
    delta: Array
    gate: Array


class CommitPolicy(abc.ABC):
    """Frozen, hashable rule that chooses the masked rows to accept after each pass."""

    ranking = "probability"  # what rows are ranked by: "probability", "margin" or "entropy"
    ranks_only = False  # True: looks at the ranking alone, so a random ranking makes sense
    needs_drift = False  # True: passes compute the last layer's attention drift
    suffix_threshold: float | None = None  # commit refreshed suffix rows at this confidence

    @abc.abstractmethod
    def select(self, view: CommitView, state: Any, active: Array) -> tuple[Decision, Any]:
        """Choose rows. `active` bool [B]: sequences this pass counts for; others keep state."""

    def init(self, batch: int, block_length: int) -> Any:
        """State carried from pass to pass (a pytree with leading axis B, or ())."""
        return ()

    def start_block(self, state: Any, masked: Array) -> Any:
        """State at the start of a block with masks [B, L]."""
        return state

    def check(self, gen_length: int, num_blocks: int) -> None:  # noqa: B027 (most rules fit any)
        """Raise PolestarError where the rule does not fit these lengths."""

    def max_passes(self, gen_length: int, num_blocks: int) -> int:
        """Upper bound of the passes of one sequence: at least one token is committed in each."""
        return gen_length


def rank(score: Array, masked: Array) -> Array:
    """Rank of each masked row, int32 [B, L]: 0 the highest score, ties to the lowest position.

    Rows that are not masked rank behind all masked ones.
    """
    score = jnp.where(masked, jnp.nan_to_num(score, nan=-jnp.inf), -jnp.inf)
    position = jnp.arange(score.shape[-1])
    other, own = score[:, None, :], score[:, :, None]
    other_masked, own_masked = masked[:, None, :], masked[:, :, None]
    ahead = (other > own) | ((other == own) & (position[None, None, :] < position[None, :, None]))
    ahead = jnp.where(other_masked == own_masked, ahead, other_masked)
    return jnp.sum(ahead, axis=-1, dtype=jnp.int32)


def plain_decision(accept: Array) -> Decision:
    """A decision without early commits."""
    nan = jnp.full(accept.shape, jnp.nan, jnp.float32)
    return Decision(accept=accept, early=jnp.zeros_like(accept), delta=nan, gate=nan)


def keep_inactive(active: Array, new: Any, old: Any) -> Any:
    """`new` for active sequences, `old` for the others; leaves have the batch axis first."""

    def pick(a: Array, b: Array) -> Array:
        return jnp.where(active.reshape(-1, *([1] * (a.ndim - 1))), a, b)

    return jax.tree.map(pick, new, old)
