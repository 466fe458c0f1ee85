"""Read PyTorch `.bin` weights: plain tensors only. Needs torch, the extra "torch"."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from polestar_jax.convert.reader import DTYPES, Stored, block_rows, merge
from polestar_jax.errors import PolestarError


class TorchFiles:
    """`WeightFiles` over `pytorch_model*.bin`, memory-mapped where the file format allows it."""

    def __init__(self, files: list[Path], listed: Mapping[str, str]) -> None:
        found = (
            Stored(name, file, str(t.dtype).removeprefix("torch."), tuple(t.shape))
            for file in files
            for name, t in _load(file).items()
        )
        self.tensors, self.duplicates = merge(found, listed)

    def rows(self, tensor: Stored) -> Iterator[np.ndarray]:
        import torch

        value, step = _load(tensor.file)[tensor.name], block_rows(tensor)
        for start in range(0, tensor.shape[0], step):
            block = value[start : start + step].contiguous()
            if block.dtype == torch.bfloat16:  # NumPy has no bfloat16: hand over the bits
                yield block.view(torch.uint16).numpy().view(DTYPES["bfloat16"])
            else:
                yield block.numpy()


def _load(file: Path) -> dict[str, Any]:
    try:
        import torch
    except ImportError:
        raise PolestarError(
            f"{file.name} is a PyTorch file: install polestar-jax[torch] to read it, "
            "or use a safetensors checkpoint"
        ) from None
    try:
        values = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises many types for a file it cannot trust or parse
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise PolestarError(f"{file} cannot be read as plain tensors: {reason}") from None
    return {k: v for k, v in values.items() if isinstance(v, torch.Tensor)}
