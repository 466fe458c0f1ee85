"""`polestar-jax generate`: prompts in, JSON rows out."""

from pathlib import Path
from typing import Any

import click

from polestar_jax.cli.job import Job
from polestar_jax.cli.options import compilation_cache_option, dtype_option
from polestar_jax.cli.prompts import read_prompts
from polestar_jax.cli.results import open_results
from polestar_jax.cli.settings import (
    EMBEDDED_LENGTHS,
    build_config,
    parse_assignments,
    policies,
)
from polestar_jax.decoding import cache as caches
from polestar_jax.decoding import commit as commits
from polestar_jax.decoding.presets import PRESETS
from polestar_jax.errors import PolestarError

FIELDS = ("gen_length", "block_length", "temperature", "threshold", "steps")


@click.command()
@click.argument("model")
@click.argument("prompt", required=False)
@click.option("--prompt-file", type=click.Path(path_type=Path), help="A text file: one prompt.")
@click.option(
    "--prompts-file",
    type=click.Path(path_type=Path),
    help='Many prompts: JSONL rows {"id": ..., "prompt": text or token ids}, or plain text with '
    "one prompt per line.",
)
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    help="Result file; rows it already holds are kept and not computed again  [default: standard "
    "output].",
)
@click.option("--overwrite", is_flag=True, help="Drop what the result file holds.")
@click.option(
    "--policy", default="fast-dllm-dual", show_default=True, help=f"Of: {', '.join(PRESETS)}."
)
@click.option(
    "--cache",
    metavar="NAME",
    help=f"In place of the preset's cache policy: {', '.join(sorted(policies(caches)))}.",
)
@click.option(
    "--commit",
    metavar="NAME",
    help=f"In place of the preset's commit policy: {', '.join(sorted(policies(commits)))}.",
)
@click.option("--gen-length", type=int, help="Tokens to generate  [default: 256; embedded: 64].")
@click.option("--block-length", type=int, help="Tokens per block  [default: 32].")
@click.option("--temperature", type=float, help="0 takes the best token  [default: 0].")
@click.option("--threshold", type=float, help="Confidence at which a token is accepted.")
@click.option("--steps", type=int, help="Passes of a fixed schedule.")
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Any other field of the configuration or its policies; may be repeated.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    show_default=True,
    help="For temperature > 0.",
)
@dtype_option
@click.option("--batch-size", type=click.IntRange(1), default=1, show_default=True)
@click.option("--raw", is_flag=True, help="No chat template around the prompts.")
@click.option("--quiet", "-q", is_flag=True, help="No progress bar and no summary.")
@compilation_cache_option
def generate(
    model: str,
    prompt: str | None,
    prompt_file: Path | None,
    prompts_file: Path | None,
    output: Path | None,
    overwrite: bool,
    policy: str,
    cache: str | None,
    commit: str | None,
    assignments: tuple[str, ...],
    seed: int,
    dtype: str | None,
    batch_size: int,
    raw: bool,
    quiet: bool,
    **common: Any,
) -> None:
    """Answer PROMPT ("-": standard input) with MODEL, a directory or "embedded".

    Writes one JSON row per prompt: id, prompt, text, tokens, nfe (forward passes), answer_tokens,
    tokens_per_forward, tokens_per_second (without compilation), seconds, compile_seconds, stats
    and settings. The same command resumes an interrupted --output file.
    """
    from polestar_jax.weights import EMBEDDED, load

    fields = parse_assignments(assignments)
    for name in FIELDS:
        if common[name] is not None:
            if name in fields:
                raise PolestarError(f"{name} is given twice, as an option and by --set; keep one")
            fields[name] = common[name]
    if model == EMBEDDED and not EMBEDDED_LENGTHS.keys() & fields.keys():
        fields |= EMBEDDED_LENGTHS
    config = build_config(policy, cache, commit, fields)
    prompts = read_prompts(prompt, prompt_file, prompts_file)
    job = Job(load(model, dtype=dtype), config, seed, raw)
    contents = job.check(prompts)
    with open_results(output, prompts, job.settings, overwrite) as results:
        totals = job.run(prompts, contents, results, batch_size, quiet)
    if not quiet:
        click.echo(totals.sentence(), err=True)
