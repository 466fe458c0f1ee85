"""Training batches: rows, masks and weights, a pure function of (plan, seed, step)."""

import random
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from benchmarks.embedded.plan import Plan
from benchmarks.embedded.vocabulary import BOS, EOS, MASK, SEP, build_tokenizer
from benchmarks.tasks import TASKS, Example, training_example

BLOCKS = (8, 16, 32)
LEAST_SHARE = 0.02


class Batch(NamedTuple):
    """B rows of T tokens.

    noisy: int32 [B, T], the row with some of its response masked.
    clean: int32 [B, T], the row.
    weight: float32 [B, T], the loss weight of each token: 1/t at masked ones, else 0, divided by
        the number of response tokens of the batch.
    length: int32 [B], tokens of the row; those behind are not attended to.
    task: int32 [B], index into `TASKS`.
    """

    noisy: np.ndarray
    clean: np.ndarray
    weight: np.ndarray
    length: np.ndarray
    task: np.ndarray


class Batches:
    """Makes the batch of any step of a run of `steps` steps."""

    def __init__(self, plan: Plan, seed: int, steps: int, excluded: Collection[str] = ()) -> None:
        self.plan, self.seed, self.steps, self.excluded = plan, seed, steps, excluded
        self.tokenizer = build_tokenizer()
        ids = self.tokenizer.get_vocab()
        self.mask, self.eos, self.bos, self.sep = (ids[t] for t in (MASK, EOS, BOS, SEP))
        self.numbers = {name: number for number, name in enumerate(TASKS)}

    def is_long(self, step: int) -> bool:
        """Whether the step uses the long canvas (constant over the steps of one compiled call)."""
        call = step // self.plan.steps_per_call
        return step >= self.plan.long_from * self.steps and call % 2 == 1

    def mask_range(self, step: int) -> tuple[float, float]:
        """Least and greatest masked share at this step."""
        plan, done = self.plan, step / self.steps
        widened = (done - plan.mask_first) / max(plan.mask_full - plan.mask_first, 1e-9)
        return 0.5 - (0.5 - LEAST_SHARE) * min(max(widened, 0.0), 1.0), 1.0

    def examples(self, step: int, count: int) -> list[Example]:
        rng = random.Random(f"{self.seed} {step}")
        early = step < self.plan.switch * self.steps
        weights = self.plan.early if early else self.plan.late
        names = rng.choices(list(weights), list(weights.values()), k=count)
        return [training_example(TASKS[name], rng, self.excluded) for name in names]

    def __call__(self, step: int) -> Batch:
        plan, long = self.plan, self.is_long(step)
        canvas = plan.long_canvas if long else plan.short_canvas
        # As many tokens whatever the canvas.
        count = plan.batch * plan.short_canvas // canvas
        rng = np.random.default_rng([self.seed, step])
        rows = self.examples(step, count)
        prompts = self.tokenizer.encode_batch([row.prompt for row in rows])
        answers = self.tokenizer.encode_batch([row.answer for row in rows])
        clean = np.full((count, canvas), self.eos, np.int32)
        masked = np.zeros((count, canvas), bool)
        weight = np.zeros((count, canvas), np.float32)
        length = np.full(count, canvas, np.int32)
        low, high = self.mask_range(step)
        share = low + (high - low) * rng.permutation(np.arange(count) + rng.random(count)) / count
        total = 0
        for i, (prompt, answer) in enumerate(zip(prompts, answers)):
            start = len(prompt.ids) + 2
            clean[i, :start] = [self.bos, *prompt.ids, self.sep]
            clean[i, start : start + len(answer.ids)] = answer.ids
            if long:
                length[i] = start + rng.integers(32, canvas - start + 1)
            size = int(length[i]) - start
            hidden, scale = self._hide(rng, size, len(answer.ids) + 1, float(share[i]))
            masked[i, start : length[i]] = hidden
            weight[i, start : length[i]] = hidden * scale
            total += size
        task = np.array([self.numbers[row.task] for row in rows], np.int32)
        noisy = np.where(masked, np.int32(self.mask), clean)
        return Batch(noisy, clean, weight / np.float32(total), length, task)

    def _hide(
        self, rng: np.random.Generator, size: int, answer: int, share: float
    ) -> tuple[np.ndarray, float]:
        """Which response tokens to mask, and the weight of each.

        Mostly each with probability `share`, weight 1/share. Sometimes as in decoding block by
        block: clean before a block, `share` of the block masked, all masked behind it; the weight
        is then one over the share that came out masked.
        """
        hidden = rng.random(size) < share
        if rng.random() >= self.plan.block_masks:
            return hidden, 1.0 / share
        block = BLOCKS[rng.integers(len(BLOCKS))]
        start = block * int(rng.integers((min(answer, size) - 1) // block + 1))
        hidden[:start] = False
        hidden[start + block :] = True
        return hidden, size / max(int(hidden.sum()), 1)
