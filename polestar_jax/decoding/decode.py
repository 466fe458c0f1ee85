"""From prompts to text: padding, buckets, the compiled program, statistics."""

import dataclasses
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from polestar_jax.decoding import loop
from polestar_jax.decoding.config import DecodeConfig
from polestar_jax.decoding.context import Context, make_context
from polestar_jax.decoding.prompts import Prompts, prepare_prompts
from polestar_jax.decoding.state import CAUSES, PASS_KINDS, DecodeState
from polestar_jax.errors import PolestarError
from polestar_jax.memory import explain_exhaustion
from polestar_jax.models.config import ModelConfig
from polestar_jax.models.transformer import Params, abstract_transformer

if TYPE_CHECKING:
    from polestar_jax.weights import Model


@dataclasses.dataclass(frozen=True)
class DecodeStats:
    """Per-sequence statistics, NumPy arrays [B].

    Attributes:
        commits: tokens committed, by cause ("confidence", "drift", "suffix", "eos").
        passes: passes by kind ("full", "windowed", "cached", "refresh").
        refreshed_rows: rows recomputed by sparse refreshes, summed over layers.
        generated: answer tokens: those before the first EOS, without padding.
        tokens_per_forward: `generated` / NFE.
    """

    commits: dict[str, np.ndarray]
    passes: dict[str, np.ndarray]
    refreshed_rows: np.ndarray
    generated: np.ndarray
    tokens_per_forward: np.ndarray


@dataclasses.dataclass(frozen=True)
class DecodeResult:
    """What `decode` returns.

    Attributes:
        tokens: int32 [B, G].
        nfe: int32 [B], forward passes of each sequence.
        text: one string per sequence if the model has a tokenizer, else None.
        stats: see `DecodeStats`.
        trace: a `PassRecord` with leading axis [max_passes] if asked for; a sequence took part
            in pass i where `active[i]`.
        commit_pass: int32 [B, G], the pass of the sequence in which each token was committed.
        cause: int8 [B, G], 1 + index into `CAUSES`.
    """

    tokens: np.ndarray
    nfe: np.ndarray
    text: list[str] | None
    stats: DecodeStats
    trace: loop.PassRecord | None
    commit_pass: np.ndarray
    cause: np.ndarray


def context_of(
    model: ModelConfig, params: Params, config: DecodeConfig, state_tokens: Array, pad: Array
) -> Context:
    """Context inside a traced function."""
    graph, _ = abstract_transformer(model, jax.tree.leaves(params)[0].dtype)
    return make_context(nnx.merge(graph, params), config, state_tokens.shape[1], pad)


@jax.jit(static_argnames=("model", "config", "trace"))
def start_program(
    params: Params,
    tokens: Array,
    pad: Array,
    keys: Array,
    *,
    model: ModelConfig,
    config: DecodeConfig,
    trace: bool,
) -> DecodeState:
    """Allocate the state: int32 tokens [B, T], pad [B], keys [B]."""
    return loop.empty_state(context_of(model, params, config, tokens, pad), tokens, keys, trace)


@jax.jit(static_argnames=("model", "config"), donate_argnames=("state",))
def decode_program(
    params: Params, state: DecodeState, *, model: ModelConfig, config: DecodeConfig
) -> DecodeState:
    """The whole generation as one program; the state's buffers are reused."""
    return loop.generate(context_of(model, params, config, state.tokens, state.pad), state)


@jax.jit(static_argnames=("model", "config"))
def step_program(
    params: Params, state: DecodeState, *, model: ModelConfig, config: DecodeConfig
) -> DecodeState:
    """One pass; the state handed in stays valid."""
    return loop.step(context_of(model, params, config, state.tokens, state.pad), state)


def init_state(
    model: "Model",
    prompts: Any,
    config: DecodeConfig,
    key: Array | None = None,
    *,
    trace: bool = False,
) -> DecodeState:
    """State before the first pass; arguments as in `decode`."""
    config = _checked(config)
    prepared = prepare_prompts(model, prompts, config)
    keys = _row_keys(key, prepared, config)
    with _explained(model, config, prepared):
        return jax.block_until_ready(_start(model, prepared, config, keys, trace))


def decode_step(model: "Model", state: DecodeState, config: DecodeConfig) -> DecodeState:
    """One pass, pure: returns the state after it and leaves `state` as it was.

    Calling it until `is_done(state, model)` gives exactly the tokens of `decode`.
    """
    return step_program(model.params, state, model=model.config, config=config)


