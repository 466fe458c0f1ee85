"""From hidden rows to a token, its confidence and its rank score."""

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from polestar_jax.models.config import ModelConfig
from polestar_jax.models.transformer import Transformer

if TYPE_CHECKING:
    from polestar_jax.decoding.config import DecodeConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prediction:
    """Chosen token int32, its probability and rank score float32, each [B, R]."""

    token: Array
    confidence: Array
    score: Array


def legal_logits(logits: Array, config: ModelConfig) -> Array:
    """Logits [..., rows of the head] with the mask token and rows beyond the vocabulary at -inf."""
    column = jnp.arange(logits.shape[-1])
    legal = (column < config.vocab_size) & (column != config.mask_token)
    return jnp.where(legal, logits, -jnp.inf)


def predict(
    model: Transformer,
    config: "DecodeConfig",
    hidden: Array,
    keys: Array,
    passes: Array,
    positions: Array,
) -> Prediction:
    """Choose a token for every hidden row.

    Temperature 0 takes the arg max, otherwise the arg max of logits + T * Gumbel noise. The
    confidence is the token's probability under the untempered softmax in float32. Noise depends
    only on the sequence's key, its pass number and the generation position.

    Args:
        hidden: [B, R, M], before the final norm.
        keys: PRNG keys [B].
        passes: int32 [B], passes each sequence has made.
        positions: int32 [B, R], position in the generation of each row.
    """
    logits = legal_logits(model.logits(hidden), model.config)
    if config.temperature == 0:
        token = jnp.argmax(logits, axis=-1)
    else:
        noise = gumbel_noise(keys, passes, positions, logits.shape[-1])
        token = jnp.argmax(logits + jnp.float32(config.temperature) * noise, axis=-1)
    token = token.astype(jnp.int32)
    top = jnp.max(logits, axis=-1)
    total = jnp.sum(jnp.exp(logits - top[..., None]), axis=-1)
    chosen = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0]
    confidence = jnp.nan_to_num(jnp.exp(chosen - top) / total, nan=0.0)
    ranking = "random" if config.remasking == "random" else config.commit.ranking
    if ranking == "probability":
        score = confidence
    elif ranking == "margin":
        score = margin(logits, top, total)
    elif ranking == "entropy":
        probs = jnp.exp(logits - top[..., None]) / total[..., None]
        score = jnp.sum(probs * jnp.log(probs + 1e-10), axis=-1)
    else:
        score = jax.vmap(_uniform_rows)(keys, passes, positions)
    suppressed = suppressed_tokens(model.config, config)
    if suppressed:
        listed = jnp.asarray(suppressed, jnp.int32)[None, None, :]
        hit = jnp.any(token[..., None] == listed, axis=-1)
        # Below every threshold and behind every other row, whatever the ranking's range.
        confidence = jnp.where(hit, confidence - 2.0, confidence)
        score = jnp.where(hit, score - 1e6, score)
    return Prediction(token=token, confidence=confidence, score=score)


def margin(logits: Array, top: Array, total: Array) -> Array:
    """Largest minus second-largest probability; logits [..., V], top and total [...]."""
    best = jnp.argmax(logits, axis=-1)
    column = jax.lax.broadcasted_iota(best.dtype, logits.shape, logits.ndim - 1)
    others = jnp.where(column == best[..., None], -jnp.inf, logits)
    return (1.0 - jnp.exp(jnp.max(others, axis=-1) - top)) / total


def suppressed_tokens(model: ModelConfig, config: "DecodeConfig") -> tuple[int, ...]:
    """Tokens that `suppress_eos` and `suppress_eot` push behind all others."""
    eos = (model.eos_token,) if config.suppress_eos else ()
    eot = (model.eot_token,) if config.suppress_eot and model.eot_token is not None else ()
    return eos + eot


def gumbel_noise(keys: Array, passes: Array, positions: Array, vocab: int) -> Array:
    """Standard Gumbel noise, float32 [B, R, vocab]."""

    def one(key: Array, position: Array) -> Array:
        return jax.random.gumbel(jax.random.fold_in(key, position), (vocab,), jnp.float32)

    def rows(key: Array, step: Array, where: Array) -> Array:
        return jax.vmap(one, (None, 0))(jax.random.fold_in(key, step), where)

    return jax.vmap(rows)(keys, passes, positions)


def _uniform_rows(key: Array, step: Array, positions: Array) -> Array:
    # A second stream, so that a random ranking does not depend on the sampled tokens' noise.
    key = jax.random.fold_in(jax.random.fold_in(key, step), 2**31)
    return jax.vmap(lambda p: jax.random.uniform(jax.random.fold_in(key, p)))(positions)
