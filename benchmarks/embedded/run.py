"""State of a training run on disk: what it is, how far it is, what it logged."""

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

from flax import serialization

from benchmarks.embedded.plan import PLANS, Plan
from polestar_jax.errors import PolestarError

CHECKPOINT, DESCRIPTION, LOG = "checkpoint.msgpack", "run.json", "training_log.csv"


@dataclasses.dataclass(frozen=True)
class Run:
    """A run's identity: the same plan, seed and steps give the same model on the same machine."""

    plan: str
    seed: int
    steps: int
    minutes: float | None  # asked for; the speed measured at the start gave `steps`
    excluded: int  # prompts kept out of training beside the held-out ones
    machine: str
    parent: "Run | None" = None  # the run whose model it started from
    note: str = ""  # added by hand where the commands alone would not repeat the run

    def read_plan(self) -> Plan:
        return PLANS[self.plan]

    def save(self, folder: Path) -> None:
        text = json.dumps(dataclasses.asdict(self), indent=2) + "\n"
        _replace(folder / DESCRIPTION, text.encode())

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Run":
        parent = values.get("parent")
        return cls(**values | {"parent": parent and cls.from_dict(parent)})

    @classmethod
    def load(cls, folder: Path) -> "Run":
        try:
            return cls.from_dict(json.loads((folder / DESCRIPTION).read_text()))
        except FileNotFoundError:
            raise PolestarError(f"{folder} holds no run: {DESCRIPTION} is missing") from None
        except (TypeError, ValueError) as error:
            raise PolestarError(
                f"{folder / DESCRIPTION} does not describe a run ({error}); remove the directory"
            ) from None


def save_checkpoint(folder: Path, state: Any) -> None:
    """Write the state so that an interruption leaves the previous checkpoint."""
    _replace(folder / CHECKPOINT, serialization.to_bytes(state))


def load_checkpoint(folder: Path, like: Any) -> Any | None:
    """The saved state in the structure of `like`, or None where there is none yet."""
    path = folder / CHECKPOINT
    if not path.exists():
        return None
    try:
        return serialization.from_bytes(like, path.read_bytes())
    except Exception as error:  # whatever the decoder raises, the file is unusable
        raise PolestarError(f"{path} cannot be read ({error}); remove it to start anew") from None


class Log:
    """A CSV that a resumed run continues where its checkpoint stands."""

    def __init__(self, folder: Path, columns: list[str], step: int) -> None:
        self.path, self.columns = folder / LOG, columns
        rows: list[dict[str, str]] = []
        if step and self.path.exists():
            with self.path.open(newline="") as file:
                rows = [row for row in csv.DictReader(file) if int(row["step"]) <= step]
        self.seconds = float(rows[-1]["seconds"]) if rows else 0.0
        with self.path.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)

    def add(self, row: dict[str, Any]) -> None:
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self.columns).writerow(row)


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f"{path.name}.part")
    temporary.write_bytes(content)
    temporary.replace(path)