def is_done(state: DecodeState, model: "Model") -> bool:
    """Whether no mask is left in any sequence's canvas."""
    size = state.cause.shape[1]
    return not bool(jnp.any(state.tokens[:, -size:] == model.config.mask_token))


def decode(
    model: "Model",
    prompts: Any,
    config: DecodeConfig | None = None,
    key: Array | None = None,
    *,
    trace: bool = False,
) -> DecodeResult:
    """Generate `config.gen_length` tokens for every prompt, as one compiled program.

    Args:
        model: from `load`.
        prompts: a string, a list of strings, a list of token-id lists, or an int array [B, P].
            Strings go through the chat template of instruct models.
        config: a `DecodeConfig`, e.g. from `preset`; None means the default one.
        key: PRNG key for temperature > 0 or random remasking. Sequence i uses
            `fold_in(key, i)`; an array of keys [B] gives each sequence its own.
        trace: also return what every pass did.

    Raises:
        PolestarError: prompts or settings that cannot work, before anything is compiled.
    """
    config = _checked(config)
    prepared = prepare_prompts(model, prompts, config)
    keys = _row_keys(key, prepared, config)
    with _explained(model, config, prepared):
        state = _start(model, prepared, config, keys, trace)
        state = decode_program(model.params, state, model=model.config, config=config)
        return collect(model, state)


def collect(model: "Model", state: DecodeState) -> DecodeResult:
    """Bring a finished state to the host."""
    fields = (state.tokens, state.nfe, state.cause, state.commit_pass, state.kinds)
    tokens, nfe, cause, commit_pass, kinds = (np.asarray(x) for x in jax.device_get(fields))
    tokens = tokens[:, -cause.shape[1] :]
    c = model.config
    before_eos = np.cumsum(tokens == c.eos_token, axis=1) == 0
    generated = (before_eos & (tokens != c.pad_token)).sum(axis=1)
    stats = DecodeStats(
        commits={name: (cause == 1 + i).sum(axis=1) for i, name in enumerate(CAUSES)},
        passes={name: kinds[:, i] for i, name in enumerate(PASS_KINDS)},
        refreshed_rows=np.asarray(state.refreshed_rows),
        generated=generated,
        tokens_per_forward=generated / np.maximum(nfe, 1),
    )
    text = None
    if model.tokenizer is not None:
        text = [model.tokenizer.decode(row.tolist()) for row in tokens]
    return DecodeResult(tokens, nfe, text, stats, state.trace, commit_pass, cause)


def _start(
    model: "Model", prompts: Prompts, config: DecodeConfig, keys: Array, trace: bool
) -> DecodeState:
    return start_program(
        model.params,
        jnp.asarray(prompts.tokens),
        jnp.asarray(prompts.pad),
        keys,
        model=model.config,
        config=config,
        trace=trace,
    )


def _explained(model: "Model", config: DecodeConfig, prompts: Prompts) -> AbstractContextManager:
    """Out-of-memory errors come with the plan and the remedy."""
    batch, total = prompts.tokens.shape
    return explain_exhaustion(model, config, batch, total - config.gen_length)


def _checked(config: DecodeConfig | None) -> DecodeConfig:
    if config is None:
        return DecodeConfig()
    if not isinstance(config, DecodeConfig):
        raise PolestarError(
            f"config must be a DecodeConfig, e.g. preset('polestar'), got {config!r:.80}"
        )
    return config


def _row_keys(key: Array | None, prompts: Prompts, config: DecodeConfig) -> Array:
    """One PRNG key per sequence."""
    batch = prompts.tokens.shape[0]
    if key is None:
        if config.temperature > 0 or config.remasking == "random":
            raise PolestarError(
                f"temperature={config.temperature} and remasking={config.remasking!r} draw random "
                "numbers; pass key=jax.random.key(seed)"
            )
        key = jax.random.key(0)
    if not isinstance(key, jax.Array):
        raise PolestarError(f"key must be made by jax.random.key(seed), got {key!r:.80}")
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    if key.ndim == 0:
        return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(batch))
    if key.shape != (batch,):
        raise PolestarError(f"got {key.shape} keys for {batch} prompts; pass one key or one each")
    return key
