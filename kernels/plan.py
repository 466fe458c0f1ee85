"""How an attention kernel is cut into programs: tiles of rows and keys, and splits of the keys."""

import dataclasses

TARGET_PROGRAMS = 128  # about one per multiprocessor of an A100 (108) or H200 (132)
TILES_PER_SPLIT = 4  # below this a program's start and the final merge outweigh its work


def power_of_two(n: int, minimum: int = 1) -> int:
    """The smallest power of two that is at least n and `minimum`."""
    return max(minimum, 1 << (n - 1).bit_length())


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static cut of one attention: `splits` programs share the keys of one tile of rows.

    Partial results of the splits are merged by their log-normalisers, so that batch 1 fills the
    card too.
    """

    rows: int  # per tile, a power of two and at least 16 (the depth of the matrix instruction)
    keys: int  # per tile, a power of two
    row_tiles: int
    splits: int
    tiles_per_split: int
    warps: int
    stages: int  # of the software pipeline

    @classmethod
    def of(cls, groups: int, rows: int, length: int, itemsize: int, rotary: bool) -> "Plan":
        """For `groups` independent attentions of `rows` queries over `length` keys.

        `itemsize` of the keys in bytes; `rotary` when they are rotated in the kernel. Tiles and
        warps are the largest, and the fewest, that spilled no register for A100 and H200 (see the
        README's table): full float32 products have no matrix instruction and need twice the
        registers; rotation keeps two more tiles of keys.
        """
        half = itemsize == 2
        row_tile = min(64 if half else 32, power_of_two(rows, 16))
        key_tile = 64 if half and row_tile <= 32 else 32
        warps = 8 if row_tile >= 32 or rotary or not half else 4
        return cls.cut(groups, rows, length, row_tile, key_tile, warps)

    @classmethod
    def cut(
        cls, groups: int, rows: int, length: int, row_tile: int, key_tile: int, warps: int
    ) -> "Plan":
        """With the given tiles: as many splits as fill the card."""
        row_tiles, tiles = -(-rows // row_tile), -(-length // key_tile)
        free = TARGET_PROGRAMS // (groups * row_tiles)
        splits = max(1, min(free, tiles // TILES_PER_SPLIT))
        per_split = -(-tiles // splits)
        return cls(
            rows=row_tile,
            keys=key_tile,
            row_tiles=row_tiles,
            splits=-(-tiles // per_split),
            tiles_per_split=per_split,
            warps=warps,
            stages=2,
        )
