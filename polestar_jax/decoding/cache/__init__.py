"""Cache policies: what a pass recomputes."""

from polestar_jax.decoding.cache.base import CachePolicy
from polestar_jax.decoding.cache.dual import DualCache
from polestar_jax.decoding.cache.none import NoCache
from polestar_jax.decoding.cache.polestar import PolestarCache
from polestar_jax.decoding.cache.prefix import PrefixCache

__all__ = ["CachePolicy", "DualCache", "NoCache", "PolestarCache", "PrefixCache"]
