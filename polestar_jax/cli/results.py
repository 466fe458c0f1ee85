"""The output of `generate`: one JSON row per prompt, in a file that survives interruption."""

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from polestar_jax.cli.prompts import Prompt
from polestar_jax.errors import PolestarError

try:
    import fcntl
except ImportError:  # Windows has no advisory locks; two runs into one file are not noticed there
    fcntl = None  # type: ignore[assignment]


class Results:
    """Rows already there (`finished`, their ids) and the place to append further ones."""

    def __init__(
        self, stream: IO[bytes], name: str, finished: set[str | int] | None = None
    ) -> None:
        self._stream, self._name = stream, name
        self._resumable = finished is not None
        self.finished = finished or set()

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append whole rows and force them to disk; on failure none of them stays behind.

        Raises:
            PolestarError: the file cannot be written, e.g. no space is left.
        """
        data = b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)
        start = self._stream.tell() if self._resumable else None
        try:
            rest = memoryview(data)
            while rest:  # an unbuffered file may take less than it was given
                rest = rest[self._stream.write(rest) :]
            self._stream.flush()
            if start is not None:
                os.fsync(self._stream.fileno())
        except BrokenPipeError:
            raise
        except OSError as error:
            if start is not None:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._stream.fileno(), start)
            raise PolestarError(
                f"cannot write {self._name}: {error.strerror}; the rows written before are kept, "
                "and the same command resumes after them"
            ) from None


@contextlib.contextmanager
def open_results(
    path: Path | None, prompts: Iterable[Prompt], settings: Mapping[str, Any], overwrite: bool
) -> Iterator[Results]:
    """Open `path` for appending, keeping the complete rows it holds; None is standard output.

    A torn last line, left by a run that was killed, is cut off. `settings` is everything the rows
    depend on, as JSON values.

    Raises:
        PolestarError: the file holds something else, rows of other prompts or other settings, is
            being written by another run, or cannot be written.
    """
    if path is None:
        yield Results(sys.stdout.buffer, "standard output")
        return
    special = path.exists() and not path.is_file()  # a pipe or device: nothing there to resume
    try:
        stream = path.open("wb" if special else "a+b", buffering=0)
    except OSError as error:
        raise PolestarError(f"cannot write {path}: {error.strerror}") from None
    with stream:
        if special:
            yield Results(stream, str(path))
            return
        if fcntl is not None:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise PolestarError(f"another run is writing {path}; wait for it") from None
        if overwrite:
            stream.truncate(0)
        finished = _resume(stream, path, {p.id: p.content for p in prompts}, settings)
        try:
            yield Results(stream, str(path), finished)
        finally:
            if stream.seek(0, os.SEEK_END) == 0:  # not one row: leave no empty file
                path.unlink(missing_ok=True)


def _resume(
    stream: Any,
    path: Path,
    prompts: Mapping[str | int, str | tuple[int, ...]],
    settings: Mapping[str, Any],
) -> set[str | int]:
    """Check the rows in `stream`, cut a torn last line, and stand at the end; ids of the rows."""
    stream.seek(0)
    *lines, last = stream.read().split(b"\n")
    finished: set[str | int] = set()
    good = 0
    for number, line in enumerate(lines, 1):
        row = _parse(line)
        if row is None:
            raise PolestarError(
                f"line {number} of {path} is not a result row; choose another --output or pass "
                "--overwrite"
            )
        _check_row(row, f"line {number} of {path}", prompts, settings)
        if row["id"] in finished:
            raise PolestarError(
                f"line {number} of {path} repeats the id {row['id']!r}; choose another --output "
                "or pass --overwrite"
            )
        finished.add(row["id"])
        good += len(line) + 1
    if last:
        stream.truncate(good)
    stream.seek(good)
    return finished


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    good = isinstance(row, dict) and isinstance(row.get("id"), str | int)
    return row if good and isinstance(row.get("settings"), dict) else None


def _check_row(
    row: Mapping[str, Any],
    where: str,
    prompts: Mapping[str | int, str | tuple[int, ...]],
    settings: Mapping[str, Any],
) -> None:
    remedy = "choose another --output or pass --overwrite"
    if row["id"] not in prompts:
        raise PolestarError(f"{where} has the id {row['id']!r}, not among the prompts; {remedy}")
    content = prompts[row["id"]]
    if row.get("prompt") != (content if isinstance(content, str) else list(content)):
        raise PolestarError(f"{where}, id {row['id']!r}, answers another prompt; {remedy}")
    old = row["settings"]
    for name in (*settings, *old):
        if old.get(name) != settings.get(name):
            raise PolestarError(
                f"{where} was made with {name} {old.get(name)!r}, now {settings.get(name)!r}; "
                f"{remedy}"
            )
