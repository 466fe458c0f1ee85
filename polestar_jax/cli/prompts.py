"""Where prompts come from: an argument, a text file, a list of prompts with ids."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from polestar_jax.errors import PolestarError


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt: text, or token ids already; `id` is unique in a run and kept in the output."""

    id: str | int
    content: str | tuple[int, ...]


def read_prompts(
    argument: str | None, prompt_file: Path | None, prompts_file: Path | None
) -> list[Prompt]:
    """Prompts from exactly one of three sources, in order.

    Args:
        argument: the prompt itself; "-" reads all of standard input.
        prompt_file: a text file that is one prompt.
        prompts_file: `*.jsonl`: one object per line with `prompt` (text, or a list of token ids)
            and optionally `id` (text or whole number; default: the row's number from 0). Any
            other name: a text file with one prompt per line, empty lines skipped.

    Raises:
        PolestarError: no source or several, an unreadable or empty file, a bad row (named by its
            line), or an id given twice.
    """
    sources = [s for s in (argument, prompt_file, prompts_file) if s is not None]
    if len(sources) != 1:
        raise PolestarError(
            f"give one source of prompts, got {len(sources)}: a PROMPT, --prompt-file or "
            "--prompts-file"
        )
    if argument is not None:
        return [Prompt(0, sys.stdin.read() if argument == "-" else argument)]
    if prompt_file is not None:
        return [Prompt(0, _read(prompt_file))]
    assert prompts_file is not None
    lines = [(n, line) for n, line in enumerate(_read(prompts_file).split("\n"), 1) if line.strip()]
    if not lines:
        raise PolestarError(f"{prompts_file} holds no prompt; write one per line")
    if prompts_file.suffix.lower() != ".jsonl":
        return [Prompt(index, line.rstrip("\r")) for index, (_, line) in enumerate(lines)]
    prompts = [
        _row(index, line, f"line {number} of {prompts_file}")
        for index, (number, line) in enumerate(lines)
    ]
    seen: dict[str | int, int] = {}
    for (number, _), prompt in zip(lines, prompts):
        if prompt.id in seen:
            raise PolestarError(
                f"lines {seen[prompt.id]} and {number} of {prompts_file} share the id "
                f"{prompt.id!r}; give every row its own"
            )
        seen[prompt.id] = number
    return prompts


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise PolestarError(
            f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from None
    except OSError as error:
        raise PolestarError(f"cannot read {path}: {error.strerror}") from None


def _row(index: int, line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise PolestarError(f"{where} is not valid JSON ({error})") from None
    if not isinstance(row, dict) or "prompt" not in row:
        raise PolestarError(f'{where} must be an object with the field "prompt", got {line[:60]!r}')
    key, content = row.get("id", index), row["prompt"]
    if isinstance(key, bool) or not isinstance(key, str | int):
        raise PolestarError(f"the id in {where} must be text or a whole number, got {key!r}")
    if _is_token_list(content):
        return Prompt(key, tuple(content))
    if not isinstance(content, str):
        raise PolestarError(
            f"the prompt in {where} must be text or a list of token ids, got {content!r}"
        )
    return Prompt(key, content)


def _is_token_list(content: Any) -> bool:
    return isinstance(content, list) and all(
        isinstance(token, int) and not isinstance(token, bool) for token in content
    )
