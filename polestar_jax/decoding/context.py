"""What stays the same during one generation: model, settings, lengths, positions."""

import dataclasses
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array, lax

from polestar_jax.config import ModelConfig
from polestar_jax.model import Transformer
from polestar_jax.rope import rope_tables

if TYPE_CHECKING:
    from polestar_jax.decoding.config import DecodeConfig


@dataclasses.dataclass(frozen=True)
class Context:
    """Built once per trace. Symbols as in `DecodeState`.

    Attributes:
        cos, sin: float32 [B, T, D/2], rotary tables at each row's own positions.
        key_mask: bool [B, T], False at left pads.
    """

    model: Transformer
    config: "DecodeConfig"
    total: int
    pad: Array
    cos: Array
    sin: Array
    key_mask: Array

    @property
    def model_config(self) -> ModelConfig:
        return self.model.config

    @property
    def batch(self) -> int:
        return self.pad.shape[0]

    @property
    def prompt(self) -> int:
        """Length of the prompt bucket."""
        return self.total - self.config.gen_length

    @property
    def block_length(self) -> int:
        return self.config.block_length

    def block_start(self, block: Array) -> Array:
        """First row of a block."""
        return self.prompt + block * self.block_length

    @property
    def lead(self) -> int:
        """Rows a cached pass runs before the block's own: 1 where logits shift exactly, else 0."""
        return int(self.model_config.shift_logits and self.exact_shift)

    @property
    def exact_shift(self) -> bool:
        return self.config.dream_shift == "exact"

    def rows_of(self, x: Array, start: Array | int, rows: int) -> Array:
        """x [B, T, ...] -> [B, rows, ...] from row `start`."""
        return lax.dynamic_slice_in_dim(x, start, rows, axis=1)

    def rope(self, start: Array | int, rows: int) -> tuple[Array, Array]:
        """Rotary tables of `rows` rows from `start`: [B, rows, D/2] each."""
        return self.rows_of(self.cos, start, rows), self.rows_of(self.sin, start, rows)


def make_context(model: Transformer, config: "DecodeConfig", total: int, pad: Array) -> Context:
    """Context for sequences of `total` rows of which the first `pad` [B] are padding."""
    rows = jnp.arange(total)
    positions = jnp.maximum(rows[None, :] - pad[:, None], 0)
    c = model.config
    cos, sin = rope_tables(positions, c.head_dim, c.rope_theta)
    return Context(model, config, total, pad, cos, sin, rows[None, :] >= pad[:, None])
