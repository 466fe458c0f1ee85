"""What decoding keeps where, in bytes, before anything is allocated."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from polestar_jax.checks import check_integer
from polestar_jax.decoding import loop
from polestar_jax.decoding.cache.clusters import LayerClusters
from polestar_jax.decoding.config import DecodeConfig
from polestar_jax.decoding.context import make_context
from polestar_jax.decoding.prompts import bucket_length
from polestar_jax.decoding.state import DecodeState, HostCache, LayerCache
from polestar_jax.errors import PolestarError
from polestar_jax.models.config import ModelConfig
from polestar_jax.models.transformer import abstract_transformer, parameter_shapes
from polestar_jax.store import RowStore

if TYPE_CHECKING:
    from polestar_jax.weights import Model

WEIGHTS, KEYS, RAW, HIDDEN = "weights", "keys and values", "keys before rotation", "hidden inputs"
CLUSTERS, PROXY, OTHER = "centroids, labels, counts", "proxy attention", "tokens and counters"
MEMORY, LOGITS, FETCHED = "last-layer attention", "logits of a block", "rows fetched from the host"
STATE = (KEYS, RAW, HIDDEN, CLUSTERS, PROXY, MEMORY, OTHER)  # kept from pass to pass
PASSING = (LOGITS, FETCHED)  # exist within a pass only


@dataclasses.dataclass(frozen=True)
class MemoryPart:
    """Bytes of one part of a decoding on the device and in pinned host memory."""

    name: str
    device: int
    host: int


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes by part; activations of a pass come on top.

    `weights` and the parts in `STATE` are held throughout, those in `PASSING` within a pass.
    """

    batch: int
    total: int  # positions of a sequence: padded prompt and generation
    parts: tuple[MemoryPart, ...]

    def part(self, name: str) -> MemoryPart:
        """A part by its name; of nothing if the configuration has none."""
        return next((p for p in self.parts if p.name == name), MemoryPart(name, 0, 0))

    @property
    def device(self) -> int:
        return sum(p.device for p in self.parts)

    @property
    def host(self) -> int:
        return sum(p.host for p in self.parts)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        parts = {p.name: {"device": p.device, "host": p.host} for p in self.parts}
        return {"device": self.device, "host": self.host, "parts": parts}

    def __str__(self) -> str:
        rows = [(p.name, p.device, p.host) for p in self.parts]
        rows.append(("together", self.device, self.host))
        lines = [f"{'':<28}{'device':>12}{'host':>12}"]
        lines += [f"{n:<28}{size_text(d):>12}{size_text(h):>12}" for n, d, h in rows]
        return "\n".join(lines)


def memory_plan(
    model: "Model | ModelConfig",
    config: DecodeConfig,
    batch: int,
    prompt_length: int,
    dtype: Any = None,
) -> MemoryPlan:
    """Bytes that decoding `batch` prompts of up to `prompt_length` tokens needs, by part.

    They follow from the shapes of the program's own state on the back end in use; nothing is
    loaded or allocated.

    Args:
        model: a model, or only its configuration.
        dtype: of weights and caches; None: the model's, or bfloat16 for a configuration.

    Raises:
        PolestarError: a batch below 1, a negative length, or a configuration that does not fit.
    """
    check_integer("batch", batch, 1)
    check_integer("prompt_length", prompt_length, 0)
    if isinstance(model, ModelConfig):
        c, dtype = model, jnp.dtype(dtype or "bfloat16")
    else:
        c, dtype = model.config, jnp.dtype(dtype or model.dtype)
    state = abstract_state(c, config, batch, prompt_length, dtype)
    sizes = {name: [0, 0] for name in (WEIGHTS, *STATE, *PASSING)}
    sizes[WEIGHTS][0] = dtype.itemsize * sum(math.prod(s) for s in parameter_shapes(c).values())
    for name, array, place in kept_arrays(state):
        sizes[name][place == "host"] += bytes_of(array)
    rows = config.block_length + int(c.shift_logits)
    sizes[LOGITS][0] = 4 * batch * rows * c.embedding_rows
    host = sum(h for _, h in sizes.values())
    sizes[FETCHED][0] = host * min(2, c.num_layers) // c.num_layers  # one layer and the next
    parts = tuple(MemoryPart(n, d, h) for n, (d, h) in sizes.items() if d or h)
    return MemoryPlan(batch, state.tokens.shape[1], parts)


