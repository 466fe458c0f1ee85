"""The one decode loop: blocks outside, passes inside, all policies alike.

`step` is one pass. `generate` is the same passes as one compiled program; both are built from
`advance` and `run_phase`, so they cannot differ.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from polestar_jax.decoding.cache.base import PassOutput, Phase, SuffixPrediction
from polestar_jax.decoding.commit.base import CommitView, Decision
from polestar_jax.decoding.context import Context
from polestar_jax.decoding.passes import empty_memory
from polestar_jax.decoding.state import CAUSES, PASS_KINDS, DecodeState

if TYPE_CHECKING:
    pass

CONFIDENCE, DRIFT, SUFFIX, EOS = range(1, 1 + len(CAUSES))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PassRecord:
    """What one pass did; a trace stacks these along a leading axis [max_passes].

    Attributes:
        active: bool [B], the sequence took part.
        kind: int32 [B], index into PASS_KINDS.
        block: int32 [B].
        tokens: int32 [B, G], the canvas after the pass.
        cause: int8 [B, G], commits so far by cause.
        masked: bool [B, L], block rows still masked before the pass.
        prediction, confidence: int32 and float32 [B, L].
        drift, delta, gate: float32 [B, L], NaN where undefined.
        details: the cache policy's own record.
    """

    active: Array
    kind: Array
    block: Array
    tokens: Array
    cause: Array
    masked: Array
    prediction: Array
    confidence: Array
    drift: Array
    delta: Array
    gate: Array
    details: Any


def masks(ctx: Context, state: DecodeState) -> Array:
    """bool [B, G]: positions of the canvas still masked."""
    return state.tokens[:, ctx.prompt :] == ctx.model_config.mask_token


def block_masks(ctx: Context, state: DecodeState) -> Array:
    """bool [B, L]: positions of the current block still masked."""
    start = ctx.block_start(state.block)
    return ctx.rows_of(state.tokens, start, ctx.block_length) == ctx.model_config.mask_token


def empty_state(ctx: Context, tokens: Array, keys: Array, trace: bool = False) -> DecodeState:
    """State before the first pass: `tokens` int32 [B, T] with the canvas masked."""
    b, g = ctx.batch, ctx.config.gen_length
    zeros = jnp.zeros(b, jnp.int32)
    commit = ctx.config.commit
    state = DecodeState(
        tokens=tokens,
        pad=ctx.pad,
        keys=keys,
        block=jnp.int32(0),
        block_passes=jnp.int32(0),
        passes=jnp.int32(0),
        nfe=zeros,
        cause=jnp.zeros((b, g), jnp.int8),
        commit_pass=jnp.full((b, g), -1, jnp.int32),
        kinds=jnp.zeros((b, len(PASS_KINDS)), jnp.int32),
        refreshed_rows=zeros,
        last_commits=zeros,
        since_refresh=zeros,
        cache=ctx.config.cache.init(ctx),
        commit=commit.init(b, ctx.config.block_length),
        memory=empty_memory(ctx) if commit.needs_drift else None,
        trace=None,
    )
    state = start_block(ctx, state)
    if not trace:
        return state
    first = ctx.config.cache.phases()[0]
    record = jax.eval_shape(lambda s: run_pass(ctx, s, first)[1], state)
    size = ctx.config.max_passes
    buffers = jax.tree.map(lambda x: jnp.zeros((size, *x.shape), x.dtype), record)
    return dataclasses.replace(state, trace=buffers)


def start_block(ctx: Context, state: DecodeState) -> DecodeState:
    """Move to the first block in which any sequence has a mask (stay, if there is none)."""
    left = jnp.any(masks(ctx, state).reshape(ctx.batch, ctx.config.num_blocks, -1), axis=(0, 2))
    block = jnp.where(jnp.any(left), jnp.argmax(left), state.block).astype(jnp.int32)
    state = dataclasses.replace(
        state,
        block=block,
        block_passes=jnp.int32(0),
        last_commits=jnp.zeros_like(state.last_commits),
        since_refresh=jnp.zeros_like(state.since_refresh),
    )
    commit = ctx.config.commit.start_block(state.commit, block_masks(ctx, state))
    return dataclasses.replace(state, commit=commit)


def run_pass(ctx: Context, state: DecodeState, phase: Phase) -> tuple[DecodeState, PassRecord]:
    """One forward pass and its commits, for every sequence with masks in the current block."""
    masked = block_masks(ctx, state)
    active = jnp.any(masked, axis=-1)
    with jax.named_scope(f"{phase.name}_pass"):
        output = phase.run(ctx, state, active)
    with jax.named_scope("commit"):
        state, decision, drift = commit_block(ctx, state, output, masked, active)
        threshold = ctx.config.commit.suffix_threshold
        if output.suffix is not None and threshold is not None:
            state = commit_suffix(ctx, state, output.suffix, active, threshold)
        if ctx.config.stop_at_eos:
            state = fill_after_eos(ctx, state)
    nan = jnp.full(masked.shape, jnp.nan, jnp.float32)
    record = PassRecord(
        active=active,
        kind=output.kind,
        block=jnp.broadcast_to(state.block, active.shape),
        tokens=state.tokens[:, ctx.prompt :],
        cause=state.cause,
        masked=masked,
        prediction=output.prediction.token,
        confidence=output.prediction.confidence,
        drift=nan if drift is None else jnp.where(masked.any(-1, keepdims=True), drift, jnp.nan),
        delta=decision.delta,
        gate=decision.gate,
        details=output.details,
    )
    if output.refreshed_rows is not None:
        rows = jnp.where(active, output.refreshed_rows, 0)
        state = dataclasses.replace(state, refreshed_rows=state.refreshed_rows + rows)
    trace = state.trace
    if trace is not None:
        trace = jax.tree.map(lambda buf, x: buf.at[state.passes].set(x), trace, record)
    state = dataclasses.replace(
        state,
        block_passes=state.block_passes + 1,
        passes=state.passes + 1,
        nfe=state.nfe + active.astype(jnp.int32),
        kinds=state.kinds
        + jnp.where(active[:, None], jax.nn.one_hot(output.kind, 4, dtype=jnp.int32), 0),
        trace=trace,
    )
    return state, record


def commit_block(
    ctx: Context, state: DecodeState, output: PassOutput, masked: Array, active: Array
) -> tuple[DecodeState, Decision, Array | None]:
    """Apply the commit policy to the block's rows; also carries the attention memory on."""
    first = state.block_passes == 0
    drift, memory = output.drift, output.memory
    if memory is not None and state.memory is not None:
        keep = active[:, None, None]
        memory = dataclasses.replace(
            memory,
            scores=jnp.where(keep[..., None], memory.scores, state.memory.scores),
            normaliser=jnp.where(keep, memory.normaliser, state.memory.normaliser),
        )
    if drift is not None:
        drift = jnp.where(first, jnp.nan, drift)
    prediction = output.prediction
    view = CommitView(
        masked=masked,
        confidence=prediction.confidence,
        score=prediction.score,
        drift=jnp.zeros(masked.shape) if drift is None else jnp.nan_to_num(drift),
        first=first if drift is not None else jnp.bool_(True),
        gen_length=ctx.config.gen_length,
        num_blocks=ctx.config.num_blocks,
    )
    decision, commit = ctx.config.commit.select(view, state.commit, active)
    early = decision.early & masked & ~decision.accept
    cause = jnp.where(decision.accept & masked, CONFIDENCE, jnp.where(early, DRIFT, 0))
    cause = cause.astype(jnp.int8)
    start = ctx.block_start(state.block)
    old = ctx.rows_of(state.tokens, start, ctx.block_length)
    tokens = lax.dynamic_update_slice_in_dim(
        state.tokens, jnp.where(cause > 0, prediction.token, old), start, axis=1
    )
    gen = start - ctx.prompt
    causes = jnp.where(cause > 0, cause, ctx.rows_of(state.cause, gen, ctx.block_length))
    numbers = jnp.where(
        cause > 0, state.nfe[:, None], ctx.rows_of(state.commit_pass, gen, ctx.block_length)
    )
    count = jnp.sum(cause > 0, axis=-1, dtype=jnp.int32)
    state = dataclasses.replace(
        state,
        tokens=tokens,
        cause=lax.dynamic_update_slice_in_dim(state.cause, causes, gen, axis=1),
        commit_pass=lax.dynamic_update_slice_in_dim(state.commit_pass, numbers, gen, axis=1),
        cache=output.cache,
        commit=commit,
        memory=memory if memory is not None else state.memory,
        last_commits=jnp.where(active, count, state.last_commits),
        since_refresh=jnp.where(
            active,
            jnp.where(output.kind == PASS_KINDS.index("refresh"), 0, state.since_refresh) + count,
            state.since_refresh,
        ),
    )
    return state, decision, drift


