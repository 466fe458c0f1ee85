"""Named combinations of policies, as published."""

import dataclasses
from collections.abc import Callable
from typing import Any

from polestar_jax.decoding.cache import DualCache, NoCache, PolestarCache, PrefixCache
from polestar_jax.decoding.cache.base import CachePolicy
from polestar_jax.decoding.commit import FactorCommit, FixedCommit, PolestarCommit, ThresholdCommit
from polestar_jax.decoding.commit.base import CommitPolicy
from polestar_jax.decoding.config import DecodeConfig
from polestar_jax.errors import PolestarError

PRESETS: dict[str, tuple[Callable[[], CachePolicy], Callable[[], CommitPolicy]]] = {
    "vanilla": (NoCache, FixedCommit),
    "parallel": (NoCache, ThresholdCommit),
    "parallel-factor": (NoCache, FactorCommit),
    "fast-dllm-prefix": (PrefixCache, ThresholdCommit),
    "fast-dllm-dual": (DualCache, ThresholdCommit),
    "fast-dllm-factor": (DualCache, FactorCommit),
    "polestar": (PolestarCache, PolestarCommit),
    "polestar-cache": (PolestarCache, ThresholdCommit),
    "polestar-commit": (DualCache, PolestarCommit),
}


def preset(name: str, **fields: Any) -> DecodeConfig:
    """A named configuration with some fields changed.

    `fields` may name fields of `DecodeConfig` and, for brevity, fields of the preset's two
    policies: `preset("fast-dllm-dual", gen_length=256, threshold=0.8)`.

    Raises:
        PolestarError: unknown preset or field, or a value out of range.
    """
    if name not in PRESETS:
        raise PolestarError(f"unknown preset {name!r}; known: {', '.join(PRESETS)}")
    cache, commit = (make() for make in PRESETS[name])
    cache = fields.pop("cache", cache)
    commit = fields.pop("commit", commit)
    own = _names(DecodeConfig)
    for policy in (cache, commit):
        if not isinstance(policy, (CachePolicy, CommitPolicy)):
            raise PolestarError(f"cache and commit must be policies, got {policy!r}")
    cache_fields = {k: v for k, v in fields.items() if k not in own and k in _names(cache)}
    commit_fields = {k: v for k, v in fields.items() if k not in own and k in _names(commit)}
    unknown = sorted(set(fields) - own - set(cache_fields) - set(commit_fields))
    if unknown:
        known = sorted(own | _names(cache) | _names(commit))
        raise PolestarError(
            f"unknown field {unknown[0]!r} for preset {name!r}; known: {', '.join(known)}"
        )
    return DecodeConfig(
        cache=dataclasses.replace(cache, **cache_fields),
        commit=dataclasses.replace(commit, **commit_fields),
        **{k: v for k, v in fields.items() if k in own},
    )


def _names(thing: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(thing)}
