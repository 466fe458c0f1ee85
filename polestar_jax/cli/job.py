"""The work behind `generate`: batches, random keys, rows, time."""

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
from tqdm import tqdm

from polestar_jax.cli.prompts import Prompt
from polestar_jax.cli.results import Results
from polestar_jax.cli.settings import describe
from polestar_jax.cli.timing import Stopwatch, measure
from polestar_jax.decoding.config import DecodeConfig
from polestar_jax.decoding.decode import DecodeResult, decode
from polestar_jax.decoding.prompts import prepare_prompts
from polestar_jax.errors import PolestarError

if TYPE_CHECKING:
    from polestar_jax.weights import Model

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Totals:
    """What a run did: rows kept from before and new ones, answer tokens, passes, seconds."""

    kept: int
    rows: int = 0
    tokens: int = 0
    passes: int = 0
    computing: float = 0.0
    compiling: float = 0.0

    def plus(self, rows: Sequence[dict[str, Any]], watch: Stopwatch) -> "Totals":
        return Totals(
            self.kept,
            self.rows + len(rows),
            self.tokens + sum(row["answer_tokens"] for row in rows),
            self.passes + sum(row["nfe"] for row in rows),
            self.computing + watch.computing,
            self.compiling + watch.compiling,
        )

    def sentence(self) -> str:
        kept = f" ({self.kept} kept from before)" if self.kept else ""
        if not self.rows:
            return f"nothing to do{kept}"
        return (
            f"{self.rows} prompt{'s' * (self.rows > 1)}{kept}: {self.tokens} answer tokens in "
            f"{self.computing:.2f} s ({self.tokens / max(self.computing, 1e-9):.1f} tokens/s, "
            f"{self.tokens / max(self.passes, 1):.2f} tokens per forward), plus "
            f"{self.compiling:.2f} s compiling"
        )


@dataclasses.dataclass(frozen=True)
class Job:
    """What to decode with. `raw` leaves out the chat template."""

    model: "Model"
    config: DecodeConfig
    seed: int
    raw: bool = False

    @property
    def random(self) -> bool:
        return self.config.temperature > 0 or self.config.remasking == "random"

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """What every row depends on besides its prompt."""
        seed = self.seed if self.random else None
        return describe(self.model, self.config, seed, self.raw)

    def check(self, prompts: Sequence[Prompt]) -> list[Any]:
        """What to hand to `decode` for each prompt; a prompt that cannot work is named by id."""
        contents = []
        for prompt in prompts:
            content: Any = prompt.content
            if self.raw and isinstance(content, str) and self.model.tokenizer is not None:
                content = self.model.tokenizer.encode(content)
            try:
                prepare_prompts(self.model, [content], self.config)
            except PolestarError as error:
                if len(prompts) == 1:
                    raise
                what = str(error).removeprefix("prompt 0 ")
                raise PolestarError(f"the prompt with id {prompt.id!r} {what}") from None
            contents.append(content)
        return contents

    def run(
        self,
        prompts: Sequence[Prompt],
        contents: Sequence[Any],
        results: Results,
        batch_size: int,
        quiet: bool,
    ) -> Totals:
        """Decode what `results` does not hold yet, batch by batch, and write it as it comes."""
        todo = [i for i, prompt in enumerate(prompts) if prompt.id not in results.finished]
        bar = tqdm(
            total=len(prompts),
            initial=len(prompts) - len(todo),
            unit="prompt",
            disable=quiet or len(prompts) < 2,
        )
        totals = Totals(kept=len(prompts) - len(todo))
        with bar:
            for start in range(0, len(todo), batch_size):
                indices = todo[start : start + batch_size]
                batch = min(batch_size, len(todo))
                rows, watch = self.decode(prompts, contents, indices, batch)
                results.write(rows)
                totals = totals.plus(rows, watch)
                bar.update(len(rows))
        return totals

    def decode(
        self, prompts: Sequence[Prompt], contents: Sequence[Any], indices: list[int], batch: int
    ) -> tuple[list[dict[str, Any]], Stopwatch]:
        """Rows of the prompts `indices`, and the time they took.

        A last batch is filled up to `batch` sequences: the same shape, and so the same compiled
        program, as before. Each prompt has a random key of its own, so neither the batches nor an
        interruption change its answer.
        """
        filled = indices + indices[-1:] * (batch - len(indices))
        key = None
        if self.random:
            fold = jax.vmap(jax.random.fold_in, (None, 0))
            key = fold(jax.random.key(self.seed), jnp.asarray(filled))
        with measure() as watch:
            batch_contents = [contents[i] for i in filled]
            result = interruptible(lambda: decode(self.model, batch_contents, self.config, key))
        rows = [
            self._row(prompts[index], result, row, len(filled), watch)
            for row, index in enumerate(indices)
        ]
        return rows, watch

    def _row(
        self, prompt: Prompt, result: DecodeResult, row: int, batch: int, watch: Stopwatch
    ) -> dict[str, Any]:
        """The JSON row of sequence `row` of a batch; times are the whole batch's."""
        stats, content = result.stats, prompt.content
        answer = int(stats.generated[row])
        return {
            "id": prompt.id,
            "prompt": content if isinstance(content, str) else list(content),
            "text": None if result.text is None else result.text[row],
            "tokens": result.tokens[row].tolist(),
            "nfe": int(result.nfe[row]),
            "answer_tokens": answer,
            "tokens_per_forward": round(float(stats.tokens_per_forward[row]), 4),
            "tokens_per_second": round(answer / max(watch.computing, 1e-9), 3),
            "batch": batch,
            "seconds": round(watch.computing, 6),
            "compile_seconds": round(watch.compiling, 6),
            "stats": {
                "commits": {name: int(n[row]) for name, n in stats.commits.items()},
                "passes": {name: int(n[row]) for name, n in stats.passes.items()},
                "refreshed_rows": int(stats.refreshed_rows[row]),
            },
            "settings": self.settings,
        }


def interruptible(work: Callable[[], T]) -> T:
    """Run `work` beside the main thread, which thus notices Ctrl-C while a program runs."""
    outcome: list[Any] = []

    def call() -> None:
        try:
            outcome.append((work(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
    value, error = outcome[0]
    if error is not None:
        raise error
    return value
