"""Which rows may be trained on: a split by hash of the prompt, the same on every machine."""

import hashlib
import random
from collections.abc import Collection

from benchmarks.tasks.example import Example, Task
from polestar_jax.errors import PolestarError

HELD_OUT_SHARE = 1 / 20
DRAWS = 20_000  # without a new held-out row: there are hardly any left


def digest(prompt: str) -> bytes:
    """SHA-256 of a compact prompt."""
    return hashlib.sha256(prompt.encode()).digest()


def is_held_out(prompt: str) -> bool:
    """True for one prompt in twenty."""
    return int.from_bytes(digest(prompt)[:4], "big") < HELD_OUT_SHARE * 2**32


def training_example(task: Task, rng: random.Random, excluded: Collection[str] = ()) -> Example:
    """A row for training: neither held out nor among the `excluded` prompts."""
    while True:
        example = task.generate(rng)
        if not is_held_out(example.prompt) and example.prompt not in excluded:
            return example


def held_out_examples(task: Task, count: int, seed: int = 0) -> list[Example]:
    """`count` different held-out rows; the same for the same seed.

    Raises:
        PolestarError: the task does not have that many.
    """
    rng = random.Random(f"held out {task.name} {seed}")
    found: dict[str, Example] = {}
    vain = 0
    while len(found) < count:
        example = task.generate(rng)
        vain += 1
        if is_held_out(example.prompt) and example.prompt not in found:
            found[example.prompt] = example
            vain = 0
        if vain == DRAWS:
            raise PolestarError(
                f"task {task.name!r} has little more than {len(found)} held-out rows, "
                f"asked for {count}; lower the limit"
            )
    return list(found.values())
