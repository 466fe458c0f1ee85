"""Fast-dLLM's factor rule: the more rows are accepted at once, the surer each must be."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from polestar_jax.checks import check_number
from polestar_jax.decoding.commit.base import (
    CommitPolicy,
    CommitView,
    Decision,
    plain_decision,
    rank,
)
from polestar_jax.errors import PolestarError


@dataclasses.dataclass(frozen=True)
class FactorCommit(CommitPolicy):
    """Scan confidences in falling order, n = 2 ... m; stop at the first c_(n) < 1 - f / (n + 1).

    The n - 1 rows before the stop are accepted; the best row is never tested. `fast_dllm_edge`
    reproduces the released code: a scan that stops at n = m accepts all m.
    """

    factor: float = 1.0
    fast_dllm_edge: bool = False

    def __post_init__(self) -> None:
        check_number("factor", self.factor, 0.0, float("inf"))
        if not isinstance(self.fast_dllm_edge, bool):
            raise PolestarError(f"fast_dllm_edge must be True or False, got {self.fast_dllm_edge}")

    def select(self, view: CommitView, state: Any, active: Array) -> tuple[Decision, Any]:
        order = rank(view.score, view.masked)
        number = order + 1
        total = jnp.sum(view.masked, axis=-1, keepdims=True, dtype=jnp.int32)
        bar = 1.0 - self.factor / (number + 1).astype(jnp.float32)
        fails = view.masked & (number > 1) & (view.confidence < bar)
        stop = jnp.min(jnp.where(fails, number, total + 1), axis=-1, keepdims=True)
        if self.fast_dllm_edge:
            stop = jnp.where(stop == total, total + 1, stop)
        return plain_decision(view.masked & (number < stop)), state
