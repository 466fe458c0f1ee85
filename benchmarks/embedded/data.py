"""Training batches: rows, masks and weights, a pure function of (plan, seed, step)."""

import random
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from jax import Array

from benchmarks.embedded.plan import Plan
from benchmarks.embedded.vocabulary import BOS, EOS, MASK, SEP, build_tokenizer
from benchmarks.tasks import TASKS, training_example

BLOCKS = (8, 16, 32)
LEAST_SHARE = 0.02
SHORT_WINDOW, LONG_WINDOW = 32, 64  # response tokens looked at
MIDDLE_EVERY = 10  # one call in so many takes the middle canvas

Rows = np.ndarray | Array  # on the host where they are made, on the device where they are used


class Batch(NamedTuple):
    """B rows of T tokens: a prompt of `start` tokens, a response, and what nothing attends to.

    The loss looks at the R tokens from `start` on.

    noisy: int32 [B, T], the row with some of its response masked.
    start: int32 [B]. length: int32 [B], tokens of prompt and response.
    target: int32 [B, R], the response; EOS behind its end.
    weight: float32 [B, R], 1/t at masked tokens of the response, else 0, divided by the number of
        response tokens of the batch.
    task: int32 [B], index into `TASKS`.
    """

    noisy: Rows
    start: Rows
    length: Rows
    target: Rows
    weight: Rows
    task: Rows


class Batches:
    """Makes the batch of any step of a run of `steps` steps."""

    def __init__(self, plan: Plan, seed: int, steps: int, excluded: Collection[str] = ()) -> None:
        self.plan, self.seed, self.steps, self.excluded = plan, seed, steps, excluded
        self.tokenizer = build_tokenizer()
        ids = self.tokenizer.get_vocab()
        self.mask, self.eos, self.bos, self.sep = (ids[t] for t in (MASK, EOS, BOS, SEP))
        self.numbers = {name: number for number, name in enumerate(TASKS)}

    def canvas(self, step: int) -> int:
        """Tokens of a row at this step; the same for all steps of one compiled call."""
        plan = self.plan
        call = step // plan.steps_per_call
        if call % 2 and call * plan.steps_per_call >= plan.long_from * self.steps:
            return plan.long_canvas
        # The middle canvas for the few rows that do not fit the short one.
        return plan.middle_canvas if call % MIDDLE_EVERY == MIDDLE_EVERY - 2 else plan.short_canvas

    def mask_range(self, step: int) -> tuple[float, float]:
        """Least and greatest masked share at this step."""
        plan = self.plan
        widened = (step - plan.mask_first) / max(plan.mask_full - plan.mask_first, 1)
        return 0.5 - (0.5 - LEAST_SHARE) * min(max(widened, 0.0), 1.0), 1.0

    def rows(self, step: int, count: int) -> list[tuple[str, list[int], list[int]]]:
        """`count` rows that fit the step's canvas: task, tokens of the prompt and of the answer."""
        rng = random.Random(f"{self.seed} {step}")
        weights = self.plan.tasks
        canvas, short = self.canvas(step), self.plan.short_canvas
        long = canvas == self.plan.long_canvas
        found: list[tuple[str, list[int], list[int]]] = []
        while len(found) < count:
            names = rng.choices(list(weights), list(weights.values()), k=count)
            made = [training_example(TASKS[name], rng, self.excluded) for name in names]
            prompts = self.tokenizer.encode_batch([row.prompt for row in made])
            answers = self.tokenizer.encode_batch([row.answer for row in made])
            for name, prompt, answer in zip(names, prompts, answers):
                need = len(prompt.ids) + len(answer.ids) + 3  # BOS, SEP and at least one EOS
                if long or (need <= short) == (canvas == short):
                    found.append((name, [self.bos, *prompt.ids, self.sep], answer.ids))
        return found[:count]

    def __call__(self, step: int) -> Batch:
        plan, canvas = self.plan, self.canvas(step)
        long = canvas == plan.long_canvas
        window = LONG_WINDOW if long else SHORT_WINDOW
        count = plan.batch * plan.short_canvas // canvas  # as many tokens whatever the canvas
        rng = np.random.default_rng([self.seed, step])
        low, high = self.mask_range(step)
        share = low + (high - low) * rng.permutation(np.arange(count) + rng.random(count)) / count
        noisy = np.full((count, canvas), self.eos, np.int32)
        start, length = np.zeros(count, np.int32), np.zeros(count, np.int32)
        target = np.full((count, window), self.eos, np.int32)
        weight = np.zeros((count, window), np.float32)
        rows = self.rows(step, count)
        for i, (_, prompt, answer) in enumerate(rows):
            start[i], size = len(prompt), min(window, canvas - len(prompt))
            if long:
                size = int(rng.integers(SHORT_WINDOW, size + 1))
            length[i] = start[i] + size
            target[i, : len(answer)] = answer
            hidden, scale = self._hide(rng, size, len(answer) + 1, float(share[i]))
            weight[i, :size] = hidden * scale
            noisy[i, : start[i]] = prompt
            noisy[i, start[i] : length[i]] = np.where(hidden, self.mask, target[i, :size])
        weight /= np.float32((length - start).sum())
        task = np.array([self.numbers[name] for name, *_ in rows], np.int32)
        return Batch(noisy, start, length, target, weight, task)

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
