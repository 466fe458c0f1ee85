"""Sizes that name a real (or a nasty) call of the ops; every op lists its own in `shapes.py`."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """`rows` queries, or clusters, of each of `batch` sequences over `length` cached keys."""

    batch: int
    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    length: int


@dataclasses.dataclass(frozen=True)
class RefreshShape(AttentionShape):
    """`rows` is the capacity, `counts` how many of them each sequence uses; `width` the model's."""

    width: int
    counts: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class StoreShape:
    """`rows` hidden rows of `width` values of each sequence, in `clusters` clusters."""

    batch: int
    rows: int
    width: int
    clusters: int
