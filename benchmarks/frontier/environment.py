"""What a result depends on besides its settings: versions, device, revision, model."""

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax
import numpy as np

import polestar_jax as pj
from polestar_jax.cli.settings import fingerprint
from polestar_jax.models.transformer import params_to_flat

PACKAGES = ("polestar-jax", "jax", "jaxlib", "flax", "numpy", "scipy", "tokenizers")


def environment() -> dict[str, Any]:
    """Versions and device as JSON values."""
    device = jax.local_devices()[0]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device.device_kind if device.platform != "cpu" else _processor(),
        "backend": device.platform,
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def model_facts(name: str, model: pj.Model) -> dict[str, Any]:
    """What identifies a model, as JSON values."""
    flat = params_to_flat(model.params)
    return {
        "name": name,
        "fingerprint": fingerprint(model),
        "family": model.config.family,
        "parameters": sum(int(np.prod(array.shape)) for array in flat.values()),
        "dtype": str(model.dtype),
        "layers": model.config.num_layers,
        "width": model.config.width,
    }


def revision() -> str:
    """The git commit of this checkout, "-dirty" behind it where code differs; else "unknown"."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=Path(__file__).parent, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def now() -> str:
    """UTC, ISO 8601, whole seconds."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """Name of the CPU where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
