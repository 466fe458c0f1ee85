"""Time spent compiling, told apart from time spent computing."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator

from jax import monitoring

_COMPILING = "/jax/core/compile/"  # tracing, lowering and compiling, or reading it from the cache


@dataclasses.dataclass
class Stopwatch:
    """Seconds of a `measure` block; filled in at its end."""

    total: float = 0.0
    compiling: float = 0.0

    @property
    def computing(self) -> float:
        return max(self.total - self.compiling, 0.0)


@contextlib.contextmanager
def measure() -> Iterator[Stopwatch]:
    """Time the block and JAX's compilation in it. The block must wait for its own results."""
    spans: list[tuple[float, float]] = []

    def listen(event: str, start_time: float, end_time: float, **_: str | int) -> None:
        if event.startswith(_COMPILING):
            spans.append((start_time, end_time))

    watch = Stopwatch()
    monitoring.register_event_time_span_listener(listen)
    started = time.perf_counter()
    try:
        yield watch
    finally:
        watch.total = time.perf_counter() - started
        watch.compiling = _union(spans)
        monitoring.unregister_event_time_span_listener(listen)


def _union(spans: list[tuple[float, float]]) -> float:
    """Length covered by intervals that may nest or overlap (tracing inside tracing)."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered
