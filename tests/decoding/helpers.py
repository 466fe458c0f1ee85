"""Small random models, their oracle twins, and readers of traces."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from oracle import baselines
from oracle.transformer import Net

import polestar_jax as pj
from polestar_jax.models.transformer import parameter_shapes, params_from_flat, params_to_flat

MASK, EOS = 38, 39


def small_config(family: str, **changes: Any) -> pj.ModelConfig:
    """Two layers of width 16; LLaDA has more rows in its head than legal tokens."""
    dream = family == "dream"
    fields = {
        "family": family, "vocab_size": 40, "embedding_rows": 40 if dream else 48, "width": 16,
        "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "mlp_width": 24,
        "rope_theta": 1e4, "norm_eps": 1e-5, "max_length": 64, "qkv_bias": dream,
        "tied_head": False, "shift_logits": dream, "mask_token": MASK, "eos_token": EOS,
        "pad_token": EOS,
    }  # fmt: skip
    return pj.ModelConfig(**{**fields, **changes})


def small_model(config: pj.ModelConfig, seed: int, dtype: str = "float32", **arrays: Any):
    """Weights large enough for confident predictions; `arrays` replaces some by name."""
    rng = np.random.default_rng(seed)
    flat = {}
    for name, shape in parameter_shapes(config).items():
        scale = {"embed": 1.0, "head": 1.5}.get(name, 1.5 / np.sqrt(shape[0]))
        value = rng.normal(size=shape) * scale
        if name == "head":
            value[:, EOS] *= 1.5  # so that some sequences end early
        if name.endswith("norm"):
            value = rng.uniform(0.5, 1.5, shape)
        flat[name] = jnp.asarray(arrays.get(name, value), jnp.dtype(dtype))
    return pj.Model(config, params_from_flat(config, flat))


def twin(model: pj.Model, dtype: Any = np.float64) -> Net:
    """The oracle with the same weights."""
    flat = {k: np.asarray(v, np.float32) for k, v in params_to_flat(model.params).items()}
    return Net(model.config, flat, dtype)


def random_prompts(seed: int, lengths: list[int]) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, MASK, n).astype(np.int32) for n in lengths]


def oracle_rule(config: pj.DecodeConfig):
    """The oracle's commit rule for a library configuration."""
    c = config.commit
    if isinstance(c, pj.FixedCommit):
        steps = (c.steps or config.gen_length) // config.num_blocks
        return baselines.fixed(steps, c.confidence, c.schedule)
    if isinstance(c, pj.FactorCommit):
        return baselines.factor(c.factor, c.fast_dllm_edge)
    if c.steps is None:
        return baselines.threshold(c.threshold)
    return baselines.budget_threshold(c.threshold, config.gen_length / c.steps)


def oracle_decode(
    net: Net, prompt: np.ndarray, config: pj.DecodeConfig, teacher: list | None = None
) -> list[baselines.Pass]:
    name = {pj.NoCache: "none", pj.PrefixCache: "prefix", pj.DualCache: "dual"}
    return baselines.decode(
        net, prompt, config.gen_length, config.block_length, oracle_rule(config),
        name[type(config.cache)], config.dream_shift, config.stop_at_eos, teacher,
    )  # fmt: skip


def trace_rows(trace: Any, row: int) -> dict[str, np.ndarray]:
    """A sequence's own passes: every field of the trace as an array [NFE, ...]."""
    mine = np.asarray(trace.active)[:, row]
    fields = [f for f in trace.__dataclass_fields__ if f not in ("active", "details")]
    return {f: np.asarray(getattr(trace, f))[mine, row] for f in fields}


def assert_equals_oracle(
    passes: dict[str, np.ndarray], expected: list[baselines.Pass], prompt: int, length: int
) -> None:
    """Same tokens after every pass, same confidences at the block's masked rows."""
    assert len(passes["tokens"]) == len(expected)
    for i, p in enumerate(expected):
        np.testing.assert_array_equal(passes["tokens"][i], p.tokens[prompt:], err_msg=f"pass {i}")
        start = prompt + passes["block"][i] * length
        masked = passes["masked"][i]
        ours = passes["confidence"][i][masked]
        theirs = p.confidence[start : start + length][masked]
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@functools.cache
def model_pair(family: str, seed: int) -> tuple[pj.Model, Net]:
    model = small_model(small_config(family), seed)
    return model, twin(model)
