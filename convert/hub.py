"""Where a conversion reads from: a local directory, or a repository of the Hugging Face hub."""

import re
from dataclasses import dataclass
from pathlib import Path

from polestar_jax.errors import PolestarError

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Only data: never the Python files that some repositories carry.
SMALL_FILES = ["*.json", "*.txt", "*.jinja"]


@dataclass(frozen=True)
class Source:
    """A local directory, the name to remember it by, and the commit of a downloaded one."""

    directory: Path
    name: str
    revision: str | None = None


def resolve(src: str | Path, revision: str | None = None) -> Source:
    """Find `src` on this machine, or download it when it names a repository ("owner/name")."""
    path = Path(src).expanduser()
    if path.is_dir():
        if revision is not None:
            raise PolestarError(f"revision {revision!r} needs a hub repository, but {src} is local")
        return Source(path, str(path.resolve()))
    if path.exists():
        raise PolestarError(f"{src} is a file; give the directory that holds config.json")
    if not REPOSITORY.fullmatch(str(src)):
        raise PolestarError(f"{src} does not exist; give a directory or a repository 'owner/name'")
    directory = _download(str(src), revision)
    return Source(directory, str(src), directory.name)


def _download(repository: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    def fetch(patterns: list[str]) -> Path:
        allow = SMALL_FILES + patterns
        return Path(snapshot_download(repository, revision=revision, allow_patterns=allow))

    try:
        directory = fetch(["*.safetensors"])
        if not list(directory.glob("*.safetensors")):
            directory = fetch(["*.bin"])
    except GatedRepoError:
        reason = (
            "access to it must be granted first: accept its terms and log in with `hf auth login`"
        )
    except RepositoryNotFoundError:
        reason = (
            "there is no such directory here nor such a repository on the hub (or it is private)"
        )
    except RevisionNotFoundError:
        reason = f"it has no revision {revision!r}"
    except LocalEntryNotFoundError:
        reason = "there is no such directory here, and the hub cannot be reached to download it"
    except Exception as error:  # network errors come in many types, by the HTTP library in use
        reason = (
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason'}"
        )
    else:
        return directory
    raise PolestarError(f"cannot download {repository}: {reason}")
