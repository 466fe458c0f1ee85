"""Convert a PyTorch checkpoint of LLaDA or Dream into one that loads straight onto the device.

    python -m polestar_jax.convert SRC DST

Neither PyTorch nor code that came with the checkpoint is needed, and memory stays near the size of
the largest tensor: tensors are read, turned and written one at a time.
"""

import hashlib
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from polestar_jax.convert.checkpoint import Checkpoint, open_checkpoint
from polestar_jax.convert.hub import Source, resolve
from polestar_jax.convert.reader import resolve_dtype
from polestar_jax.convert.writer import (
    FORMAT,
    MANIFEST,
    MODEL_CONFIG,
    PARAMS,
    LazyArray,
    check_destination,
    check_space,
    finished_or_nothing,
    versions,
    write_json,
    write_params,
)
from polestar_jax.models.transformer import parameter_shapes
from polestar_jax.tokenizer import TOKENIZER_FILES, Tokenizer

__all__ = ["convert", "open_checkpoint"]

SPARE_BYTES = 16 << 20  # metadata and tokenizer files


def convert(
    src: str | Path,
    dst: str | Path,
    dtype: Any = None,
    *,
    revision: str | None = None,
    progress: bool = False,
) -> Path:
    """Convert a Hugging Face checkpoint; returns `dst`, which `polestar_jax.load` reads.

    `src` is a local directory or a hub repository "owner/name" (at `revision`). `dtype` is
    "bfloat16", "float16", "float32", or None to keep what the tensors are stored in. `progress`
    shows a bar. Peak memory is at most twice the largest tensor plus 1 GiB. Raises PolestarError
    with one sentence when the checkpoint does not fit, `dst` exists, or there is no space; `dst`
    then does not come into being.
    """
    dst = Path(dst).expanduser().absolute()
    wanted = None if dtype is None else resolve_dtype(dtype)
    check_destination(dst)
    source = resolve(src, revision)
    checkpoint = open_checkpoint(source.directory, wanted)
    Tokenizer.load(source.directory, checkpoint.config)  # a broken one is reported now
    arrays = _arrays(checkpoint)
    size = sum(a.nbytes for a in arrays.values())
    with finished_or_nothing(dst) as directory:
        check_space(directory, size + SPARE_BYTES)
        for name in TOKENIZER_FILES:
            if (file := source.directory / name).exists():
                shutil.copyfile(file, directory / name)
        hashes = _hashes(checkpoint.weight_files, progress)
        with _bar(progress, size, "converting") as bar:
            write_params(directory / PARAMS, arrays, lambda array: bar.update(array.nbytes))
        write_json(directory / MODEL_CONFIG, checkpoint.config.to_dict())
        write_json(directory / MANIFEST, _manifest(source, checkpoint, size, hashes))
    return dst


def _arrays(checkpoint: Checkpoint) -> dict[str, LazyArray]:
    return {
        name: LazyArray(partial(checkpoint.read, name), shape, checkpoint.dtype)
        for name, shape in parameter_shapes(checkpoint.config).items()
    }


def _manifest(
    source: Source, checkpoint: Checkpoint, size: int, hashes: dict[str, str]
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "source": source.name,
        "revision": source.revision,
        "family": checkpoint.config.family,
        "dtype": checkpoint.dtype.name,
        "bytes": size,
        "sha256": hashes,
        "versions": versions(),
    }


def _hashes(files: list[Path], progress: bool) -> dict[str, str]:
    """SHA-256 of each weight file, to recognise a source by."""
    hashes = {}
    buffer = memoryview(bytearray(1 << 20))
    with _bar(progress, sum(f.stat().st_size for f in files), "hashing") as bar:
        for file in files:
            digest = hashlib.sha256()
            with file.open("rb", buffering=0) as stream:
                while count := stream.readinto(buffer):
                    digest.update(buffer[:count])
                    bar.update(count)
            hashes[file.name] = digest.hexdigest()
    return hashes


def _bar(progress: bool, total: int, label: str) -> "tqdm[Any]":
    return tqdm(
        total=total, desc=label, unit="B", unit_scale=True, unit_divisor=1024, disable=not progress
    )
