"""What stays the same during one generation: model, settings, lengths, positions."""

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from polestar_jax.kernels.dispatch import target_platform
from polestar_jax.kernels.layout import FLOATS, MAX_HEAD_DIM
from polestar_jax.models.config import ModelConfig
from polestar_jax.models.rope import rope_tables
from polestar_jax.models.transformer import Transformer

if TYPE_CHECKING:
    from polestar_jax.decoding.config import DecodeConfig


class Rope(NamedTuple):
    """Rotary tables float32 [B, R, D/2] of some rows, and their positions int32 [B, R]."""

    cos: Array
    sin: Array
    positions: Array


@dataclasses.dataclass(frozen=True)
class Context:
    """Built once per trace. Symbols as in `DecodeState`.

    Attributes:
        tables: rotary tables of all T rows at each row's own positions.
        kernels: whether the hot operations run as Pallas kernels.
        key_mask: bool [B, T], False at left pads.
    """

    model: Transformer
    config: "DecodeConfig"
    total: int
    pad: Array
    tables: Rope
    key_mask: Array
    kernels: bool

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

    def rope(self, start: Array | int, rows: int) -> Rope:
        """Tables and positions of `rows` rows from `start`."""
        return Rope(*(self.rows_of(a, start, rows) for a in self.tables))

    @property
    def implementation(self) -> str:
        """Which implementation of the ops this program holds."""
        if not self.kernels:
            return "xla"
        return self.config.implementation or "pallas"


def make_context(model: Transformer, config: "DecodeConfig", total: int, pad: Array) -> Context:
    """Context for sequences of `total` rows of which the first `pad` [B] are padding."""
    rows = jnp.arange(total)
    positions = jnp.maximum(rows[None, :] - pad[:, None], 0)
    c = model.config
    cos, sin = rope_tables(positions, c.head_dim, c.rope_theta)
    return Context(
        model=model,
        config=config,
        total=total,
        pad=pad,
        tables=Rope(cos, sin, positions),
        key_mask=rows[None, :] >= pad[:, None],
        kernels=kernels_wanted(config.implementation, c, model.dtype),
    )


def kernels_wanted(implementation: str | None, config: ModelConfig, dtype: jnp.dtype) -> bool:
    """Whether a program traced now runs the kernels; None: on CUDA targets that fit them."""
    if implementation is None:
        fits = config.head_dim <= MAX_HEAD_DIM and str(dtype) in FLOATS
        return fits and target_platform() in ("gpu", "cuda")
    return implementation in ("pallas", "interpret")
