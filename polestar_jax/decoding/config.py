"""How to decode: one frozen configuration, made of a cache policy and a commit policy."""

import dataclasses
import math
from typing import Any

from polestar_jax.checks import check_choice, check_integer, check_number
from polestar_jax.decoding.cache.base import CachePolicy
from polestar_jax.decoding.cache.none import NoCache
from polestar_jax.decoding.commit.base import CommitPolicy
from polestar_jax.decoding.commit.threshold import ThresholdCommit
from polestar_jax.errors import PolestarError
from polestar_jax.kernels.dispatch import IMPLEMENTATIONS


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Static settings of one generation; hashable, part of the compiled program's identity.

    Attributes:
        gen_length: tokens to generate per sequence, a multiple of `block_length`.
        block_length: tokens per block; blocks are filled left to right.
        temperature: 0 takes the arg max, above 0 samples with Gumbel noise (needs a key).
        cache: what is recomputed when (`NoCache`, `PrefixCache`, `DualCache`, `PolestarCache`).
        commit: which masked rows are accepted (`FixedCommit`, `ThresholdCommit`, ...).
        remasking: "low_confidence" keeps the most confident tokens first, "random" any
            (only with `FixedCommit`).
        stop_at_eos: once a sequence's EOS and everything before it are committed, the rest becomes
            EOS and costs no more passes.
        suppress_eos, suppress_eot: predictions of that token rank behind all others and pass no
            threshold, so they are committed only when nothing else is left in the block.
        dream_shift: "exact" runs the row before the block, "in_block" shifts inside the block as
            the authors' release does (parity tests only); ignored by models without shift.
        prompt_bucket: prompts are left-padded to a multiple of this many tokens; None chooses
            64, 128, 256, 512 and then multiples of 512, so that few programs are compiled.
        implementation: of the hot operations: "pallas" kernels (NVIDIA GPUs), "xla" for plain JAX,
            "interpret" for the kernels in Pallas's interpreter (tests), None for the kernels
            where the program is meant for a CUDA device and plain JAX elsewhere.
        allow_empty_prompt: accept prompts of no tokens (unconditional generation).
    """

    gen_length: int = 256
    block_length: int = 32
    temperature: float = 0.0
    cache: CachePolicy = dataclasses.field(default_factory=NoCache)
    commit: CommitPolicy = dataclasses.field(default_factory=ThresholdCommit)
    remasking: str = "low_confidence"
    stop_at_eos: bool = True
    suppress_eos: bool = False
    suppress_eot: bool = False
    dream_shift: str = "exact"
    prompt_bucket: int | None = None
    implementation: str | None = None
    allow_empty_prompt: bool = False

    def __post_init__(self) -> None:
        for name in ("gen_length", "block_length"):
            check_integer(name, getattr(self, name), 1)
        if self.gen_length % self.block_length:
            raise PolestarError(
                f"gen_length ({self.gen_length}) must be a multiple of block_length "
                f"({self.block_length}); choose e.g. "
                f"{-(-self.gen_length // self.block_length) * self.block_length}"
            )
        check_number("temperature", self.temperature, 0.0, math.inf)
        check_choice("remasking", self.remasking, ("low_confidence", "random"))
        check_choice("dream_shift", self.dream_shift, ("exact", "in_block"))
        if self.implementation is not None:
            check_choice("implementation", self.implementation, IMPLEMENTATIONS)
        if self.prompt_bucket is not None:
            check_integer("prompt_bucket", self.prompt_bucket, 1)
        for name, kind in (("cache", CachePolicy), ("commit", CommitPolicy)):
            if not isinstance(getattr(self, name), kind):
                raise PolestarError(
                    f"{name} must be a {name} policy such as {_EXAMPLES[name]}, "
                    f"got {getattr(self, name)!r}"
                )
        for name in ("stop_at_eos", "suppress_eos", "suppress_eot", "allow_empty_prompt"):
            if not isinstance(getattr(self, name), bool):
                raise PolestarError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.remasking == "random" and not self.commit.ranks_only:
            raise PolestarError(
                f"remasking='random' has no confidence for {type(self.commit).__name__} to test; "
                "use FixedCommit"
            )
        self.commit.check(self.gen_length, self.num_blocks)
        self.cache.check(self.block_length)

    @property
    def num_blocks(self) -> int:
        return self.gen_length // self.block_length

    @property
    def max_passes(self) -> int:
        """Upper bound of passes of one sequence (buffers of a trace have this length)."""
        return self.commit.max_passes(self.gen_length, self.num_blocks)


_EXAMPLES = {"cache": "DualCache()", "commit": "ThresholdCommit(0.9)"}


def replace(config: DecodeConfig, **changes: Any) -> DecodeConfig:
    """`dataclasses.replace` with a clear message for unknown fields."""
    known = {field.name for field in dataclasses.fields(config)}
    unknown = sorted(set(changes) - known)
    if unknown:
        raise PolestarError(
            f"unknown decoding field {unknown[0]!r}; known: {', '.join(sorted(known))}"
        )
    return dataclasses.replace(config, **changes)
