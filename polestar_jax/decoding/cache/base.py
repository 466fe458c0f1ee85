"""What a cache policy is: which rows a pass recomputes, and what it keeps for later passes."""

import abc
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from polestar_jax.decoding.context import Context
from polestar_jax.decoding.passes import RowsResult
from polestar_jax.decoding.predict import Prediction, predict
from polestar_jax.decoding.state import AttentionMemory, DecodeState

if TYPE_CHECKING:
    pass


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SuffixPrediction:
    """Predictions for refreshed positions behind the block.

    token int32, confidence float32 and candidate bool, each [B, T]; only candidates mean anything.
    """

    token: Array
    confidence: Array
    candidate: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PassOutput:
    """What a pass hands back to the loop.

    Attributes:
        prediction: tokens and confidences of the block's rows.
        cache: the policy's pytree after the pass.
        kind: int32 [B], index into PASS_KINDS.
        memory, drift: the last layer's attention and its drift [B, L], where measured.
        suffix: predictions behind the block, or None.
        refreshed_rows: int32 [B], rows recomputed by a sparse refresh, summed over layers.
        details: what a trace records besides (a pytree of [B, ...] arrays; the same structure
            for every pass of a policy).
    """

    prediction: Prediction
    cache: Any
    kind: Array
    memory: AttentionMemory | None = None
    drift: Array | None = None
    suffix: SuffixPrediction | None = None
    refreshed_rows: Array | None = None
    details: Any = None


@dataclasses.dataclass(frozen=True)
class Phase:
    """One kind of pass: `run` it while `due`.

    `due(ctx, state, active)` is a bool scalar; `run(ctx, state, active)` the pass. Of a policy's
    phases exactly one is due at any time while the block has masks. The loop runs each phase as
    a loop of its own: unlike the branches of a conditional, that updates caches in place.
    """

    name: str
    due: Callable[[Context, DecodeState, Array], Array]
    run: Callable[[Context, DecodeState, Array], PassOutput]


class CachePolicy(abc.ABC):
    """Frozen, hashable rule for what a pass recomputes."""

    def check(self, block_length: int) -> None:  # noqa: B027 (most policies fit any)
        """Raise PolestarError where the policy does not fit the lengths."""

    def init(self, ctx: Context) -> Any:
        """The policy's pytree before the first pass."""
        return ()

    @abc.abstractmethod
    def phases(self) -> tuple[Phase, ...]:
        """The kinds of passes, in the order in which a block meets them."""


def opening_due(ctx: Context, state: DecodeState, active: Array) -> Array:
    """The block's first pass."""
    return state.block_passes == 0


def opened(ctx: Context, state: DecodeState, active: Array) -> Array:
    """Any pass but the block's first."""
    return state.block_passes > 0


def always(ctx: Context, state: DecodeState, active: Array) -> Array:
    """Every pass."""
    return jnp.bool_(True)


def block_positions(ctx: Context, state: DecodeState) -> Array:
    """Generation positions of the block's rows, int32 [B, L]."""
    rows = state.block * ctx.block_length + jnp.arange(ctx.block_length)
    return jnp.broadcast_to(rows, (ctx.batch, ctx.block_length))


def predict_block(ctx: Context, state: DecodeState, hidden: Array) -> Prediction:
    """Predictions for the block from its hidden rows [B, L, M]."""
    return predict(
        ctx.model, ctx.config, hidden, state.keys, state.nfe, block_positions(ctx, state)
    )


def plain_output(
    ctx: Context, state: DecodeState, result: RowsResult, cache: Any, kind: int
) -> PassOutput:
    """Output of a pass that only predicts the block."""
    return PassOutput(
        prediction=predict_block(ctx, state, result.hidden),
        cache=cache,
        kind=jnp.full((ctx.batch,), kind, jnp.int32),
        memory=result.memory,
        drift=result.drift,
    )


def full_writable(ctx: Context, active: Array) -> Array | None:
    """Rows a full pass may write, [B, T]; None (all) for one sequence, which is always active."""
    if ctx.batch == 1:
        return None
    return jnp.broadcast_to(active[:, None], (ctx.batch, ctx.total))
