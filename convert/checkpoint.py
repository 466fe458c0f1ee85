"""A Hugging Face directory of LLaDA or Dream, seen as our parameters."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polestar_jax.convert.names import Entry, match
from polestar_jax.convert.reader import (
    DTYPES,
    WeightFiles,
    open_weights,
    read_json,
    read_tensor,
    resolve_dtype,
)
from polestar_jax.errors import PolestarError
from polestar_jax.models.config import ModelConfig


@dataclass(frozen=True)
class Checkpoint:
    """What a directory holds; `dtype` is the one its tensors are stored in."""

    directory: Path
    config: ModelConfig
    files: WeightFiles
    entries: dict[str, Entry]
    dtype: np.dtype

    def read(self, parameter: str, dtype: np.dtype | None = None) -> np.ndarray:
        """One parameter, in the shape `model.parameter_shapes` gives it."""
        entry = self.entries[parameter]
        return read_tensor(self.files, entry.stored, dtype or self.dtype, entry.transpose)

    @property
    def weight_files(self) -> list[Path]:
        return sorted({t.file for t in self.files.tensors.values()})


def open_checkpoint(directory: Path, dtype: Any = None) -> Checkpoint:
    """Read the configuration and check that the tensors fit it, without reading their values.

    `dtype` is needed only where tensors of several dtypes are mixed and config.json names none.
    Raises PolestarError with one sentence for whatever does not fit.
    """
    raw = read_json(directory / "config.json")
    config = ModelConfig.from_hf(raw)
    files = open_weights(directory)
    try:
        entries, tied_head = match(config, files.tensors, files.duplicates)
    except PolestarError as error:
        raise PolestarError(f"{directory}: {error}") from None
    if tied_head is not None and not _same(files, entries["embed"], tied_head):
        raise PolestarError(
            f"{directory}: config.json ties the head to the embedding, but "
            f"{tied_head.stored.name} differs from it; correct the tying in config.json"
        )
    kept = resolve_dtype(dtype) if dtype is not None else _kept_dtype(directory, entries, raw)
    return Checkpoint(directory, config, files, entries, kept)


def _kept_dtype(directory: Path, entries: dict[str, Entry], raw: dict[str, Any]) -> np.dtype:
    found = sorted({e.stored.dtype for e in entries.values()})
    if len(found) == 1:
        return DTYPES[found[0]]
    named = raw.get("dtype") or raw.get("torch_dtype")
    if named in DTYPES:
        return DTYPES[named]
    raise PolestarError(
        f"{directory} mixes tensors of {' and '.join(found)} and its config.json names no dtype; "
        "choose one with dtype="
    )


def _same(files: WeightFiles, embed: Entry, head: Entry) -> bool:
    """Whether two tensors of one shape hold the same values, compared block by block."""
    pairs = zip(files.rows(embed.stored), files.rows(head.stored))
    return all(np.array_equal(a, b) for a, b in pairs)
