"""Load a model: a converted directory, a Hugging Face directory, or the embedded one."""

import importlib.resources
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from polestar_jax.convert.checkpoint import open_checkpoint
from polestar_jax.convert.reader import read_json, read_manifest, resolve_dtype
from polestar_jax.convert.writer import FORMAT, MANIFEST, MODEL_CONFIG, PARAMS, quiet_orbax
from polestar_jax.errors import PolestarError
from polestar_jax.models.config import ModelConfig
from polestar_jax.models.forward import jitted_forward
from polestar_jax.models.transformer import Params, parameter_shapes, params_from_flat, random_flat
from polestar_jax.tokenizer import Tokenizer

EMBEDDED = "embedded"


@dataclass(frozen=True, eq=False)
class Model:
    """Everything decoding needs; `params` is the state of `model.Transformer`."""

    config: ModelConfig
    params: Params = field(repr=False)
    tokenizer: Tokenizer | None = None

    @property
    def dtype(self) -> jnp.dtype:
        """The type of the weights and of the products with them."""
        embed: Any = self.params["embed"]
        return embed[...].dtype

    def logits(self, tokens: Any, attention_mask: Any = None) -> Array:
        """Logits of whole sequences: float32 [B, T, V], not shifted for either family.

        `tokens` int [B, T]. `attention_mask` [B, T]: 0 at left pads, 1 elsewhere; a padded row
        gives what it would give alone. Raises PolestarError for shapes, tokens or masks that make
        no sense, and for sequences longer than the model's maximum.
        """
        ids = np.asarray(tokens)
        if ids.ndim != 2 or 0 in ids.shape or ids.dtype.kind not in "iu":
            raise PolestarError(
                f"tokens must be integers [batch, length], both at least 1; "
                f"got {ids.dtype} {list(ids.shape)}"
            )
        c = self.config
        if ids.shape[1] > c.max_length:
            raise PolestarError(
                f"{ids.shape[1]} tokens are more than the model's maximum of {c.max_length}"
            )
        if ids.min() < 0 or ids.max() >= c.vocab_size:
            bad = ids.min() if ids.min() < 0 else ids.max()
            raise PolestarError(f"token {bad} is outside the vocabulary of {c.vocab_size}")
        return jitted_forward(
            c, self.params, jnp.asarray(ids, jnp.int32), _left_pad_mask(attention_mask, ids.shape)
        )

    @classmethod
    def random(cls, config: ModelConfig, key: Array, dtype: Any = "float32") -> "Model":
        """A model of random weights and no tokenizer, for tests and measurements."""
        flat = random_flat(config, key, resolve_dtype(dtype).name)
        return cls(config, params_from_flat(config, flat))


def _left_pad_mask(attention_mask: Any, shape: tuple[int, ...]) -> Array:
    """bool [B, T] from 0/1 [B, T] or None, which must be zeros followed by at least one 1."""
    if attention_mask is None:
        return jnp.ones(shape, bool)
    mask = np.asarray(attention_mask)
    if mask.shape != shape:
        raise PolestarError(f"attention_mask is {list(mask.shape)}, but tokens are {list(shape)}")
    mask = mask != 0
    if not mask[:, -1].all() or (mask[:, 1:] < mask[:, :-1]).any():
        raise PolestarError(
            "attention_mask may hide tokens only on the left: zeros, then at least one 1, per row"
        )
    return jnp.asarray(mask)


def load(path: str | Path, dtype: Any = None, *, chat: bool | None = None) -> Model:
    """Load a model onto the default device, one parameter after another.

    `path`: what `polestar_jax.convert` wrote, a Hugging Face directory of LLaDA or Dream, or
    "embedded" for the small model that comes with the package. `dtype`: "bfloat16", "float16",
    "float32", or None for the stored one. `chat`: whether prompts go into the chat template
    (None: see `Tokenizer.load`). Raises PolestarError with one sentence for anything amiss.
    """
    wanted = None if dtype is None else resolve_dtype(dtype)
    directory = locate(path)
    if (directory / MANIFEST).exists():
        return _load_converted(directory, wanted, chat)
    checkpoint = open_checkpoint(directory, wanted)
    tokenizer = Tokenizer.load(directory, checkpoint.config, chat=chat)
    flat = {n: jnp.asarray(checkpoint.read(n)) for n in parameter_shapes(checkpoint.config)}
    return Model(checkpoint.config, params_from_flat(checkpoint.config, flat), tokenizer)


def locate(path: str | Path) -> Path:
    """The directory that `load(path)` reads; PolestarError when there is none, or half of one."""
    if str(path) == EMBEDDED:
        path = Path(str(importlib.resources.files("polestar_jax") / "assets" / "embedded"))
    directory = Path(path).expanduser()
    if not directory.is_dir():
        raise PolestarError(
            f"{path} is not a directory; give a converted or a Hugging Face checkpoint directory "
            "(polestar-jax convert downloads one)"
        )
    marks = (directory / name for name in (MANIFEST, "config.json"))
    if (directory / PARAMS).exists() and not any(mark.exists() for mark in marks):
        raise PolestarError(f"{directory} was never finished: convert it again")
    return directory


def _load_converted(directory: Path, dtype: np.dtype | None, chat: bool | None) -> Model:
    manifest, stored = read_manifest(directory / MANIFEST, FORMAT)
    config = ModelConfig.from_dict(read_json(directory / MODEL_CONFIG))
    name = str(manifest.get("source", ""))
    tokenizer = Tokenizer.load(directory, config, name=name, chat=chat)
    flat = _restore(directory / PARAMS, config, dtype or stored)
    if dtype == np.float16 and stored != np.float16:
        for name, value in flat.items():  # as the direct path says of the tensor
            if bool(jnp.any(jnp.isinf(value))):
                raise PolestarError(
                    f"{name} holds values beyond the range of float16; use bfloat16 or float32"
                )
    return Model(config, params_from_flat(config, flat), tokenizer)


def _restore(path: Path, config: ModelConfig, dtype: np.dtype) -> dict[str, Array]:
    """Parameters by flat name, read by Orbax straight into device arrays."""
    import orbax.checkpoint as ocp

    class OneByOne(ocp.type_handlers.ArrayHandler):
        """Orbax reads all arrays at once. In turn, no more than one waits in host memory for its
        transfer, and a damaged one leaves no other read behind."""

        async def deserialize(self, infos: Sequence[Any], args: Any = None) -> list[Array]:
            return [
                (await super(OneByOne, self).deserialize([infos[i]], [args[i]]))[0]
                for i in range(len(infos))
            ]

    sharding = jnp.zeros(()).sharding  # the default device
    shapes = parameter_shapes(config)
    item = {n: jax.ShapeDtypeStruct(s, dtype, sharding=sharding) for n, s in shapes.items()}
    arg = ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=sharding, dtype=dtype)
    try:
        with quiet_orbax():
            registry = ocp.type_handlers.create_type_handler_registry((jax.Array, OneByOne()))
            handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
            request = ocp.args.PyTreeRestore(item=item, restore_args=dict.fromkeys(shapes, arg))
            with ocp.Checkpointer(handler) as checkpointer:
                return checkpointer.restore(path.absolute(), args=request)
    except Exception as error:  # Orbax and TensorStore raise many types for damaged files
        reason = (str(error) or type(error).__name__).splitlines()[0].split(". ")[0]
        raise PolestarError(
            f"the converted checkpoint {path.parent} is damaged: {reason}; convert it again"
        ) from None