def commit_suffix(
    ctx: Context, state: DecodeState, suffix: SuffixPrediction, active: Array, threshold: float
) -> DecodeState:
    """Commit refreshed positions behind the block whose confidence reaches the threshold."""
    masked = state.tokens == ctx.model_config.mask_token
    accept = suffix.candidate & masked & (suffix.confidence >= threshold) & active[:, None]
    tokens = jnp.where(accept, suffix.token, state.tokens)
    return record_commits(ctx, state, tokens, accept[:, ctx.prompt :], SUFFIX)


def fill_after_eos(ctx: Context, state: DecodeState) -> DecodeState:
    """Where the first EOS and all before it are committed, everything behind becomes EOS."""
    canvas = state.tokens[:, ctx.prompt :]
    masked = canvas == ctx.model_config.mask_token
    is_eos = canvas == ctx.model_config.eos_token
    # Positions after the first EOS: an EOS stands before them.
    behind = jnp.cumsum(is_eos, axis=-1) - is_eos.astype(jnp.int32) > 0
    open_before = jnp.any(masked & ~behind, axis=-1)
    fill = behind & ~open_before[:, None]
    tokens = jnp.where(fill, ctx.model_config.eos_token, canvas)
    tokens = jnp.concatenate([state.tokens[:, : ctx.prompt], tokens], axis=1)
    return record_commits(ctx, state, tokens, fill & masked, EOS)


