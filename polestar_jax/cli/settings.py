"""From options to a `DecodeConfig`, and what a result depends on."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from polestar_jax.decoding import cache as caches
from polestar_jax.decoding import commit as commits
from polestar_jax.decoding.config import DecodeConfig
from polestar_jax.decoding.presets import preset
from polestar_jax.errors import PolestarError
from polestar_jax.models.transformer import params_to_flat

if TYPE_CHECKING:
    from polestar_jax.weights import Model

# The longest window that the embedded model was trained on.
EMBEDDED_LENGTHS = {"gen_length": 64, "block_length": 32}
_WORDS = {"True": True, "False": False, "None": None}


def parse_assignments(assignments: Sequence[str]) -> dict[str, Any]:
    """`FIELD=VALUE` strings to values: JSON (0.8, 16, true, null), Python's words, else text."""
    fields: dict[str, Any] = {}
    for text in assignments:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name:
            raise PolestarError(f"--set wants FIELD=VALUE, got {text!r}")
        if name in fields:
            raise PolestarError(f"--set gives {name} twice; keep one")
        try:
            fields[name] = json.loads(value)
        except json.JSONDecodeError:
            fields[name] = _WORDS.get(value, value)
        if isinstance(fields[name], list | dict):
            raise PolestarError(f"--set {name} wants one number, word or text, got {value!r}")
    return fields


def build_config(
    policy: str, cache: str | None, commit: str | None, fields: dict[str, Any]
) -> DecodeConfig:
    """The preset `policy` with another cache or commit policy (by name) and changed fields.

    Raises:
        PolestarError: an unknown name or field, or a value out of range.
    """
    changes = dict(fields)
    for kind, name, module in (("cache", cache, caches), ("commit", commit, commits)):
        if kind in changes:
            raise PolestarError(f"choose the {kind} policy by --{kind} NAME, not by --set")
        if name is not None:
            known = policies(module)
            if name not in known:
                raise PolestarError(
                    f"unknown {kind} policy {name!r}; known: {', '.join(sorted(known))}"
                )
            changes[kind] = known[name]()
    return preset(policy, **changes)


def policies(module: ModuleType) -> dict[str, Any]:
    """Policies that a package exports, by their command-line names: DualCache is "dual"."""
    found = {}
    for name in module.__all__:
        stem = re.sub("(Cache|Commit)$", "", name)
        if stem == name or isinstance(getattr(module, name), ModuleType):
            continue
        found[re.sub("(?<=[a-z])(?=[A-Z])", "-", stem).lower()] = getattr(module, name)
    if "no" in found:
        found["none"] = found.pop("no")
    return found


def describe(model: "Model", config: DecodeConfig, seed: int | None, raw: bool) -> dict[str, Any]:
    """Everything a row of output depends on besides its prompt, as plain JSON values."""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return {
        "weights": fingerprint(model),
        "dtype": str(model.dtype),
        "seed": seed,
        "raw": raw,
        **{
            name: value if isinstance(value, bool | int | float | str | None) else repr(value)
            for name, value in values.items()
        },
    }


def fingerprint(model: "Model") -> str:
    """Twelve hexadecimal digits that differ between checkpoints: sizes and all vectors hashed.

    Norms and biases are a small part of the weights, read in no time, and differ as soon as a
    checkpoint was trained further.
    """
    digest = hashlib.sha256(json.dumps(model.config.to_dict(), sort_keys=True).encode())
    for _, array in sorted(params_to_flat(model.params).items()):
        if array.ndim == 1:
            digest.update(np.asarray(array).astype(np.float32).tobytes())
    return digest.hexdigest()[:12]
