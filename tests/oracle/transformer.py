"""The bidirectional transformer of both families, one sequence at a time."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


@dataclasses.dataclass
class Cache:
    """Un-rotated keys and values of every position: [N, T, Hk, D]."""

    k: Array
    v: Array


class Net:
    """Weights by flat name (`layers.3.q`, matrices [in, out]) and the sizes that go with them.

    `config` needs the attributes num_layers, num_heads, num_kv_heads, head_dim, rope_theta,
    norm_eps, vocab_size, mask_token, eos_token, shift_logits.
    """

    def __init__(self, config: Any, weights: Mapping[str, Any], dtype: Any = np.float64) -> None:
        self.config = config
        self.w = {name: np.asarray(value).astype(dtype) for name, value in weights.items()}
        self.dtype = dtype

    def norm(self, x: Array, weight: Array) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.config.norm_eps) * weight

    def project(self, layer: int, name: str, x: Array) -> Array:
        y = x @ self.w[f"layers.{layer}.{name}"]
        return y + self.w.get(f"layers.{layer}.{name}_bias", 0)

    def rotate(self, x: Array, positions: Array) -> Array:
        """x [R, heads, D]; pair i turns by position * theta^(-2i/D)."""
        half = x.shape[-1] // 2
        inverse = 1.0 / self.config.rope_theta ** (np.arange(half) * 2 / x.shape[-1])
        angle = positions[:, None, None] * inverse
        cos, sin = np.cos(angle), np.sin(angle)
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(self.dtype)

    def embed(self, tokens: Array) -> Array:
        return self.w["embed"][tokens]

    def empty_cache(self, length: int) -> Cache:
        c = self.config
        shape = (c.num_layers, length, c.num_kv_heads, c.head_dim)
        return Cache(np.zeros(shape, self.dtype), np.zeros(shape, self.dtype))

    def queries(self, layer: int, hidden: Array) -> Array:
        """Un-rotated queries [R, H, D] of layer inputs [R, M]."""
        x = self.norm(hidden, self.w[f"layers.{layer}.attn_norm"])
        shape = (len(x), self.config.num_heads, self.config.head_dim)
        return self.project(layer, "q", x).reshape(shape)

    def write(self, cache: Cache, layer: int, rows: Array, hidden: Array) -> None:
        """Recompute the keys and values of `rows` from their layer inputs."""
        x = self.norm(hidden, self.w[f"layers.{layer}.attn_norm"])
        shape = (len(rows), self.config.num_kv_heads, self.config.head_dim)
        cache.k[layer, rows] = self.project(layer, "k", x).reshape(shape)
        cache.v[layer, rows] = self.project(layer, "v", x).reshape(shape)

    def weights_over(self, queries: Array, keys: Array) -> Array:
        """Attention probabilities [H, R, T] of queries [R, H, D] over keys [T, Hk, D]."""
        keys = np.repeat(keys, self.config.num_heads // self.config.num_kv_heads, axis=1)
        scores = np.einsum("rhd,thd->hrt", queries, keys)
        return softmax(scores / self.dtype(self.config.head_dim**0.5))

    def layer(self, cache: Cache, layer: int, rows: Array, hidden: Array) -> tuple[Array, Array]:
        """Run `rows` through a layer against all cached positions: next inputs, probabilities."""
        q = self.rotate(self.queries(layer, hidden), rows)
        p = self.weights_over(q, self.rotate(cache.k[layer], np.arange(cache.k.shape[1])))
        v = np.repeat(cache.v[layer], p.shape[0] // self.config.num_kv_heads, axis=1)
        attended = np.einsum("hrt,thd->rhd", p, v).reshape(len(rows), -1)
        x = hidden + self.project(layer, "o", attended)
        y = self.norm(x, self.w[f"layers.{layer}.mlp_norm"])
        y = silu(self.project(layer, "gate", y)) * self.project(layer, "up", y)
        return x + self.project(layer, "down", y), p

    def forward(self, tokens: Array, rows: Array, cache: Cache) -> tuple[Array, Array, list[Array]]:
        """Run `rows`, replacing their keys and values in the cache.

        Returns their last hidden states, last-layer probabilities and the inputs of every layer.
        """
        hidden, inputs, p = self.embed(tokens[rows]), [], np.empty(0)
        for layer in range(self.config.num_layers):
            inputs.append(hidden)
            self.write(cache, layer, rows, hidden)
            hidden, p = self.layer(cache, layer, rows, hidden)
        return hidden, p, inputs

    def logits(self, hidden: Array) -> Array:
        """[R, M] -> [R, rows of the head]."""
        head = self.w["head"] if "head" in self.w else self.w["embed"].T
        return self.norm(hidden, self.w["norm"]) @ head

    def full_logits(self, tokens: Array) -> Array:
        rows = np.arange(len(tokens))
        return self.logits(self.forward(tokens, rows, self.empty_cache(len(tokens)))[0])

    def predict(self, hidden: Array) -> Array:
        """Probabilities of the legal tokens: neither the mask nor padding rows of the head."""
        logits = self.logits(hidden)[:, : self.config.vocab_size]
        logits[:, self.config.mask_token] = -np.inf
        return softmax(logits)
