"""How much a denoising pass costs beyond its matrix products, and where the rest goes.

Every part runs alone as one compiled loop of `PASSES` passes over all layers, with the shapes of
the real pass; parts take turns, round after round, and medians are compared, so that a machine
whose speed drifts treats all alike. Processor time (all threads) is taken beside wall time: other
processes disturb it less. The parts do not add up exactly: alone, a part finds other things in the
caches, and inside a pass some are fused.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

import polestar_jax as pj
from polestar_jax.decoding import loop
from polestar_jax.decoding.cache.base import plain_output
from polestar_jax.decoding.context import Context
from polestar_jax.decoding.decode import context_of, start_program
from polestar_jax.decoding.passes import RowsResult
from polestar_jax.models.attention import attend
from polestar_jax.models.rope import apply_rope
from polestar_jax.models.transformer import Transformer, precision_of

PASSES = 8  # per program run
BLOCK = 32
POLICY = "fast-dllm-dual"
PASS, PRODUCTS = "denoising pass", "matrix products"
Part = Callable[[Any, Any], Any]  # (parameters, carry) -> carry


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model, a canvas of T = prompt + generated rows, and the state in front of a pass."""

    model: pj.ModelConfig
    decode: pj.DecodeConfig
    params: Any
    tokens: Array

    @property
    def batch(self) -> int:
        return self.tokens.shape[0]

    @property
    def total(self) -> int:
        return self.tokens.shape[1]

    def state(self) -> pj.DecodeState:
        """A fresh state in block 0."""
        keys = jax.random.split(jax.random.key(2), self.batch)
        return start_program(
            self.params, jnp.array(self.tokens), jnp.zeros(self.batch, jnp.int32), keys,
            model=self.model, config=self.decode, trace=False,
        )  # fmt: skip

    def context(self, params: Any, pad: Array | None = None) -> Context:
        pad = jnp.zeros(self.batch, jnp.int32) if pad is None else pad
        return context_of(self.model, params, self.decode, self.tokens, pad)


def make_subject(
    model: pj.ModelConfig, total: int, generated: int, batch: int = 1, seed: int = 0
) -> Subject:
    """Random float32 weights and prompt. No pass reaches the threshold: each commits one token."""
    decode = pj.preset(
        POLICY, gen_length=generated, block_length=BLOCK, threshold=1.0, stop_at_eos=True
    )
    key = jax.random.key(seed)
    params = pj.Model.random(model, key).params
    prompt = jax.random.randint(key, (batch, total - generated), 0, model.eos_token, jnp.int32)
    canvas = jnp.full((batch, generated), model.mask_token, jnp.int32)
    return Subject(model, decode, params, jnp.concatenate([prompt, canvas], axis=1))


def product(x: Array, w: Array) -> Array:
    return jnp.matmul(x, w, precision=precision_of(x.dtype))


def dense_products(model: Transformer, layer: int, x: Array) -> Array:
    """The seven products of a layer with its weights, chained; x [B, R, M]."""
    block, c = model.layers[layer], model.config
    q, k, v = (product(x, getattr(block, name)[...]) for name in "qkv")
    kv = jnp.broadcast_to((k + v)[..., None, :], (*k.shape[:-1], c.group, k.shape[-1]))
    x = product(q + kv.reshape(q.shape), block.o[...])
    return product(product(x, block.gate[...]) + product(x, block.up[...]), block.down[...])


def attention_products(c: pj.ModelConfig, k: Array, v: Array, x: Array) -> Array:
    """Scores and weighted values, without the softmax between; x [B, R, H * D]."""
    b, rows = x.shape[:2]
    q = x.reshape(b, c.num_kv_heads, c.group * rows, c.head_dim)
    precision, batched = precision_of(x.dtype), ((0, 1), (0, 1))
    scores = lax.dot_general(q, k, (((3,), (3,)), batched), precision=precision)
    return lax.dot_general(scores, v, (((3,), (2,)), batched), precision=precision).reshape(x.shape)