def record_commits(
    ctx: Context, state: DecodeState, tokens: Array, accept: Array, cause: int
) -> DecodeState:
    """State with new tokens [B, T]; `accept` bool [B, G] marks what was committed and why."""
    return dataclasses.replace(
        state,
        tokens=tokens,
        cause=jnp.where(accept, cause, state.cause),
        commit_pass=jnp.where(accept, state.nfe[:, None], state.commit_pass),
    )


def finished(ctx: Context, state: DecodeState) -> Array:
    """bool scalar: no sequence has a mask left."""
    return ~jnp.any(masks(ctx, state))


def advance(ctx: Context, state: DecodeState) -> DecodeState:
    """Move to the next block with masks if the current one is complete."""
    complete = ~jnp.any(block_masks(ctx, state))
    moved = start_block(ctx, state)
    small = ("block", "block_passes", "last_commits", "since_refresh", "commit")
    changes = {
        name: jax.tree.map(
            lambda new, old: jnp.where(complete, new, old),
            getattr(moved, name),
            getattr(state, name),
        )
        for name in small
    }
    return dataclasses.replace(state, **changes)


def run_phase(
    ctx: Context, state: DecodeState, phase: Phase, limit: Array | None = None
) -> DecodeState:
    """Passes of one phase for as long as it is due and the block has masks.

    With `limit`, stops once the state counts that many passes.
    """

    def due(state: DecodeState) -> Array:
        active = jnp.any(block_masks(ctx, state), axis=-1)
        going = jnp.any(active) & phase.due(ctx, state, active)
        return going if limit is None else going & (state.passes < limit)

    return lax.while_loop(due, lambda s: run_pass(ctx, s, phase)[0], state)


def step(ctx: Context, state: DecodeState) -> DecodeState:
    """One pass, of whichever phase is due; none if no mask is left."""
    state = advance(ctx, state)
    limit = state.passes + 1
    for phase in ctx.config.cache.phases():
        state = run_phase(ctx, state, phase, limit)
    return state


def generate(ctx: Context, state: DecodeState) -> DecodeState:
    """All passes: block after block, in each the policy's phases as they fall due."""

    def round_of_phases(state: DecodeState) -> DecodeState:
        state = advance(ctx, state)
        for phase in ctx.config.cache.phases():
            state = run_phase(ctx, state, phase)
        return state

    return lax.while_loop(lambda s: ~finished(ctx, s), round_of_phases, state)
