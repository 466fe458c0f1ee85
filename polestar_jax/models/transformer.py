"""One bidirectional transformer for LLaDA and Dream, as Flax NNX modules without side effects.

Symbols: B batch, R rows, T cached positions, M width, H query heads, Hk key/value heads, D head
size, F MLP width, V vocabulary. Matrices are stored [in, out]; every layer has its own arrays, so
that a pass reads each weight once and copies none.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from polestar_jax.errors import PolestarError
from polestar_jax.models.config import ModelConfig

Params = nnx.State


def precision_of(dtype: jnp.dtype) -> lax.Precision:
    """Full products in float32 (no TF32), the hardware's own in half precision."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def matmul(x: Array, w: Array) -> Array:
    return jnp.matmul(x, w, precision=precision_of(x.dtype))


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / sqrt(mean x^2 + eps) * weight, in float32, returned in x's dtype."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    weight = jnp.expand_dims(weight.astype(jnp.float32), tuple(range(x.ndim - 1)))
    return (wide * scale * weight).astype(x.dtype)


class Block(nnx.Module):
    """One layer: attention and gated MLP, each behind a norm and a residual."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        for name, shape in layer_shapes(config).items():
            setattr(self, name, nnx.Param(jnp.zeros(shape, dtype)))

    def project(self, name: str, x: Array) -> Array:
        """x [B, R, M] times the matrix `name` (plus its bias where the family has one)."""
        y = matmul(x, getattr(self, name)[...])
        bias = getattr(self, f"{name}_bias", None)
        return y if bias is None else y + bias[...][None, None, :]

    def mlp(self, x: Array) -> Array:
        """down(silu(gate(x)) * up(x)); x [B, R, M] normed."""
        return self.project("down", jax.nn.silu(self.project("gate", x)) * self.project("up", x))


class Transformer(nnx.Module):
    """Embedding, layers, final norm and head; `config` is static."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype = jnp.float32) -> None:
        self.config = config
        self.embed = nnx.Param(jnp.zeros((config.embedding_rows, config.width), dtype))
        self.layers = nnx.List([Block(config, dtype) for _ in range(config.num_layers)])
        self.norm = nnx.Param(jnp.zeros((config.width,), dtype))
        if not config.tied_head:
            self.head = nnx.Param(jnp.zeros((config.width, config.embedding_rows), dtype))

    @property
    def dtype(self) -> jnp.dtype:
        return self.embed[...].dtype

    def embed_tokens(self, tokens: Array) -> Array:
        """int32 [B, R] -> [B, R, M]."""
        return jnp.take(self.embed[...], tokens, axis=0)

    def normed(self, layer: int, name: str, x: Array) -> Array:
        """x [B, R, M] behind the layer's `attn_norm` or `mlp_norm`."""
        return rms_norm(x, getattr(self.layers[layer], name)[...], self.config.norm_eps)

    def query(self, layer: int, normed: Array) -> Array:
        """[B, R, M] normed rows -> un-rotated queries [B, R, H, D]."""
        y = self.layers[layer].project("q", normed)
        return y.reshape(*y.shape[:-1], self.config.num_heads, self.config.head_dim)

    def key_value(self, layer: int, normed: Array) -> tuple[Array, Array]:
        """[B, R, M] normed rows -> un-rotated keys and values [B, R, Hk, D]."""
        block, c = self.layers[layer], self.config
        k, v = block.project("k", normed), block.project("v", normed)
        shape = (*k.shape[:-1], c.num_kv_heads, c.head_dim)
        return k.reshape(shape), v.reshape(shape)

    def finish(self, layer: int, x: Array, attended: Array) -> Array:
        """Output projection, residual and MLP: x [B, R, M], attended [B, R, H * D] -> [B, R, M]."""
        block = self.layers[layer]
        x = x + block.project("o", attended)
        return x + block.mlp(self.normed(layer, "mlp_norm", x))

    def logits(self, x: Array) -> Array:
        """Final norm and head on the given rows only: [B, R, M] -> float32 [B, R, rows of head]."""
        x = rms_norm(x, self.norm[...], self.config.norm_eps)
        weight, contract = (self.embed, 1) if self.config.tied_head else (self.head, 0)
        return lax.dot_general(
            x,
            weight[...],
            (((x.ndim - 1,), (contract,)), ((), ())),
            precision=precision_of(x.dtype),
            preferred_element_type=jnp.float32,
        )


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every array of one layer."""
    m, f = config.width, config.mlp_width
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (m,), "q": (m, q), "k": (m, kv), "v": (m, kv), "o": (q, m),
        "mlp_norm": (m,), "gate": (m, f), "up": (m, f), "down": (f, m),
    }  # fmt: skip
    if config.qkv_bias:
        shapes |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
    return shapes


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Flat name -> shape of every parameter, e.g. `layers.3.q`; what a checkpoint must provide."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (config.embedding_rows, config.width)}
    for layer in range(config.num_layers):
        shapes |= {f"layers.{layer}.{n}": s for n, s in layer_shapes(config).items()}
    shapes["norm"] = (config.width,)
    if not config.tied_head:
        shapes["head"] = (config.width, config.embedding_rows)
    return shapes


def abstract_transformer(config: ModelConfig, dtype: jnp.dtype) -> tuple[nnx.GraphDef, Params]:
    """Structure and shapes of a model without allocating it."""
    return nnx.split(nnx.eval_shape(lambda: Transformer(config, dtype)))


def params_from_flat(config: ModelConfig, flat: dict[str, Array]) -> Params:
    """Build the module state from flat names; shapes and names must match `parameter_shapes`."""
    expected = parameter_shapes(config)
    if set(flat) != set(expected):
        missing, extra = sorted(set(expected) - set(flat)), sorted(set(flat) - set(expected))
        raise PolestarError(f"parameters do not match the model: missing {missing}, extra {extra}")
    dtype = flat["embed"].dtype
    _, state = abstract_transformer(config, dtype)
    paths, treedef = jax.tree_util.tree_flatten_with_path(state)
    leaves = []
    for path, leaf in paths:
        value = flat[flat_name(path)]
        if value.shape != leaf.shape:
            raise PolestarError(
                f"parameter {flat_name(path)} has shape {value.shape}, expected {leaf.shape}"
            )
        leaves.append(value)
    return jax.tree_util.tree_unflatten(treedef, leaves)


def params_to_flat(params: Params) -> dict[str, Array]:
    """The inverse of `params_from_flat`."""
    return {flat_name(p): x for p, x in jax.tree_util.tree_flatten_with_path(params)[0]}


def flat_name(path: tuple) -> str:
    """Dotted name of a leaf of the module state."""
    parts = [getattr(k, "key", getattr(k, "name", getattr(k, "idx", None))) for k in path]
    return ".".join(str(p) for p in parts if p is not None and p != "value")


def random_flat(config: ModelConfig, key: Array, dtype: str = "float32") -> dict[str, Array]:
    """Random parameters for tests and benchmarks: norms 1, matrices N(0, 1/fan_in)."""
    flat = {}
    for index, (name, shape) in enumerate(parameter_shapes(config).items()):
        if name.endswith("norm"):
            flat[name] = jnp.ones(shape, dtype)
            continue
        noise = jax.random.normal(jax.random.fold_in(key, index), shape, jnp.float32)
        scale = 1.0 if name == "embed" or len(shape) == 1 else shape[0] ** -0.5
        flat[name] = (noise * scale).astype(dtype)
    return flat
