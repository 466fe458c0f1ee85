"""Write a converted checkpoint: all of it or nothing.

    DST/params/            Orbax checkpoint, a flat dictionary {parameter name: array}
    DST/model_config.json  the fields of ModelConfig
    DST/manifest.json      source, hashes and versions; written last
    DST/tokenizer.json ... the tokenizer's files, copied

Everything is written to the sibling directory `DST.partial`, which gets its name at the very end.
"""

import errno
import importlib.metadata
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polestar_jax.errors import PolestarError

try:
    import fcntl
except ImportError:  # not a POSIX system: two conversions into one place are not told apart
    fcntl = None  # type: ignore[assignment]

PARAMS, MODEL_CONFIG, MANIFEST = "params", "model_config.json", "manifest.json"
FORMAT = 1
RECORDED = ("polestar-jax", "jax", "orbax-checkpoint", "safetensors", "numpy")


@dataclass(frozen=True)
class LazyArray:
    """A parameter that is read when its turn to be written comes."""

    read: Callable[[], np.ndarray]
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


def write_params(
    directory: Path, arrays: Mapping[str, LazyArray], done: Callable[[LazyArray], Any]
) -> None:
    """Save the arrays as one Orbax tree with only one of them in memory at a time.

    `done` is called after each. Orbax itself would take a tree of arrays that all exist; a handler
    for `LazyArray` reads, writes and forgets them in turn.
    """
    import orbax.checkpoint as ocp

    class LazyHandler(ocp.type_handlers.NumpyHandler):
        async def serialize(
            self, values: Sequence[LazyArray], infos: Sequence[Any], args: Any = None
        ) -> list[Any]:
            for i, value in enumerate(values):
                written = await super().serialize(
                    [value.read()], [infos[i]], None if args is None else [args[i]]
                )
                for future in written:
                    future.result()
                done(value)
            return []

    registry = ocp.type_handlers.create_type_handler_registry((LazyArray, LazyHandler()))
    with quiet_orbax():
        # Weights hardly compress, and trying costs more time than writing them.
        handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry, use_compression=False)
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(directory, args=ocp.args.PyTreeSave(dict(arrays)))


@contextmanager
def quiet_orbax() -> Iterator[None]:
    """Keep Orbax from warning of our handler, and from printing errors that it also raises."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in RECORDED}


def check_space(directory: Path, needed: int) -> None:
    """Refuse before writing what cannot fit."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise PolestarError(
            f"{directory} has {free / 2**30:.1f} GiB free, but the checkpoint needs "
            f"{needed / 2**30:.1f} GiB; make room or choose another destination"
        )


def check_destination(dst: Path) -> None:
    """Refuse a destination that exists, or that has no directory to lie in."""
    if dst.exists() or dst.is_symlink():
        raise PolestarError(f"{dst} exists already; remove it or choose another destination")
    if not dst.parent.is_dir():
        raise PolestarError(f"the directory {dst.parent} does not exist; create it first")


@contextmanager
def finished_or_nothing(dst: Path) -> Iterator[Path]:
    """Yield an empty directory beside `dst` that becomes `dst` when the block ends without error.

    Whatever an interrupted conversion left there is cleared first. Raises PolestarError when `dst`
    exists, another conversion is writing it, or the file system refuses (a full disk, say).
    """
    check_destination(dst)
    partial = dst.with_name(f"{dst.name}.partial")
    try:
        with _owned(partial, dst):
            try:
                for left in partial.iterdir():
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
                yield partial
                check_destination(dst)
                os.rename(partial, dst)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
    except PolestarError:
        raise
    except Exception as error:
        if reason := _disk_trouble(error):
            raise PolestarError(f"cannot write {dst}: {reason}") from None
        raise


@contextmanager
def _owned(partial: Path, dst: Path) -> Iterator[None]:
    """Hold a lock on the directory; the system drops it with the process, however that ends."""
    partial.mkdir(exist_ok=True)
    handle = os.open(partial, os.O_RDONLY)
    try:
        if not _locked(handle, partial):
            raise PolestarError(f"another conversion is writing {dst}; wait for it to end")
        yield
    finally:
        os.close(handle)


def _locked(handle: int, partial: Path) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Without this, a directory renamed to its final name a moment ago would be taken for ours.
        return os.path.samestat(os.fstat(handle), os.stat(partial))
    except (BlockingIOError, FileNotFoundError):
        return False


def _disk_trouble(error: BaseException) -> str | None:
    """The plain reason when an error (or what caused it) is the file system refusing to write."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno is not None:
            return os.strerror(seen.errno) + (f" ({seen.filename})" if seen.filename else "")
        for code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            if os.strerror(code) in str(seen):  # TensorStore reports errors as text
                return os.strerror(code)
        seen = seen.__cause__ or seen.__context__
    return None
