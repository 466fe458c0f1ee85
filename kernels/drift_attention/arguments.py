"""What every body of the op takes and gives."""

from typing import NamedTuple

from jax import Array


class Arguments(NamedTuple):
    """Arrays of one call, as `api.drift_attention` describes them."""

    q: Array  # [B, R, H, D]
    k: Array  # [B, Hk, T, D]
    v: Array  # [B, Hk, T, D]
    positions: Array  # int32 [B, R]
    pad: Array  # int32 [B]
    previous: tuple[Array, Array] | None  # scores [B, H, R, T], normaliser [B, H, R]

    @property
    def packed(self) -> tuple[int, int, int]:
        """G key heads of all sequences, N query rows that share one, T keys."""
        b, r, h, _ = self.q.shape
        hk, t = self.k.shape[1], self.k.shape[2]
        return b * hk, h // hk * r, t


class Results(NamedTuple):
    """What a pass leaves, per head."""

    attended: Array  # [B, R, H * D], the values' dtype
    scores: Array  # [B, H, R, T]
    normaliser: Array  # float32 [B, H, R]
    kl: Array | None  # float32 [B, H, R]


def unpacked(got: dict[str, Array], arguments: Arguments) -> Results:
    """Results of `kernels.stream.merge`, [G, N, ...], by sequence and head again."""
    b, r, h, d = arguments.q.shape
    rows = (b, h, r)
    return Results(
        got["out"].reshape(*rows, d).transpose(0, 2, 1, 3).reshape(b, r, h * d),
        got["scores"].reshape(*rows, -1),
        got["normaliser"].reshape(rows),
        got["kl"].reshape(rows) if "kl" in got else None,
    )
