"""Initial parameters and the differentiable forward pass, built on the package's transformer."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from benchmarks.embedded.data import Batch, Rows
from polestar_jax.models.config import ModelConfig
from polestar_jax.models.rope import apply_rope, rope_tables
from polestar_jax.models.transformer import (
    Transformer,
    abstract_transformer,
    layer_shapes,
    params_from_flat,
)

# Parameters while training: those of the layers stacked, name -> [layers, ...].
Stacked = dict[str, Array]


CONSTANT = 3.0  # of every token's embedding in dimension 0, from which heads find a direction
SHARPNESS, MATCH = 6.5, 1.4
NEAR, FAR = slice(0, 6), slice(8, 16)  # pairs of a head that turn fast and slowly with distance


def initial(config: ModelConfig, key: Array) -> Stacked:
    """Parameters from which copying and pairing are learnt quickly.

    The head starts as the scaled transpose of the embedding, and the value and output projections
    as an orthogonal matrix and its transpose, so that an attended token is written out from the
    first step on. `_pairing` lays out what a name's other half is found by.
    """
    m, layers = config.width, config.num_layers
    keys = iter(jax.random.split(key, 16))
    embed = 0.5 * jax.random.normal(next(keys), (config.embedding_rows, m))
    head = embed.T * (0.25 / m**0.5)
    params: Stacked = {
        "embed": embed.at[:, 0].set(CONSTANT), "head": head.at[0].set(0.0), "norm": jnp.ones(m)
    }  # fmt: skip
    for name, shape in layer_shapes(config).items():
        if name.endswith("norm"):
            params[name] = jnp.ones((layers, *shape))
        else:
            params[name] = jax.random.normal(next(keys), (layers, *shape)) * shape[0] ** -0.5
    turn = jax.random.orthogonal(next(keys), m, (layers,))
    params["v"], params["o"] = turn, turn.transpose(0, 2, 1)
    params["down"] /= (2 * layers) ** 0.5
    return _pairing(config, params, next(keys))


def _pairing(config: ModelConfig, params: Stacked, key: Array) -> Stacked:
    """Lay out heads 0 and 1 of the first two layers to find the neighbour of an equal token.

    In the first layer they attend to the token before and behind and write down which it was, as a
    code; in the second they attend to the tokens with the same code, which is where the prompt has
    the same neighbour, and copy those. Without it a trial of 28 M tokens put names in order but
    never learnt which first name goes with which last name: 1.5 nats a name after 600 steps of
    nothing else, with it 0.06 nats after 150.
    """
    if config.num_heads < 2 or config.num_layers < 2 or config.head_dim < 32:
        return params
    m, d = config.width, config.head_dim
    half = d // 2
    constant = CONSTANT / (0.25 * (m - 1) / m + CONSTANT**2 / m) ** 0.5  # after the norm
    aim = jnp.zeros(d).at[NEAR].set(SHARPNESS / constant)
    pairs = [*range(FAR.start, FAR.stop), *range(half + FAR.start, half + FAR.stop)]
    for head, (offset, own) in enumerate(zip((-1, 1), jax.random.split(key))):
        columns = slice(head * d, (head + 1) * d)
        tables = rope_tables(jnp.asarray([[-offset]]), d, config.rope_theta)
        turned = apply_rope(aim[None, None, None, :], *tables)[0, 0, 0]
        code = jax.random.orthogonal(own, m - 1)[:d]
        code = jnp.concatenate([jnp.zeros((d, 1)), code], axis=1)
        params["o"] = params["o"].at[0, columns].set(code)
        match = jnp.zeros((m, d)).at[:, jnp.asarray(pairs)].set(MATCH * code[: len(pairs)].T)
        for name in ("q", "k"):
            faint = params[name].at[:2, :, columns].multiply(0.1)
            faint = faint.at[0, 0, columns].set(aim if name == "q" else turned)
            params[name] = faint.at[1, :, columns].add(match)
    return params


def unstacked(params: Stacked) -> dict[str, Array]:
    """The flat names of `polestar_jax.models.transformer.parameter_shapes`."""
    outer = ("embed", "norm", "head")
    flat = {name: params[name] for name in outer}
    for name in params.keys() - set(outer):
        flat |= {f"layers.{i}.{name}": value for i, value in enumerate(params[name])}
    return flat


def stacked(config: ModelConfig, flat: dict[str, Array]) -> Stacked:
    """The inverse of `unstacked`."""
    params: Stacked = {name: flat[name] for name in ("embed", "norm", "head")}
    for name in layer_shapes(config):
        params[name] = jnp.stack([flat[f"layers.{i}.{name}"] for i in range(config.num_layers)])
    return params


def forward(
    config: ModelConfig, params: Stacked, tokens: Rows, start: Rows, length: Rows, window: int
) -> Array:
    """Logits float32 [B, window, V] of the tokens from `start` [B] on.

    `tokens` int32 [B, T]; each row attends to its first `length` [B] tokens. Rows of the window
    that lie behind the last token repeat it. The last layer is computed for the window only.
    """
    graph, _ = abstract_transformer(config, params["embed"].dtype)
    model: Transformer = nnx.merge(graph, params_from_flat(config, unstacked(params)))
    size = tokens.shape[1]
    position = jnp.arange(size)[None]
    tables = rope_tables(position, config.head_dim, config.rope_theta)
    looked_at = jnp.minimum(jnp.asarray(start)[:, None] + jnp.arange(window)[None], size - 1)
    seen = (position < jnp.asarray(length)[:, None])[:, None, None, :]
    x = model.embed_tokens(jnp.asarray(tokens))
    for layer in range(config.num_layers):
        normed = model.normed(layer, "attn_norm", x)
        key, value = model.key_value(layer, normed)
        key = apply_rope(key, *tables)
        if layer == config.num_layers - 1:
            x, normed = (jnp.take_along_axis(y, looked_at[..., None], axis=1) for y in (x, normed))
            tables = rope_tables(looked_at, config.head_dim, config.rope_theta)
        query = apply_rope(model.query(layer, normed), *tables)
        score = jnp.einsum("bqhd,bkhd->bhqk", query, key)
        share = jax.nn.softmax(jnp.where(seen, score * config.head_dim**-0.5, -1e9), axis=-1)
        attended = jnp.einsum("bhqk,bkhd->bqhd", share, value)
        x = model.finish(layer, x, attended.reshape(x.shape))
    return model.logits(x)


def loss(config: ModelConfig, params: Stacked, batch: Batch) -> tuple[Array, Array]:
    """Weighted cross-entropy of the masked tokens, and each row's share of it [B]."""
    target, window = jnp.asarray(batch.target), batch.target.shape[1]
    logits = forward(config, params, batch.noisy, batch.start, batch.length, window)
    chosen = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
    nats = jax.nn.logsumexp(logits, axis=-1) - chosen
    rows = jnp.sum(nats * batch.weight, axis=-1)
    return jnp.sum(rows), rows