def parts(subject: Subject) -> dict[str, tuple[Part, Any]]:
    """Name -> (one pass's worth of work, its first carry)."""
    c = subject.model
    layers = range(c.num_layers)
    phase = subject.decode.cache.phases()[-1]
    x = jax.random.normal(jax.random.key(3), (subject.batch, BLOCK, c.width))
    wide = jax.random.normal(jax.random.key(4), (subject.batch, BLOCK, c.mlp_width))
    q = x.reshape(subject.batch, BLOCK, c.num_heads, -1)
    shape = (subject.batch, c.num_kv_heads, subject.total, c.head_dim)
    # Of a scale that keeps chained products near 1: neither infinite nor denormal.
    k = [jax.random.normal(jax.random.key(5 + i), shape) * c.head_dim**-0.5 for i in layers]
    v = [jax.random.normal(jax.random.key(1000 + i), shape) * subject.total**-0.5 for i in layers]
    state = dataclasses.replace(subject.state(), block_passes=jnp.int32(1))

    def whole(params: Any, state: pj.DecodeState) -> pj.DecodeState:
        return loop.run_pass(subject.context(params, state.pad), state, phase)[0]

    def products(params: Any, carry: Any, dense: bool, attention: bool, head: bool) -> Any:
        (x, logits, k, v), model = carry, subject.context(params).model
        for layer in layers if dense or attention else ():
            if attention:
                x = attention_products(c, k[layer], v[layer], x)
            if dense:
                x = dense_products(model, layer, x) * 6**-0.5  # variance 1 again
        if head:
            logits = product(x + logits[..., :1] * 0, model.head[...])
        return x, logits, k, v

    def norms(params: Any, x: Array) -> Array:
        model = subject.context(params).model
        for layer in layers:
            x = model.normed(layer, "mlp_norm", model.normed(layer, "attn_norm", x))
        return x

    def rotations(params: Any, q: Array) -> Array:
        rope = subject.context(params).rope(subject.total - BLOCK, BLOCK)
        for _ in range(2 * c.num_layers):
            q = lax.optimization_barrier(apply_rope(q, rope[0], rope[1]))
        return q

    def activations(params: Any, wide: Array) -> Array:
        for _ in layers:
            wide = lax.optimization_barrier(jax.nn.silu(wide) * wide)
        return wide

    def attention(params: Any, carry: Any) -> Any:
        (q, k, v), mask = carry, subject.context(params).key_mask
        for layer in layers:
            q = attend(q, k[layer], v[layer], mask).reshape(q.shape)
        return q, k, v

    def predict_and_commit(params: Any, carry: Any) -> Any:
        ctx = subject.context(params)
        state, hidden = carry
        result = RowsResult(hidden, state.cache, None, None)
        output = plain_output(ctx, state, result, state.cache, kind=2)
        masked = loop.block_masks(ctx, state)
        state, _, _ = loop.commit_block(ctx, state, output, masked, jnp.any(masked, axis=-1))
        return loop.fill_after_eos(ctx, state), hidden + 1e-3  # or the head would run only once

    logits = jnp.zeros((subject.batch, BLOCK, c.embedding_rows))
    carry = (x, logits, k, v)
    only = functools.partial(products, dense=False, attention=False, head=False)
    return {
        PASS: (whole, state),
        PRODUCTS: (functools.partial(products, dense=True, attention=True, head=True), carry),
        "products with weights": (functools.partial(only, dense=True), carry),
        "attention's products": (functools.partial(only, attention=True), carry),
        "head's product": (functools.partial(only, head=True), carry),
        "attention with softmax": (attention, (q, k, v)),
        "norms": (norms, x),
        "rotary positions": (rotations, q),
        "activation": (activations, wide),
        "head, prediction and commit": (predict_and_commit, (subject.state(), x)),
    }


def compiled(subject: Subject, part: Part, carry: Any) -> Callable[[], tuple[float, float]]:
    """A function that runs PASSES passes of a part: (wall, processor) milliseconds per pass."""

    def run(params: Any, carry: Any) -> Any:
        return lax.fori_loop(0, PASSES, lambda _, c: part(params, c), carry)

    program = jax.jit(run, donate_argnums=1).lower(subject.params, carry).compile()

    def timed() -> tuple[float, float]:
        fresh = jax.block_until_ready(jax.tree.map(jnp.copy, carry))  # the program reuses it
        wall, processor = time.perf_counter(), time.process_time()
        jax.block_until_ready(program(subject.params, fresh))
        return (
            1e3 * (time.perf_counter() - wall) / PASSES,
            1e3 * (time.process_time() - processor) / PASSES,
        )

    timed()
    return timed


def measure(
    name: str, subject: Subject, rounds: int, chosen: dict[str, tuple[Part, Any]] | None = None
) -> dict[str, Any]:
    """Milliseconds per pass of the pass and its parts, and the pass in units of its products.

    `chosen` names other parts than all of `parts`; the pass and its products must be among them.
    """
    chosen = parts(subject) if chosen is None else chosen
    timers = {part: compiled(subject, *work) for part, work in chosen.items()}
    times: dict[str, list[tuple[float, float]]] = {part: [] for part in timers}
    for _ in range(rounds):
        for part, timer in timers.items():
            times[part].append(timer())

    def ratio(clock: int) -> float:
        pairs = zip(times[PASS], times[PRODUCTS])
        return round(statistics.median(a[clock] / b[clock] for a, b in pairs), 3)

    def median(clock: int) -> dict[str, float]:
        return {
            part: round(statistics.median(t[clock] for t in taken), 3)
            for part, taken in times.items()
        }

    return {
        "shape": name,
        "batch": subject.batch,
        "total": subject.total,
        "rounds": rounds,
        "milliseconds": median(0),
        "processor_milliseconds": median(1),
        "pass_over_products": ratio(0),
        "pass_over_products_processor": ratio(1),
    }


def table(results: list[dict[str, Any]]) -> str:
    """Markdown: one column per shape, wall (processor) milliseconds."""
    heads = [f"{r['shape']}, B {r['batch']}, T {r['total']}" for r in results]
    lines = ["| ms per pass, wall (processor) | " + " | ".join(heads) + " |"]
    lines.append("|---|" + "---|" * len(results))
    for part in results[0]["milliseconds"] if results else ():
        cells = [
            f"{r['milliseconds'][part]:.2f} ({r['processor_milliseconds'][part]:.2f})"
            for r in results
        ]
        lines.append(f"| {part} | " + " | ".join(cells) + " |")
    cells = [
        f"{r['pass_over_products']:.2f} ({r['pass_over_products_processor']:.2f})" for r in results
    ]
    lines.append("| **pass / products** | " + " | ".join(cells) + " |")
    return "\n".join(lines)