def abstract_state(
    model: ModelConfig, config: DecodeConfig, batch: int, prompt_length: int, dtype: Any
) -> DecodeState:
    """Shapes of the state that `init_state` would allocate."""
    width = bucket_length(prompt_length, config, least=int(model.shift_logits))
    graph, params = abstract_transformer(model, dtype)

    def start(params: Any, tokens: Any, pad: Any, keys: Any) -> DecodeState:
        ctx = make_context(nnx.merge(graph, params), config, tokens.shape[1], pad)
        return loop.empty_state(ctx, tokens, keys)

    return jax.eval_shape(
        start,
        params,
        jax.ShapeDtypeStruct((batch, width + config.gen_length), jnp.int32),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
        jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch)),
    )


def kept_arrays(state: DecodeState) -> Iterator[tuple[str, Any, str]]:
    """Every array of a state (real or abstract) with the name of its part and its place."""
    known = (LayerCache, HostCache, LayerClusters, RowStore)
    proxy = ("scores", "normaliser")
    for node in jax.tree.leaves(state.cache, is_leaf=lambda x: isinstance(x, known)):
        if isinstance(node, LayerCache):
            yield from ((KEYS, a, "device") for a in jax.tree.leaves((node.k, node.v)))
            yield from ((RAW, a, "device") for a in jax.tree.leaves(node.raw))
        elif isinstance(node, HostCache):
            one = jax.ShapeDtypeStruct(node.stacked.shape[1:], node.stacked.dtype)
            yield from ((RAW if name == "raw" else KEYS, one, "host") for name in node.names)
        elif isinstance(node, RowStore):
            yield HIDDEN, node.data, node.place
            yield from ((CLUSTERS, a, "device") for a in jax.tree.leaves(node.base))
        elif isinstance(node, LayerClusters):
            for field in dataclasses.fields(node):
                name = PROXY if field.name in proxy else CLUSTERS
                yield name, getattr(node, field.name), "device"
        else:
            yield OTHER, node, "device"
    yield from ((MEMORY, a, "device") for a in jax.tree.leaves(state.memory))
    rest = dataclasses.replace(state, cache=None, memory=None)
    yield from ((OTHER, a, "device") for a in jax.tree.leaves(rest))


def bytes_of(array: Any) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


@contextlib.contextmanager
def explain_exhaustion(
    model: "Model", config: DecodeConfig, batch: int, prompt_length: int
) -> Iterator[None]:
    """Turn JAX's out-of-memory errors into one with the plan and the remedy."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        plan = memory_plan(model, config, batch, prompt_length)
        raise PolestarError(
            f"memory ran out decoding {batch} sequences of {plan.total} positions, which need "
            f"{size_text(plan.device)} on the device and {size_text(plan.host)} in pinned host "
            f"memory, activations not counted; {remedy(config, batch)}\n{plan}"
        ) from error


def remedy(config: DecodeConfig, batch: int) -> str:
    """What to change so that a decoding needs less."""
    ways = ["a smaller batch"] if batch > 1 else []
    ways.append("a shorter prompt or gen_length")
    cache = config.cache
    if getattr(cache, "hidden_dtype", "nvfp4") is None:
        ways.append("hidden_dtype='nvfp4'")
    stores = [n for n in ("hidden_store", "kv_store") if hasattr(cache, n)]
    ways += [f"{n}='host' if the device is full" for n in stores if getattr(cache, n) == "device"]
    ways += [f"{n}='device' if the host is full" for n in stores if getattr(cache, n) == "host"]
    return "use " + ", or ".join(ways)


def size_text(number: int) -> str:
    """14.90 GiB."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if number >= 1024**power:
            return f"{number / 1024**power:.2f} {unit}"
    return f"{number} bytes"
