"""Read tensors from the weight files of a Hugging Face directory, one at a time.

A directory holds one weight file, or several ("shards") and an index that names them. Only the
tensor being read is in memory; nothing here runs code that came with a checkpoint.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from polestar_jax.errors import PolestarError

DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
SAFETENSORS_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
BLOCK_BYTES = 1 << 20  # rows are copied in blocks of about this size, which suits the caches


@dataclass(frozen=True)
class Stored:
    """One tensor as it lies in a file: `dtype` is a name, maybe one we cannot use."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]


class WeightFiles(Protocol):
    """What a weight format must offer; `duplicates` are names found in more than one file."""

    tensors: dict[str, Stored]
    duplicates: tuple[str, ...]

    def rows(self, tensor: Stored) -> Iterator[np.ndarray]:
        """The tensor in blocks of rows, in order."""
        ...


def resolve_dtype(name: Any) -> np.dtype:
    """The NumPy dtype for a name such as "bfloat16" or a dtype; PolestarError if unusable."""
    try:
        wanted = name if isinstance(name, str) else np.dtype(name).name
    except TypeError:
        wanted = repr(name)
    if wanted not in DTYPES:
        raise PolestarError(f"dtype {wanted!r} is not supported; use {', '.join(DTYPES)}")
    return DTYPES[wanted]


def read_tensor(
    files: WeightFiles, tensor: Stored, dtype: np.dtype, transpose: bool = False
) -> np.ndarray:
    """Read one tensor, converted (and transposed) block by block so that only the result is whole.

    Raises PolestarError when a finite value does not fit `dtype` (float16 ends at 65504).
    """
    out = np.empty(tensor.shape[::-1] if transpose else tensor.shape, dtype)
    view, start = (out.T if transpose else out), 0
    for block in files.rows(tensor):
        with np.errstate(over="ignore"):
            view[start : start + len(block)] = cast = block.astype(dtype, copy=False)
        if dtype == np.float16 and np.any(np.isinf(cast) & np.isfinite(block)):
            raise PolestarError(
                f"{tensor.name} holds values beyond the range of float16; use bfloat16 or float32"
            )
        start += len(block)
    return out


def open_weights(directory: Path) -> WeightFiles:
    """Find the weight files of a directory and list their tensors without reading them."""
    safetensors, torch = _find(directory, "model", "safetensors"), None
    if safetensors is None:
        torch = _find(directory, "pytorch_model", "bin")
    if safetensors is not None:
        return SafetensorsFiles(*safetensors)
    if torch is not None:
        from polestar_jax.convert.torch_reader import TorchFiles

        return TorchFiles(*torch)
    raise PolestarError(
        f"{directory} has no weights: neither model.safetensors nor model.safetensors.index.json"
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; PolestarError when it is absent or broken."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PolestarError(f"{path.parent} has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise PolestarError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise PolestarError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def read_manifest(path: Path, version: int) -> tuple[dict[str, Any], np.dtype]:
    """A converted directory's manifest and the dtype its parameters are stored in."""
    manifest = read_json(path)
    if manifest.get("format") != version:
        raise PolestarError(
            f"{path.parent} has the format {manifest.get('format')!r}, this version reads "
            f"{version}: convert it again"
        )
    if manifest.get("dtype") not in DTYPES:
        raise PolestarError(
            f"{path} names the dtype {manifest.get('dtype')!r}, not one of {', '.join(DTYPES)}: "
            "convert it again"
        )
    return manifest, DTYPES[manifest["dtype"]]


Located = tuple[list[Path], Mapping[str, str]]  # files; tensor name -> file name, from the index


def _find(directory: Path, stem: str, suffix: str) -> Located | None:
    single, index = directory / f"{stem}.{suffix}", directory / f"{stem}.{suffix}.index.json"
    if index.exists():
        if single.exists():
            raise PolestarError(
                f"{directory} has both {single.name} and {index.name}; remove the one that is stale"
            )
        return _sharded(directory, index)
    if single.exists():
        return [single], {}
    shard = re.compile(rf"{stem}-\d+-of-\d+\.{suffix}")
    if any(shard.fullmatch(p.name) for p in directory.iterdir()):
        raise PolestarError(
            f"{directory} has weight shards but lacks {index.name}, which names them"
        )
    return None


def _sharded(directory: Path, index: Path) -> Located:
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise PolestarError(f"{index} has no weight_map; download it again")
    names = sorted(set(listed.values()))
    if outside := [n for n in names if Path(n).name != n]:
        raise PolestarError(f"{index} names a file outside its directory: {outside[0]!r}")
    if missing := [n for n in names if not (directory / n).exists()]:
        raise PolestarError(
            f"{directory} lacks {len(missing)} of its {len(names)} weight shards: "
            f"{', '.join(missing)}"
        )
    return [directory / n for n in names], listed


def merge(
    found: Iterator[Stored], listed: Mapping[str, str]
) -> tuple[dict[str, Stored], tuple[str, ...]]:
    """Tensors by name, and the names that occur in several files."""
    tensors: dict[str, Stored] = {}
    duplicates: dict[str, str] = {}
    for tensor in found:
        if tensor.name in tensors:
            files = f"{tensors[tensor.name].file.name} and {tensor.file.name}"
            duplicates[tensor.name] = f"{tensor.name} (in {files})"
        tensors[tensor.name] = tensor
    for name, file in listed.items():
        if name in tensors and name not in duplicates and tensors[name].file.name != file:
            raise PolestarError(
                f"the index places {name} in {file}, but it lies in {tensors[name].file.name}; "
                "download the checkpoint again"
            )
    return tensors, tuple(duplicates.values())


class SafetensorsFiles:
    """`WeightFiles` over safetensors; the library checks each file's header against its length."""

    def __init__(self, files: list[Path], listed: Mapping[str, str]) -> None:
        found = (t for f in files for t in self._list(f))
        self.tensors, self.duplicates = merge(found, listed)

    @staticmethod
    def _list(file: Path) -> Iterator[Stored]:
        with _opened(file) as handle:
            for name in handle.keys():  # noqa: SIM118 (not a mapping)
                view = handle.get_slice(name)
                dtype = view.get_dtype()
                yield Stored(
                    name, file, SAFETENSORS_NAMES.get(dtype, dtype), tuple(view.get_shape())
                )

    def rows(self, tensor: Stored) -> Iterator[np.ndarray]:
        # The file is opened anew for every tensor: pages of a mapping that stays open count as
        # ours, and would add up to the whole checkpoint.
        step = block_rows(tensor)
        with _opened(tensor.file) as handle:
            view = handle.get_slice(tensor.name)
            for start in range(0, tensor.shape[0], step):
                yield view[start : min(start + step, tensor.shape[0])]


def block_rows(tensor: Stored) -> int:
    """Rows in one block of about BLOCK_BYTES."""
    row = DTYPES[tensor.dtype].itemsize * int(np.prod(tensor.shape[1:], dtype=np.int64))
    return max(1, BLOCK_BYTES // max(1, row))


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise PolestarError(
            f"{file} is damaged or truncated ({error}); download it again"
        ) from None
