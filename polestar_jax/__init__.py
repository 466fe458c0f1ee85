"""Fast, trustworthy decoding of diffusion language models (LLaDA, Dream) in JAX."""

from polestar_jax.decoding.cache import CachePolicy, DualCache, NoCache, PolestarCache, PrefixCache
from polestar_jax.decoding.commit import (
    CommitPolicy,
    FactorCommit,
    FixedCommit,
    PolestarCommit,
    ThresholdCommit,
)
from polestar_jax.decoding.config import DecodeConfig
from polestar_jax.decoding.decode import DecodeResult, decode, decode_step, init_state, is_done
from polestar_jax.decoding.presets import PRESETS, preset
from polestar_jax.decoding.state import DecodeState
from polestar_jax.errors import PolestarError
from polestar_jax.memory import MemoryPlan, memory_plan
from polestar_jax.models.config import ModelConfig
from polestar_jax.weights import Model, load

__all__ = [
    "PRESETS",
    "CachePolicy",
    "CommitPolicy",
    "DecodeConfig",
    "DecodeResult",
    "DecodeState",
    "DualCache",
    "FactorCommit",
    "FixedCommit",
    "MemoryPlan",
    "Model",
    "ModelConfig",
    "NoCache",
    "PolestarCache",
    "PolestarCommit",
    "PolestarError",
    "PrefixCache",
    "ThresholdCommit",
    "decode",
    "decode_step",
    "init_state",
    "is_done",
    "load",
    "memory_plan",
    "preset",
]
